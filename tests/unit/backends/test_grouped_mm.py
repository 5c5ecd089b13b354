import pytest
import torch
import torch.nn.functional as F

from megatron_glue.backends.expert_products import padded_rows
from megatron_glue.backends.grouped_mm import (
    FusedExperts,
    GroupedMMLoop,
    GroupedMMWithReads,
    grouped_mm_torch,
    reads_offsets,
)
from megatron_glue.backends.grouped_mm_cpu import GroupedMMOnCpu
from megatron_glue.backends.matmul_onednn import OnednnMatMul
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.matmul import TORCH_MATMUL
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

BACKENDS = {
    "torch": grouped_mm_torch,
    "onednn": GroupedMMOnCpu(OnednnMatMul()),
    "cores": GroupedMMOnCpu(TORCH_MATMUL),
    "loop": GroupedMMLoop(HostReader()),
}


def by_hand(x, weight, ends):
    starts = [0, *ends[:-1]]
    return torch.cat([x[s:e] @ weight[i] for i, (s, e) in enumerate(zip(starts, ends, strict=True))])


@pytest.mark.parametrize("ends", [[2, 5, 9], [0, 9, 9], [9, 9, 9], [0, 0, 0]])
@pytest.mark.parametrize("widths", [(8, 12), (3, 5), (8, 5), (3, 8)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_one_product_per_expert(ends, widths, backend):
    grouped_mm = BACKENDS[backend]
    x = torch.randn(ends[-1], widths[0], requires_grad=True)
    weight = torch.randn(3, *widths, requires_grad=True)
    expected = by_hand(x, weight, ends)
    actual = grouped_mm(x, weight, torch.tensor(ends))
    assert_close(actual, expected)
    probe = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad(actual, (x, weight), probe), torch.autograd.grad(expected, (x, weight), probe), strict=True
    ):
        assert_close(a, e)


@pytest.mark.parametrize("backend", ["torch", "onednn", "cores"])
def test_expanded_gradient_and_transposed_weight(backend):
    x = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(3, 12, 8, requires_grad=True)
    BACKENDS[backend](x, weight.transpose(1, 2), torch.tensor([2, 2, 6])).sum().backward()
    assert x.grad is not None
    assert_close(x.grad[:2], weight[0].sum(0).expand(2, 8))
    assert weight.grad is not None
    assert not weight.grad[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_last_offset_reach_nothing(backend):
    grouped_mm = BACKENDS[backend]
    x = torch.randn(9, 8)
    x[5:] = float("nan")
    x.requires_grad_()
    weight = torch.randn(3, 8, 4, requires_grad=True)
    y = grouped_mm(x, weight, torch.tensor([2, 5, 5]))
    y[:5].sum().backward()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad[:5]).all()


@pytest.mark.parametrize("backend", ["torch", "onednn", "cores"])
@pytest.mark.parametrize("widths", [(8, 12), (3, 5)])
def test_f57_zero_tail_is_zero_in_both_passes(widths, backend):
    x = torch.randn(9, widths[0])
    x[5:] = float("nan")
    x.requires_grad_()
    weight = torch.randn(3, *widths, requires_grad=True)
    y = BACKENDS[backend](x, weight, torch.tensor([2, 5, 5]), zero_tail=True)
    assert torch.equal(y[5:], torch.zeros(4, widths[1]))
    probe = torch.ones_like(y)
    probe[5:] = float("nan")
    y.backward(probe)
    assert x.grad is not None
    assert torch.equal(x.grad[5:], torch.zeros(4, widths[0]))
    assert torch.isfinite(x.grad).all()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


def test_one_call_reads_nothing_and_the_loop_reads_once():
    x, weight, offsets = torch.randn(6, 8), torch.randn(3, 8, 4), torch.tensor([2, 2, 6])
    with OperatorWatch() as watch:
        grouped_mm_torch(x, weight, offsets, zero_tail=True)
    assert watch.synchronising == []
    reader = HostReader()
    GroupedMMLoop(reader)(x, weight, offsets)
    assert reader.count == 1


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "expected"),
    [
        ("cuda", (9, 0), torch.bfloat16, False),
        ("cuda", (10, 0), torch.bfloat16, False),
        ("cuda", (9, 0), torch.float32, True),
        ("cuda", (8, 0), torch.bfloat16, True),
        ("cuda", (12, 0), torch.bfloat16, True),
        ("cuda", None, torch.bfloat16, True),
        ("cpu", None, torch.float32, False),
    ],
)
def test_the_host_waits_except_where_torch_has_a_kernel(monkeypatch, device, capability, dtype, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert reads_offsets(torch.device(device), dtype) is expected


@pytest.mark.parametrize(
    ("x_needs_grad", "weight_needs_grad", "reads"), [(True, True, 3), (False, True, 2), (True, False, 2)]
)
@pytest.mark.parametrize("num_rows", [6, 0])
def test_reads_of_the_library_are_counted_in_both_passes(x_needs_grad, weight_needs_grad, reads, num_rows):
    x = torch.randn(num_rows, 8, requires_grad=x_needs_grad)
    weight = torch.randn(3, 8, 4, requires_grad=weight_needs_grad)
    offsets = torch.tensor([2, 2, 6]).clamp(max=num_rows)
    reader = HostReader()
    y = GroupedMMWithReads(reader)(x, weight, offsets)
    assert reader.count == 1
    assert torch.equal(y, grouped_mm_torch(x, weight, offsets))
    y.sum().backward()
    assert reader.count == reads


def test_evaluation_counts_one_read():
    reader = HostReader()
    with torch.no_grad():
        GroupedMMWithReads(reader)(torch.randn(6, 8), torch.randn(3, 8, 4, requires_grad=True), torch.tensor([2, 2, 6]))
    assert reader.count == 1


@pytest.mark.parametrize("backend", ["onednn", "cores"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_of_other_experts_that_pad_a_product_change_nothing(num_threads, backend):
    """Uneven experts, their neighbours full of large numbers; the same bits on any number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        ends = [3, 40, 40, 175, 176, 300]
        x = torch.randn(310, 16)
        x[40:175] *= 1e6
        x[300:] = float("nan")
        x.requires_grad_()
        weight = torch.randn(6, 16, 8, requires_grad=True)
        y = BACKENDS[backend](x, weight, torch.tensor(ends))
        assert_close(y[:300], by_hand(x, weight, ends))
        probe = torch.randn(310, 8)
        probe[300:] = float("nan")
        grads = torch.autograd.grad(y, (x, weight), probe)
        expected = torch.autograd.grad(by_hand(x, weight, ends), (x, weight), probe[:300])
        assert_close(grads[0][:300], expected[0][:300])
        for own, wanted in zip(grads[1], expected[1], strict=True):
            assert_close(own, wanted)
    finally:
        torch.set_num_threads(before)


def test_numbers_of_rows_come_in_few_sizes():
    sizes = {padded_rows(n) for n in range(1, 4097)}
    assert len(sizes) <= 24
    assert all(n <= padded_rows(n) <= max(n + n // 4, -(-n // 32) * 32) for n in range(1, 4097))


def test_products_of_any_step_have_one_of_these_sizes():
    """The last expert's rows too: every other size would be a kernel that is compiled and kept."""
    seen = set()

    class Watching(OnednnMatMul):
        def nt(self, a, b, bias=None):
            seen.update((a.shape[0], a.shape[1]))
            return super().nt(a, b, bias)

    grouped_mm, generator = GroupedMMOnCpu(Watching()), torch.Generator().manual_seed(0)
    weight = torch.randn(4, 8, 16, requires_grad=True)
    for _ in range(20):
        counts = torch.randint(0, 90, (4,), generator=generator)
        x = torch.randn(int(counts.sum()) + 1, 8, requires_grad=True)
        grouped_mm(x, weight, counts.cumsum(0)).sum().backward()
        feed_forward(grouped_mm, x, weight.transpose(1, 2), torch.randn(4, 8, 8), counts.cumsum(0)).sum().backward()
    assert seen <= {8, 16, 32, 64, 96}


def test_an_infinite_gradient_stays_with_its_expert():
    x, weight = torch.randn(80, 8, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True)
    probe = torch.randn(80, 16)
    probe[20] = float("inf")
    BACKENDS["onednn"](x, weight, torch.tensor([20, 80])).backward(probe)
    assert weight.grad is not None
    assert torch.isfinite(weight.grad[0]).all()
    assert not torch.isfinite(weight.grad[1]).all()


def test_no_grad_of_what_nobody_asks_for():
    """A zero-bubble pipeline asks for the gradients of inputs and of weights in two passes."""
    calls = []

    class Counting(OnednnMatMul):
        def nn(self, a, b):
            calls.append("nn")
            return super().nn(a, b)

    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(2, 4, 6, requires_grad=True)
    y = GroupedMMOnCpu(Counting())(x * 1.0, weight * 1.0, torch.tensor([3, 8]))
    calls.clear()
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert len(calls) == 2


def feed_forward(grouped_mm, x, gate_up, down, offsets, activation="swiglu"):
    assert isinstance(grouped_mm, FusedExperts)
    return grouped_mm.feed_forward(x, gate_up, down, offsets, activation)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("ends", [[3, 40, 40, 175, 176, 300], [0, 0, 0, 0, 0, 5], [0, 0, 0, 0, 0, 0]])
@pytest.mark.parametrize("backend", ["onednn", "cores"])
def test_a_fused_feed_forward_equals_its_products_one_by_one(backend, ends, activation):
    """Values and gradients; experts without rows; rows that are nobody's stay out of both passes."""
    num_parts = 2 if activation == "swiglu" else 1
    x = torch.randn(ends[-1] + 7, 16)
    x[ends[-1] :] = float("nan")
    gate_up, down = torch.randn(6, 12 * num_parts, 16), torch.randn(6, 16, 12)
    leaves = (x, gate_up, down)
    for leaf in leaves:
        leaf.requires_grad_()

    def one_by_one():
        starts, outs = [0, *ends[:-1]], []
        for e, (start, end) in enumerate(zip(starts, ends, strict=True)):
            hidden = x[start:end] @ gate_up[e].t()
            if activation == "swiglu":
                gate, up = hidden.chunk(2, dim=1)
                hidden = F.silu(gate) * up
            else:
                hidden = F.gelu(hidden, approximate="tanh")
            outs.append(hidden @ down[e].t())
        return torch.cat(outs)

    actual = feed_forward(BACKENDS[backend], x, gate_up, down, torch.tensor(ends), activation)
    expected = one_by_one()
    assert_close(actual[: ends[-1]], expected)
    assert not actual[ends[-1] :].any()
    probe = torch.randn_like(actual)
    probe[ends[-1] :] = float("nan")
    own = torch.autograd.grad(actual, leaves, probe)
    wanted = torch.autograd.grad(expected, leaves, probe[: ends[-1]])
    assert not own[0][ends[-1] :].any()
    assert_close(own[0][: ends[-1]], wanted[0][: ends[-1]])
    for got, want in zip(own[1:], wanted[1:], strict=True):
        assert_close(got, want)


def test_a_fused_feed_forward_computes_only_gradients_that_are_asked_for():
    """A zero-bubble pipeline asks for those of inputs and of weights in two passes."""
    calls = []

    class Counting(OnednnMatMul):
        def nt(self, a, b, bias=None):
            calls.append("product")
            return super().nt(a, b, bias)

    x, gate_up, down = (torch.randn(*shape, requires_grad=True) for shape in ((8, 4), (1, 12, 4), (1, 4, 6)))
    y = feed_forward(GroupedMMOnCpu(Counting()), x * 1.0, gate_up * 1.0, down * 1.0, torch.tensor([8]))
    for targets, num_products in (((x,), 2), ((gate_up, down), 3), ((x, gate_up, down), 4)):
        calls.clear()
        torch.autograd.grad(y.sum(), targets, retain_graph=True)
        assert len(calls) == num_products


def test_inference_mode():
    with torch.inference_mode():
        y = BACKENDS["onednn"](torch.randn(8, 4), torch.randn(2, 4, 6), torch.tensor([3, 8]))
    assert torch.isfinite(y).all()
