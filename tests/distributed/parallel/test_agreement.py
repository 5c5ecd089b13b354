"""One rank's failure ends the work of all ranks, with its reason and before anybody waits for it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_glue.parallel.agreement import PeerFailedError, first_message, gather_texts, is_lost_peer, together
from tests.support.processes import run_distributed


def fail_on_rank_one(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert together(lambda: rank, group) == rank

    def work() -> int:
        if rank == 1:
            raise ValueError("no data here: ä" + "x" * 2000)
        return rank

    with pytest.raises((ValueError, PeerFailedError)) as caught:
        together(work, group)
    assert first_message("", group) == ""
    assert first_message(f"from {rank}" if rank else "", group) == "from 1"
    return f"{type(caught.value).__name__} {str(caught.value)[:15]}"


def texts_on_rank(rank: int, world_size: int) -> list[str]:
    return gather_texts("ä" * (rank + 1), dist.group.WORLD)


def test_texts_of_any_length_reach_every_rank_in_order() -> None:
    assert run_distributed(texts_on_rank, 3) == [["ä", "ää", "äää"]] * 3
    assert gather_texts("alone", None) == ["alone"]


def test_all_ranks_raise_and_say_why() -> None:
    results = run_distributed(fail_on_rank_one, 3)
    reason = "no data here: ä"
    assert results == [f"PeerFailedError {reason}", f"ValueError {reason}", f"PeerFailedError {reason}"]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3: Connection reset by peer"), True),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"), True),
        (RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation"), True),
        (dist.DistBackendError("NCCL watchdog: collective timed out"), True),
        (PeerFailedError("reason"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo connection"), False),
    ],
)
def test_a_lost_peer_is_told_from_other_errors(error: Exception, is_lost: bool) -> None:
    assert is_lost_peer(error) is is_lost


def test_one_process_needs_no_group() -> None:
    assert together(lambda: 3, None) == 3
    assert first_message("mine", None) == "mine"
    with pytest.raises(ValueError, match="own"):
        together(lambda: int("own"), None)
