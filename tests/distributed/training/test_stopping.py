"""All ranks learn in the same step that one of them was asked to stop, and by what."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist

from megatron_glue.training.stopping import SignalListener, StopVote
from tests.support.processes import run_distributed
from tests.support.waiting import wait_for


def vote_on_rank(rank: int, world_size: int, asked: dict[int, int]) -> list[list[int]]:
    """Votes of four steps; some ranks are asked in the second one."""
    answers = []
    with SignalListener(rank) as signals:
        vote = StopVote(signals, dist.group.WORLD)
        for step in range(4):
            vote.begin()
            if step == 1 and rank in asked:
                os.kill(os.getpid(), asked[rank])
                wait_for(lambda: signals.received is not None)
            request = vote.end()
            answers.append([-1, -1] if request is None else [request.rank, request.signal_number or 0])
    return answers


def test_one_rank_asked_stops_all_in_the_same_step() -> None:
    go_on, stop = [-1, -1], [2, int(signal.SIGTERM)]
    assert run_distributed(vote_on_rank, 3, {2: int(signal.SIGTERM)}) == [[go_on, go_on, stop, stop]] * 3


def test_of_several_the_lowest_rank_is_named() -> None:
    asked = {1: int(signal.SIGUSR1), 2: int(signal.SIGUSR1)}
    (answers,) = {str(of_rank) for of_rank in run_distributed(vote_on_rank, 3, asked)}
    assert answers.endswith(f"[1, {int(signal.SIGUSR1)}]]")
