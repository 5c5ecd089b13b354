import pytest
import torch

from megatron_glue.ops import permute as oracle
from megatron_glue.ops.grouping import group_tokens
from tests.support.tolerances import assert_close
from tests.support.triton_kernels import ROW_STRIDE, far_rows, kernel_device

NAN = float("nan")


@pytest.fixture(scope="module")
def kernels():
    kernel_device()
    from megatron_glue.backends.triton import permute

    return permute


def case(num_tokens, top_k, num_experts, width, *, lowest=0, dtype=torch.float64, device=None):
    generator = torch.Generator().manual_seed(num_tokens * 100 + top_k * 10 + num_experts)
    ids = torch.randint(lowest, num_experts, (num_tokens, top_k), generator=generator)
    x = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    weights = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64)
    device = device or kernel_device()
    groups = group_tokens(ids.to(device), num_experts, implementation="torch")
    return groups, x.to(device, dtype).requires_grad_(), weights.to(device, dtype).requires_grad_()


def there_and_back(way, groups, x, weights, *, has_sentinels):
    """Values and gradients; the rows behind the last offset are NaN between the two, in both directions."""
    scale = torch.linspace(1, 2, groups.num_pairs, dtype=x.dtype, device=x.device)
    scale = scale.masked_fill(torch.arange(groups.num_pairs, device=x.device) >= groups.offsets_E[-1], NAN)
    rows = way.permute_rows(x, groups, has_sentinels=has_sentinels)
    y = way.unpermute_rows(rows * scale[:, None], groups, weights, has_sentinels=has_sentinels)
    probe = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return {"y": y, **dict(zip(("x", "weights"), torch.autograd.grad((y * probe).sum(), (x, weights)), strict=True))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "width", "lowest"),
    [(0, 2, 3, 0), (1, 1, 1, 0), (9, 3, 7, -1), (6, 4, 16, 0), (5, 2, 8, -1)],
)
def test_there_and_back_equals_the_oracle(kernels, dtype, num_tokens, top_k, width, lowest):
    groups, x, weights = case(num_tokens, top_k, 4, width, lowest=lowest, dtype=dtype)
    ways = [there_and_back(way, groups, x, weights, has_sentinels=lowest < 0) for way in (kernels, oracle)]
    for name, expected in ways[1].items():
        assert ways[0][name].dtype == expected.dtype, name
        assert_close(ways[0][name], expected, what=name)


def test_rows_wider_than_one_tile(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_MAX_TILE", 8)
    groups, x, weights = case(5, 2, 3, 21, lowest=-1)
    ways = [there_and_back(way, groups, x, weights, has_sentinels=True) for way in (kernels, oracle)]
    for name, expected in ways[1].items():
        assert_close(ways[0][name], expected, what=name)


def test_fp32_weights_of_bf16_rows_are_used_in_bf16_and_get_an_fp32_gradient(kernels):
    groups, y, _ = case(6, 2, 3, 4, dtype=torch.bfloat16)
    rows = kernels.permute_rows(y, groups)
    weights = torch.full((6, 2), 1.0 + 2**-12, device=y.device, requires_grad=True)
    out = kernels.unpermute_rows(rows, groups, weights)
    assert torch.equal(out, (2 * y.detach().float()).bfloat16())
    (grad,) = torch.autograd.grad(out.float().sum(), weights)
    assert grad.dtype == torch.float32
    assert_close(grad, y.detach().float().sum(1, keepdim=True).expand(6, 2))


def test_gradient_of_either_input_alone(kernels):
    groups, x, weights = case(5, 2, 3, 4)
    rows = kernels.permute_rows(x.detach(), groups)
    (alone,) = torch.autograd.grad(kernels.unpermute_rows(rows, groups, weights).sum(), weights)
    (expected,) = torch.autograd.grad(oracle.unpermute_rows(rows, groups, weights).sum(), weights)
    assert_close(alone, expected)
    rows = rows.requires_grad_()
    (alone,) = torch.autograd.grad(kernels.unpermute_rows(rows, groups, weights.detach()).sum(), rows)
    (expected,) = torch.autograd.grad(oracle.unpermute_rows(rows, groups, weights.detach()).sum(), rows)
    assert_close(alone, expected)


def test_f57_tail_is_never_read_and_its_gradient_is_zero(kernels):
    groups = group_tokens(torch.tensor([[0, -1], [2, 1], [1, -1]], device=kernel_device()), 2, implementation="torch")
    poison = torch.zeros(6, 4, device=kernel_device())
    poison[3:] = NAN
    x = torch.randn(3, 4, device=kernel_device(), requires_grad=True)
    kernels.permute_rows(x, groups).backward(torch.ones_like(poison) + poison)
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1.0, 1.0, 1.0]
    y = (torch.ones_like(poison) + poison).requires_grad_()
    weights = torch.ones(3, 2, device=kernel_device(), requires_grad=True)
    out = kernels.unpermute_rows(y, groups, weights)
    out.sum().backward()
    assert y.grad is not None
    assert weights.grad is not None
    assert out[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert y.grad[:, 0].tolist() == [1.0] * 3 + [0.0] * 3
    assert weights.grad.tolist() == [[4.0, 0.0], [0.0, 4.0], [4.0, 0.0]]


def test_bf16_sums_in_fp32(kernels):
    """A bf16 running sum would lose the small ones; the result has a bf16 of its own."""
    groups = group_tokens(torch.arange(9, device=kernel_device())[None], 9, implementation="torch")
    y = torch.tensor([[256.0]] + [[0.5]] * 8, dtype=torch.bfloat16, device=kernel_device())
    assert kernels.unpermute_rows(y, groups, torch.ones(1, 9, device=y.device)).tolist() == [[260.0]]


def test_wrong_number_of_tokens_is_refused(kernels):
    groups = group_tokens(torch.zeros(3, 2, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="4 tokens"):
        kernels.permute_rows(torch.zeros(4, 2), groups)
    with pytest.raises(ValueError, match="4 tokens"):
        kernels.unpermute_rows(torch.zeros(6, 2), groups, torch.zeros(4, 2))


def test_f59_rows_are_found_past_two_to_the_31_elements(kernels):
    """Every tensor that a kernel reads or writes row by row, with rows ROW_STRIDE apart: the last needs 64 bits."""
    assert ROW_STRIDE < 2**31 < 2 * ROW_STRIDE
    groups, near, weights = case(3, 1, 3, 16, dtype=torch.bfloat16)
    x = far_rows(near.detach()).requires_grad_()
    rows = kernels.permute_rows(x, groups)
    assert torch.equal(rows, near[groups.order_N])
    out = kernels.unpermute_rows(far_rows(rows.detach()).requires_grad_(), groups, weights)
    expected = oracle.unpermute_rows(rows.detach().requires_grad_(), groups, weights)
    assert_close(out, expected)
    grad = far_rows(torch.randn(3, 16, device=near.device).bfloat16())
    for actual, wanted in zip(
        torch.autograd.grad((rows, out), (x, weights), (grad, grad)),
        torch.autograd.grad((oracle.permute_rows(near, groups), expected), (near, weights), (grad, grad)),
        strict=True,
    ):
        assert_close(actual, wanted)


def test_f59_rows_are_written_past_two_to_the_31_elements(kernels):
    groups, near, weights = case(3, 1, 3, 16, dtype=torch.bfloat16)
    sizes = {"WIDTH": 16, "TOP_K": 1, "TILE": 16}
    spread = far_rows(torch.zeros_like(near))
    kernels._copy_to_rows[(3, 1)](near.detach(), groups.inverse_N, spread, 16, ROW_STRIDE, **sizes)
    assert torch.equal(spread, near[groups.order_N])
    gathered = far_rows(torch.zeros_like(near))
    end, flags = groups.offsets_E[-1:], {"HAS_SENTINELS": False, "SUM_DTYPE": kernels.tl.float32}
    kernels._sum_rows[(3, 1)](
        spread, groups.inverse_N, weights, end, gathered, ROW_STRIDE, ROW_STRIDE, HAS_WEIGHTS=False, **flags, **sizes
    )
    assert torch.equal(gathered, near)
    grad_rows = far_rows(torch.zeros_like(near))
    ones, dots = torch.ones_like(weights), torch.zeros_like(weights)
    kernels._spread_gradient[(3,)](
        gathered, spread, groups.inverse_N, ones, end, grad_rows, dots, ROW_STRIDE, ROW_STRIDE, ROW_STRIDE,
        NEEDS_ROWS=True, NEEDS_WEIGHTS=True, **flags, **sizes,
    )  # fmt: skip
    assert torch.equal(grad_rows, spread)
    assert_close(dots, near.detach().float().square().sum(1, keepdim=True).bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_real_sizes_equal_the_oracle(kernels, dtype):
    groups, x, weights = case(4096, 8, 64, 2048, lowest=-1, dtype=dtype)
    ways = [there_and_back(way, groups, x, weights, has_sentinels=True) for way in (kernels, oracle)]
    for name, expected in ways[1].items():
        assert_close(ways[0][name], expected, what=name)
