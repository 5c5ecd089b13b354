from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.backends.grouped_mm import reads_offsets
from megatron_glue.moe.layer import MoELayer
from megatron_glue.types import ForwardContext, PackedSequence, RouterRecord, SavedDecisions
from tests.support.moe_cases import MoECase, dense_layer, random_rows
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

BALANCED = MoECase(aux_loss_coeff=0.1, z_loss_coeff=0.01)


def context_of(*lengths: int, pad: int = 0, **changes) -> ForwardContext:
    return ForwardContext(PackedSequence.from_lengths(lengths, num_pad_tokens=pad), **changes)


def grads_of(layer: MoELayer, x: Tensor, context: ForwardContext) -> dict[str, Tensor]:
    """Gradients of a fixed scalar of the output, auxiliary losses included, by parameter name; the input's as "x"."""
    out = layer(x, context)
    probe = random_rows(*out.shape, seed=9).detach()
    names = [name for name, _ in layer.named_parameters()]
    grads = torch.autograd.grad((out * probe).sum(), (x, *layer.parameters()))
    return dict(zip(["x", *names], grads, strict=True)) | {"out": out}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float | None = None) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert_close(actual[name], wanted, what=name, tolerance=tolerance)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_f55_output_and_every_gradient_equal_the_dense_oracle(one_pass, gated):
    """The router's gradient too, with auxiliary losses off: it learns from what the experts said."""
    layer = MoECase(one_pass=one_pass, gated=gated).build()
    x = random_rows(14, 8)
    actual = grads_of(layer, x, context_of(14))
    ids = layer.router(x).expert_ids_TK
    out = dense_layer(layer, x, ids)
    probe = random_rows(14, 8, seed=9).detach()
    expected = torch.autograd.grad((out * probe).sum(), (x, *layer.parameters()))
    assert actual["router.weight"].abs().max() > 1e-3
    assert_close(actual["out"], out)
    for (name, value), wanted in zip(list(actual.items())[:-1], expected, strict=True):
        assert_close(value, wanted, what=name)


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("balance_documents", [True, False])
def test_both_ways_agree(num_tokens, score_function, balance_documents):
    case = BALANCED.with_(
        num_experts=16, score_function=score_function, weight_scale=1.5, balance_documents=balance_documents
    )
    x = random_rows(num_tokens + 2, 8)
    context = context_of(num_tokens, pad=2)
    assert_same(grads_of(case.build(), x, context), grads_of(case.with_(one_pass=False).build(), x, context))


@pytest.mark.parametrize("one_pass", [True, False])
def test_f62_padding_is_never_routed_counted_or_trained_on(one_pass):
    """48 real tokens of 64 give the statistics, losses and gradients of a batch of 48."""
    layer = BALANCED.with_(one_pass=one_pass).build()
    x = random_rows(64, 8)
    with torch.no_grad():
        x[48:] = float("nan")
    padded_log: list[RouterRecord] = []
    plain_log: list[RouterRecord] = []
    padded = grads_of(layer, x, context_of(30, 18, pad=16, router_log=padded_log))
    short = x[:48].detach().clone().requires_grad_()
    out = layer(short, context_of(30, 18, router_log=plain_log))
    probe = random_rows(64, 8, seed=9).detach()[:48]
    grads = torch.autograd.grad((out * probe).sum(), (short, *layer.parameters()))
    assert torch.equal(padded["out"][:48], out)
    assert not padded["out"][48:].any()
    assert not padded["x"][48:].any()
    assert torch.equal(padded["x"][:48], grads[0])
    for (name, _), wanted in zip(layer.named_parameters(), grads[1:], strict=True):
        assert torch.equal(padded[name], wanted), name
    assert torch.equal(padded_log[0].counts_E, plain_log[0].counts_E)
    assert padded_log[0].counts_E.sum() == 96
    assert torch.equal(padded_log[0].aux_loss, plain_log[0].aux_loss)
    assert torch.equal(padded_log[0].z_loss, plain_log[0].z_loss)
    assert padded_log[0].num_dropped_pairs == 0


@pytest.mark.parametrize("one_pass", [True, False])
def test_f50_recompute_logs_nothing_and_decides_nothing(one_pass):
    """Between forward and recompute the router is disturbed: a new decision would differ, the saved one does not."""
    layer = BALANCED.with_(one_pass=one_pass, has_expert_bias=True).build()
    x = random_rows(20, 8)
    log: list[RouterRecord] = []
    context = context_of(20, router_log=log, decisions=SavedDecisions())
    with torch.no_grad():
        first = layer(x, context)
    assert len(log) == 1
    again = replace(context, is_recompute=True)
    plain = grads_of(layer, x, context_of(20))
    reads = layer.config.host_reader.count
    assert layer.router.expert_bias_E is not None
    layer.router.expert_bias_E[3] = 100.0
    with OperatorWatch() as watch:
        recomputed = grads_of(layer, x, again)
    assert len(log) == 1
    assert torch.equal(recomputed["out"], first)
    assert_same(recomputed, plain)
    assert not [name for name in watch.calls if "sort" in name or "topk" in name]
    if one_pass:
        assert layer.config.host_reader.count == reads == 0


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 20])
def test_f50_the_activation_manager_recomputes_the_same_layer(one_pass, num_tokens):
    """Bit-equal gradients, one log entry, and (one pass) no second grouping."""
    layer = BALANCED.with_(one_pass=one_pass).build()
    x = random_rows(num_tokens + 3, 8)
    log: list[RouterRecord] = []
    plain = grads_of(layer, x, context_of(num_tokens, pad=3))
    manager = ActivationManager(ActivationPlan(recompute=True), "cpu")
    out = manager.run_block(layer, x, context_of(num_tokens, pad=3, router_log=log))
    probe = random_rows(num_tokens + 3, 8, seed=9).detach()
    with OperatorWatch() as watch:
        grads = torch.autograd.grad((out * probe).sum(), (x, *layer.parameters()))
    assert torch.equal(out, plain["out"])
    for (name, wanted), actual in zip(list(plain.items())[:-1], grads, strict=True):
        assert torch.equal(actual, wanted), name
    assert len(log) == 1
    assert "aten::softmax" in watch.calls or "aten::_softmax" in watch.calls
    assert not [name for name in watch.calls if "sort" in name or "topk" in name]


def test_f80_one_pass_makes_no_host_read_in_forward_and_backward():
    """On the torch way of grouping; a CPU's own NumPy way has no device to wait for and is the named exception."""
    layer = BALANCED.with_(balance_documents=True).build()
    layer.config = replace(layer.config, grouping_implementation="torch")
    layer.experts._grouped_mm = lambda x, weight, offsets: torch.bmm(x.expand(weight.shape[0], -1, -1), weight).sum(
        0
    )  # F.grouped_mm's CPU kernel reads its offsets; the CUDA kernel does not
    x = random_rows(20, 8)
    with OperatorWatch() as watch:
        layer(x, context_of(12, 5, pad=3, router_log=[])).square().sum().backward()
    assert len(watch.calls) > 50
    assert watch.synchronising == []
    assert layer.config.host_reader.count == 0


def test_loop_counts_one_read_per_expert():
    layer = MoECase(num_experts=6, one_pass=False).build()
    layer(random_rows(5, 8), context_of(5))
    assert layer.config.host_reader.count == 6


@pytest.mark.parametrize("one_pass", [True, False])
def test_f72_ties_go_to_the_first_experts(one_pass):
    layer = MoECase(one_pass=one_pass).build()
    nn.init.zeros_(layer.router.weight)
    log: list[RouterRecord] = []
    layer(random_rows(6, 8), context_of(6, router_log=log))
    assert log[0].counts_E.tolist() == [6, 6, 0, 0]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_f64_aux_gradient_does_not_depend_on_accumulation(num_micro_batches):
    """Identical copies of one sequence, so that the statistic itself is the same at any split."""
    layer = BALANCED.build()
    base = random_rows(10, 8).detach()
    copies_each = 4 // num_micro_batches
    grad = torch.zeros_like(layer.router.weight)
    for _ in range(num_micro_batches):
        x = base.repeat(copies_each, 1).requires_grad_()
        context = context_of(*[10] * copies_each, aux_loss_scale=1.0 / num_micro_batches)
        out = layer(x, context)
        grad += torch.autograd.grad((out * 0.0).sum(), layer.router.weight)[0]
    x = base.clone().requires_grad_()
    (expected,) = torch.autograd.grad((layer(x, context_of(10)) * 0.0).sum(), layer.router.weight)
    assert expected.abs().max() > 1e-4
    assert_close(grad, expected)


def test_documents_scope_does_not_depend_on_packing():
    """Two documents in one pack, or each in its own micro-batch: token-weighted, the same pressure."""
    case = MoECase(aux_loss_coeff=1.0, balance_documents=True)
    layer = case.build()
    x = random_rows(12, 8)
    together: list[RouterRecord] = []
    apart: list[RouterRecord] = []
    layer(x, context_of(4, 8, router_log=together))
    layer(x[:4], context_of(4, router_log=apart))
    layer(x[4:], context_of(8, router_log=apart))
    expected = (4 * apart[0].aux_loss + 8 * apart[1].aux_loss) / 12
    assert_close(together[0].aux_loss, expected)


def test_f65_each_layer_reports_and_balances_for_itself():
    log: list[RouterRecord] = []
    for index, favourite in enumerate((0, 1)):
        layer = MoECase(top_k=1, layer_index=index, has_expert_bias=True).build()
        assert layer.router.expert_bias_E is not None
        layer.router.expert_bias_E[favourite] = 100.0
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[favourite] = 1.0
        layer(torch.ones(8, 8, requires_grad=True), context_of(8, router_log=log))
    assert [record.layer_index for record in log] == [0, 1]
    assert [record.counts_E.tolist() for record in log] == [[8, 0, 0, 0], [0, 8, 0, 0]]
    assert all(record.aux_loss > 3.9 for record in log)


def test_shared_expert_sees_every_valid_token_and_is_added():
    class Doubling(nn.Module):
        def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
            assert x_TD.shape[0] == context.sequence.num_valid_tokens
            return 2 * x_TD

    x = random_rows(9, 8)
    context = context_of(7, pad=2)
    without = MoECase().build()(x, context)
    with_shared = MoECase().build(shared_expert=Doubling())(x, context)
    assert_close(with_shared[:7], without[:7] + 2 * x[:7])
    assert not with_shared[7:].any()


@pytest.mark.parametrize("one_pass", [True, False])
def test_bf16_layer_stays_near_fp32(one_pass):
    case = MoECase(one_pass=one_pass, hidden_size=32, ffn_size=16)
    layer = case.build()
    # Inputs that bf16 holds exactly, so that both precisions route alike.
    x = random_rows(40, 32).detach().bfloat16().float()
    exact = layer(x, context_of(40))
    low = layer(x.bfloat16(), context_of(40))
    assert low.dtype == torch.bfloat16
    assert_close(low.float(), exact, tolerance=2e-2)


def test_wrong_rows_are_refused():
    with pytest.raises(ValueError, match="5 rows"):
        MoECase().build()(random_rows(5, 8), context_of(6))


@pytest.mark.gpu
@pytest.mark.skipif(
    reads_offsets(torch.device("cuda"), torch.bfloat16), reason="needs a GPU on which grouped_mm reads nothing"
)
def test_gpu_one_pass_equals_the_cpu_loop_without_a_synchronisation():
    """F57 and F80 on the real kernels: idle experts, an allocator full of NaN, and sync debug mode on "error"."""
    case = BALANCED.with_(num_experts=32, hidden_size=64, ffn_size=32)
    x = random_rows(50, 64).detach().bfloat16().float()
    expected = grads_of(case.with_(one_pass=False).build(), x.clone().requires_grad_(), context_of(30, 20))
    layer = case.build().cuda()
    moved = replace(context_of(30, 20), sequence=context_of(30, 20).sequence.to("cuda"))
    rows = x.to("cuda", torch.bfloat16).requires_grad_()
    probe = random_rows(50, 64, seed=9).detach().to("cuda", torch.bfloat16)
    poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(16)]
    del poison
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = layer(rows, moved)
        grads = torch.autograd.grad((out * probe).sum(), (rows, *layer.parameters()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(out.float().cpu(), expected["out"], tolerance=3e-2)
    for (name, wanted), actual in zip(list(expected.items())[:-1], grads, strict=True):
        assert_close(actual.float().cpu(), wanted, what=name, tolerance=3e-2)
