"""Expert-parallel layers against one process: output, every gradient, statistics, and who talks when."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.moe.layer import MoELayer
from megatron_glue.types import ForwardContext, PackedSequence, RouterRecord, SavedDecisions
from tests.support.moe_cases import MoECase, random_rows
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

CASE = MoECase(num_experts=8, top_k=2, aux_loss_coeff=0.1, z_loss_coeff=0.01)


def micro_batch(num_tokens: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor, ForwardContext]:
    """One rank's rows, the gradient of its output, and its context (with two rows of padding)."""
    x = random_rows(num_tokens + 2, 8, seed=rank)
    probe = random_rows(num_tokens + 2, 8, seed=100 + rank).detach()
    sequence = PackedSequence.from_lengths([num_tokens], num_pad_tokens=2)
    context = ForwardContext(sequence, aux_loss_scale=1.0 / num_ranks, router_log=[], decisions=SavedDecisions())
    return x, probe, context


def backward(layer: MoELayer, x: Tensor, probe: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
    """Output and input gradient; parameter gradients accumulate in the layer."""
    out = layer(x, context)
    (out * probe).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def favour(layer: MoELayer, experts: list[int]) -> None:
    if experts:
        assert layer.router.expert_bias_E is not None
        layer.router.expert_bias_E[experts] = 100.0


def log_of(context: ForwardContext) -> RouterRecord:
    assert context.router_log is not None
    assert len(context.router_log) == 1
    return context.router_log[0]


def compare_with_one_process(
    rank: int, num_ranks: int, case: MoECase, tokens_per_rank: list[int], favoured: list[int]
) -> int:
    """Body of a rank. The one process is each rank's own, over all ranks' micro-batches in turn."""
    reference = case.with_(one_pass=False).build()
    favour(reference, favoured)
    expected = []
    for other, num_tokens in enumerate(tokens_per_rank):
        x, probe, context = micro_batch(num_tokens, other, num_ranks)
        expected.append((*backward(reference, x, probe, context), log_of(context)))

    group = dist.group.WORLD
    layer = case.build(group)
    favour(layer, favoured)
    x, probe, context = micro_batch(tokens_per_rank[rank], rank, num_ranks)
    out, x_grad = backward(layer, x, probe, context)

    expected_out, expected_x_grad, expected_record = expected[rank]
    assert_close(out, expected_out, what="output")
    assert_close(x_grad, expected_x_grad, what="input gradient")
    record = log_of(context)
    assert torch.equal(record.counts_E, expected_record.counts_E)
    assert_close(record.aux_loss, expected_record.aux_loss, what="auxiliary loss")
    assert record.num_dropped_pairs == 0

    router_grad = layer.router.weight.grad
    assert router_grad is not None
    dist.all_reduce(router_grad)
    assert reference.router.weight.grad is not None
    assert_close(router_grad, reference.router.weight.grad, what="router gradient")
    num_local = case.num_experts // num_ranks
    own = slice(rank * num_local, (rank + 1) * num_local)
    for (name, param), whole in zip(layer.experts.named_parameters(), reference.experts.parameters(), strict=True):
        assert torch.equal(param, whole[own]), f"{name}: initialised by global expert id"
        assert param.grad is not None, name
        assert whole.grad is not None, name
        # F73: sums over all ranks' tokens, whatever the number of expert-parallel ranks.
        assert_close(param.grad, whole.grad[own], what=f"{name} gradient")
    return layer._host_reader.count


@pytest.mark.parametrize(
    ("num_ranks", "tokens_per_rank"), [(2, [13, 6]), (4, [5, 9, 1, 7])], ids=["2 ranks", "4 ranks"]
)
def test_f73_every_gradient_equals_one_process(num_ranks, tokens_per_rank):
    reads = run_distributed(compare_with_one_process, num_ranks, CASE, tokens_per_rank, [])
    assert reads == [1] * num_ranks


def test_loop_way_sigmoid_and_gelu():
    case = CASE.with_(one_pass=False, gated=False, score_function="sigmoid", balance_documents=True)
    reads = run_distributed(compare_with_one_process, 2, case, [6, 8], [])
    assert reads == [8 + 1 + 1 + 1] * 2


def test_one_expert_per_rank_needs_no_regrouping():
    assert run_distributed(compare_with_one_process, 2, CASE.with_(num_experts=2), [6, 8], []) == [1, 1]


@pytest.mark.parametrize("one_pass", [True, False])
def test_f53_all_tokens_to_rank_0(one_pass):
    """Rank 1 computes nothing and still joins all collectives; its experts get zero gradients, not None."""
    case = CASE.with_(one_pass=one_pass, has_expert_bias=True)
    run_distributed(compare_with_one_process, 2, case, [7, 5], [0, 1, 2, 3])


@pytest.mark.parametrize("tokens_per_rank", [[8, 0], [0, 0]], ids=["one rank", "all ranks"])
def test_f53_zero_local_tokens(tokens_per_rank):
    run_distributed(compare_with_one_process, 2, CASE, tokens_per_rank, [])


def watch_collectives(rank: int, num_ranks: int) -> list[list[int]]:
    """Forward without gradients, then the recompute and its backward; sizes of what each all-to-all sent."""
    layer = CASE.build(dist.group.WORLD)
    x, probe, context = micro_batch(6 + rank, rank, num_ranks)
    exchanged: list[str] = []
    original = dist.all_to_all_single

    def watched(output: Tensor, value: Tensor, *args, **kwargs):
        exchanged.append("rows" if value.dtype.is_floating_point else "counts")
        return original(output, value, *args, **kwargs)

    dist.all_to_all_single = watched
    try:
        with torch.no_grad():
            out = layer(x, context)
        forward, exchanged[:] = list(exchanged), []
        again = layer(x, replace(context, is_recompute=True))
        recompute, exchanged[:] = list(exchanged), []
        (again * probe).sum().backward()
    finally:
        dist.all_to_all_single = original
    assert torch.equal(out, again)
    log_of(context)
    assert layer._host_reader.count == 1
    return [[names.count("counts"), names.count("rows")] for names in (forward, recompute, exchanged)]


def test_f50_recompute_exchanges_rows_only():
    """Counts cross the ranks once per micro-batch; the recompute reuses splits and reads nothing."""
    for exchanges in run_distributed(watch_collectives, 2):
        assert exchanges == [[1, 2], [0, 2], [0, 2]]


def recompute_layer(rank: int, num_ranks: int, case: MoECase, tokens_per_rank: list[int]) -> None:
    """The activation manager's recompute, which stops early, joins the same collectives on every rank."""
    layer = case.build(dist.group.WORLD)
    x, probe, context = micro_batch(tokens_per_rank[rank], rank, num_ranks)
    plain = torch.autograd.grad((layer(x, context) * probe).sum(), (x, *layer.parameters()))
    reads = layer._host_reader.count
    context = replace(context, decisions=None, router_log=[])
    out = ActivationManager(ActivationPlan(recompute=True), "cpu").run_block(layer, x, context)
    again = torch.autograd.grad((out * probe).sum(), (x, *layer.parameters()))
    for actual, wanted in zip(again, plain, strict=True):
        assert torch.equal(actual, wanted)
    log_of(context)
    assert layer._host_reader.count == 2 * reads + (0 if case.one_pass else 1)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("tokens_per_rank", [[6, 9], [0, 8]], ids=["tokens everywhere", "none on rank 0"])
def test_f53_recompute_with_the_activation_manager(one_pass, tokens_per_rank):
    run_distributed(recompute_layer, 2, CASE.with_(one_pass=one_pass), tokens_per_rank)
