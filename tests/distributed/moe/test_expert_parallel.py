"""Expert-parallel layers against one process: output, every gradient, statistics, and who talks when."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glue.types import RouterRecord, SavedDecisions
from tests.support.moe_cases import MoECase
from tests.support.moe_layouts import (
    Job,
    Layout,
    compare_with_one_process,
    local_micro_batch,
    log_of,
    run,
    whole_micro_batch,
)
from tests.support.processes import run_distributed

CASE = MoECase(num_experts=8, top_k=2, aux_loss_coeff=0.1, z_loss_coeff=0.01)
TWO_RANKS = [
    Layout(ep=2, lengths=((13,), (4, 2))),
    Layout(tp=2, ep=2, lengths=((7, 5),)),
    Layout(tp=2, lengths=((7, 5),)),
    Layout(etp=2, lengths=((13,), (4, 2))),
    Layout(cp=2, ep=2, lengths=((7, 5),)),
]
FOUR_RANKS = [
    Layout(ep=4, lengths=((5,), (9,), (1,), (3, 4))),
    Layout(tp=2, ep=4, lengths=((7, 5), (3, 10))),
    Layout(tp=2, ep=2, lengths=((7, 5), (3, 10))),
    Layout(ep=2, etp=2, lengths=((5,), (9,), (1,), (3, 4))),
    Layout(tp=2, ep=2, etp=2, lengths=((7, 5), (3, 10))),
    Layout(tp=2, etp=2, lengths=((7, 5), (3, 10))),
    Layout(cp=2, tp=2, ep=2, etp=2, lengths=((7, 1),)),
]


def check(jobs: list[Job]) -> list[list[int]]:
    """Run jobs on their ranks, all of one number; the host reads of each job, by rank."""
    return run_distributed(compare_with_one_process, jobs[0].layout.world_size, jobs)


@pytest.mark.parametrize("layouts", [TWO_RANKS, FOUR_RANKS], ids=["2 ranks", "4 ranks"])
def test_f73_every_gradient_equals_one_process(layouts):
    """F62 too: rows of padding hold NaN."""
    expected = [1 if layout.ep * layout.etp > 1 else 0 for layout in layouts]
    assert check([Job(layout, CASE) for layout in layouts]) == [expected] * layouts[0].world_size


@pytest.mark.parametrize("layouts", [TWO_RANKS[:3], FOUR_RANKS[4:5]], ids=["2 ranks", "4 ranks"])
def test_loop_way_sigmoid_and_gelu(layouts):
    """One read per expert and one for sentinels to group, one of the splits, one of the received counts."""
    case = CASE.with_(one_pass=False, gated=False, score_function="sigmoid", balance_documents=True)
    expected = [8 + 1 + 1 + 1 if layout.ep > 1 else 8 for layout in layouts]
    assert check([Job(layout, case) for layout in layouts]) == [expected] * layouts[0].world_size


def test_one_expert_per_rank_needs_no_regrouping():
    case = CASE.with_(num_experts=2)
    assert check([Job(Layout(ep=2, lengths=((6,), (8,))), case)]) == [[1]] * 2
    assert check([Job(Layout(tp=2, etp=2, ep=2, lengths=((6,), (8,))), case)]) == [[1]] * 4


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(ep=2, lengths=((7,), (5,))), Layout(tp=2, ep=2, lengths=((7, 5),))],
        [Layout(tp=2, ep=2, etp=2, lengths=((7, 5), (3,)))],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_f53_all_tokens_to_rank_0(layouts):
    """The other ranks compute nothing and still join all collectives; their experts get zero gradients, not None."""
    cases = [CASE.with_(one_pass=one_pass, has_expert_bias=True) for one_pass in (True, False)]
    check([Job(replace(layout, favoured=(0, 1, 2, 3)), case) for layout in layouts for case in cases])


@pytest.mark.parametrize(
    "layouts",
    [
        [
            Layout(ep=2, lengths=((8,), ())),
            Layout(ep=2, lengths=((), ())),
            Layout(tp=2, ep=2, lengths=((5,),)),
            Layout(tp=2, lengths=((),)),
            Layout(cp=2, ep=2, lengths=((1,),)),
        ],
        [Layout(tp=2, ep=2, etp=2, lengths=((5,), ())), Layout(tp=4, ep=4, lengths=((1,),))],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_f53_ranks_without_local_tokens(layouts):
    check([Job(layout, CASE, recompute) for layout in layouts for recompute in (False, True)])


def test_f78_any_number_of_tokens_on_four_ranks():
    lengths = [(num_valid,) if num_valid else () for num_valid in range(9)]
    check([Job(Layout(tp=4, ep=2, etp=2, lengths=(each,), num_tokens=8), CASE) for each in lengths])


def test_f54_disjoint_experts():
    """Each data-parallel rank uses experts that the other does not, on every layout of them."""
    case = CASE.with_(top_k=1, num_experts=4, has_expert_bias=True)
    for layout in (Layout(ep=2, lengths=((6,), (7,))), Layout(ep=2, etp=2, tp=2, lengths=((6,), (7,)))):
        run_distributed(disjoint_experts, layout.world_size, layout, case)


def disjoint_experts(rank: int, world_size: int, layout: Layout, case: MoECase) -> None:
    """Micro-batch i goes to expert 3 * i alone, by a bias of that rank's router."""
    mesh = layout.mesh()
    layer = case.build(mesh)
    batch = local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, case.hidden_size), mesh)
    assert layer.router.expert_bias_E is not None
    layer.router.expert_bias_E[3 * mesh.dp_rank] = 100.0
    run(layer, batch)
    counts_E = log_of(batch.context).counts_E
    assert counts_E.count_nonzero() <= 1
    assert layer.experts.gate_up_weight.grad is not None
    used = layer.experts.gate_up_weight.grad.flatten(1).any(1)
    experts = range(mesh.ep_rank * 2, mesh.ep_rank * 2 + 2)
    assert used.tolist() == [expert in (0, 3) for expert in experts]


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(cp=2, lengths=((7, 5, 2),), num_tokens=20), Layout(tp=2, lengths=((7, 5, 2),))],
        [
            Layout(cp=2, tp=2, ep=4, lengths=((7, 1, 2),)),
            Layout(tp=2, ep=2, etp=2, lengths=((7, 5), (3, 10))),
        ],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_f34_f64_the_router_gradient_of_auxiliary_losses_alone(layouts):
    """Segments cut between ranks included: the statistic is that of the whole micro-batch."""
    cases = [CASE.with_(balance_documents=by_document) for by_document in (False, True)]
    jobs = [Job(layout, case, recompute, 0.0) for layout in layouts for case in cases for recompute in (False, True)]
    check(jobs)


def tie(rank: int, world_size: int, layout: Layout) -> list[int]:
    """All-zero logits."""
    mesh = layout.mesh()
    layer = CASE.build(mesh)
    torch.nn.init.zeros_(layer.router.weight)
    batch = local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, CASE.hidden_size), mesh)
    run(layer, batch, recompute=True)
    return log_of(batch.context).counts_E.tolist()


def test_f72_ties_go_to_the_first_experts_on_every_rank():
    layout = Layout(tp=2, ep=2, etp=2, lengths=((7, 5), (3, 10)))
    counts = run_distributed(tie, 4, layout)
    assert counts == [[n, n, *[0] * 6] for n in (8, 4, 8, 5)]


def watch_collectives(rank: int, world_size: int, layout: Layout) -> list[list[int]]:
    """Forward without gradients, then the recompute and its backward: kinds of collectives of each."""
    mesh = layout.mesh()
    layer = CASE.build(mesh)
    batch = local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, CASE.hidden_size), mesh)
    context = replace(batch.context, decisions=SavedDecisions())
    calls: list[str] = []
    exchange, reduce = dist.all_to_all_single, dist.all_reduce

    def watched_exchange(output: Tensor, value: Tensor, *args, **kwargs):
        calls.append("rows" if value.dtype.is_floating_point else "counts")
        return exchange(output, value, *args, **kwargs)

    def watched_reduce(value: Tensor, *args, **kwargs):
        calls.append("sums")
        return reduce(value, *args, **kwargs)

    dist.all_to_all_single, dist.all_reduce = watched_exchange, watched_reduce
    try:
        with torch.no_grad():
            out = layer(batch.x, context)
        forward, calls[:] = list(calls), []
        again = layer(batch.x, replace(context, is_recompute=True))
        recompute, calls[:] = list(calls), []
        (again * batch.probe).sum().backward()
    finally:
        dist.all_to_all_single, dist.all_reduce = exchange, reduce
    assert torch.equal(out, again)
    record: RouterRecord = log_of(context)
    assert record.num_dropped_pairs == 0
    assert layer.config.host_reader.count == 1
    return [[names.count(kind) for kind in ("counts", "rows", "sums")] for names in (forward, recompute, calls)]


@pytest.mark.parametrize("layout", [TWO_RANKS[0], TWO_RANKS[1], FOUR_RANKS[4]], ids=str)
def test_f50_recompute_exchanges_rows_only(layout):
    """Counts cross the ranks once per micro-batch; the recompute reuses splits and sums and reads nothing."""
    sums = 1 if layout.tp > 1 else 0
    for calls in run_distributed(watch_collectives, layout.world_size, layout):
        assert calls == [[1, 2, sums], [0, 2, 0], [0, 2, 0]]


def recompute_layer(rank: int, world_size: int, layouts: list[Layout]) -> None:
    """The activation manager's recompute, which stops early, joins the same collectives on every rank."""
    for layout, one_pass in itertools.product(layouts, (True, False)):
        mesh = layout.mesh()
        gradients = []
        for recompute in (False, True):
            layer = CASE.with_(one_pass=one_pass).build(mesh)
            batch = local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, CASE.hidden_size), mesh)
            out, x_grad = run(layer, batch, recompute)
            log_of(batch.context)
            gradients.append([out, x_grad, *(param.grad for param in layer.parameters())])
            assert layer.config.host_reader.count == (1 if one_pass else 11 + recompute)
        for actual, wanted in zip(*gradients, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(ep=2, lengths=((6,), (9,))), Layout(ep=2, lengths=((), (8,)))],
        [Layout(tp=2, ep=2, etp=2, lengths=((6,), (9, 3)))],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_f53_recompute_with_the_activation_manager(layouts):
    run_distributed(recompute_layer, layouts[0].world_size, layouts)
