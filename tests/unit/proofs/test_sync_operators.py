"""Each operator that waits on CUDA is told from its look-alike that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.proofs.sync_watch import SyncWatch

Call = Callable[[Tensor, Tensor, Tensor], object]


def kinds_of(call: Call) -> list[str]:
    """What is found when ``call`` gets device values: numbers [6], a mask of them, and counts."""
    x, counts = torch.arange(6.0), torch.tensor([1, 2, 0, 1, 1, 1])
    mask = x > 2
    watch = SyncWatch(nn.Module())
    watch.put_on_device([x, mask, counts])
    with watch:
        call(x, mask, counts)
    return sorted(read.kind for read in watch.reads.elements())


def put(index: object, value: object) -> Call:
    def call(x: Tensor, mask: Tensor, counts: Tensor) -> None:
        x[mask if index == "mask" else counts] = value(x) if callable(value) else value

    return call


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize(
    ("kinds", "call"),
    [
        (["item"], lambda x, m, c: x[0].item()),
        (["item"], lambda x, m, c: bool(m.any())),
        (["item"], lambda x, m, c: int(c[1])),
        (["item"], lambda x, m, c: f"{x[0]:.2f}"),
        (["item"], lambda x, m, c: 3 in x),
        (["item"], lambda x, m, c: x[c[0] :]),
        (["item"], lambda x, m, c: torch.is_nonzero(x[1])),
        (["equal"], lambda x, m, c: torch.equal(x, x + 1)),
        (["allclose"], lambda x, m, c: torch.allclose(x, x)),
        (["nonzero"], lambda x, m, c: m.nonzero()),
        (["nonzero"], lambda x, m, c: torch.where(m)),
        (["nonzero"], lambda x, m, c: torch.argwhere(m)),
        (["masked_select"], lambda x, m, c: x.masked_select(m)),
        (["boolean index"], lambda x, m, c: x[m]),
        (["boolean index"], lambda x, m, c: x[m.to(torch.uint8)]),
        (["boolean index_put"], put("mask", lambda x: x[:3].clone())),
        (["bincount"], lambda x, m, c: torch.bincount(c, minlength=8)),
        (["unique"], lambda x, m, c: torch.unique(c)),
        (["unique"], lambda x, m, c: torch.unique(c.view(2, 3), dim=0)),
        (["unique"], lambda x, m, c: torch.unique_consecutive(c)),
        (["repeat_interleave"], lambda x, m, c: torch.repeat_interleave(x, c)),
        (["histc"], lambda x, m, c: torch.histc(x, 4)),
        (["copy to the host"], lambda x, m, c: torch.empty(6).copy_(x)),
        (["upload"], lambda x, m, c: x.copy_(torch.zeros(6))),
    ],
)
def test_what_waits_is_found(kinds: list[str], call: Call) -> None:
    assert kinds_of(call) == kinds


@pytest.mark.parametrize(
    "call",
    [
        lambda x, m, c: x[c],
        lambda x, m, c: x.index_select(0, c),
        lambda x, m, c: x.scatter_add_(0, c, torch.ones_like(x)),
        lambda x, m, c: torch.repeat_interleave(x, c, output_size=6),
        lambda x, m, c: torch.repeat_interleave(x, 2),
        lambda x, m, c: torch.where(m, x, 0.0),
        lambda x, m, c: x.masked_fill(m, 0.0),
        lambda x, m, c: x.masked_scatter(m, x),
        lambda x, m, c: torch.nonzero_static(m, size=3),
        lambda x, m, c: torch.histc(x, 4, min=0, max=6),
        lambda x, m, c: torch.sort(x, stable=True),
        lambda x, m, c: torch.empty(6).copy_(x, non_blocking=True),
        lambda x, m, c: torch.empty_like(x).copy_(x),
        lambda x, m, c: x.new_zeros(6).copy_(x),
        lambda x, m, c: torch.zeros(6, device=x.device).copy_(x),
        lambda x, m, c: F.embedding(c, x[:, None]),
        lambda x, m, c: x + torch.tensor(1.0),
        put("mask", 0.0),
        put("counts", 0.0),
        put("counts", lambda x: x.clone()),
    ],
)
def test_what_does_not_wait_is_not(call: Call) -> None:
    assert kinds_of(call) == []


def test_a_mask_of_one_device_number_waits() -> None:
    assert kinds_of(put("mask", lambda x: x[:1].clone())) == ["boolean index_put"]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.sum().item(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: torch.bincount(t),
        lambda t: torch.unique(t),
        lambda t: torch.repeat_interleave(t, t),
        lambda t: torch.equal(t, t),
    ],
)
def test_values_of_the_host_are_free(call: Callable[[Tensor], object]) -> None:
    lengths = torch.tensor([3, 4, 5])
    assert kinds_of(lambda x, m, c: call(lengths)) == []
    assert kinds_of(lambda x, m, c: call(torch.tensor([3, 4, 5]))) == []
