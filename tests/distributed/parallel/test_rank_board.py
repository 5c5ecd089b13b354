"""Notes reach all ranks without a collective."""

from __future__ import annotations

import time

from megatron_glue.parallel.rank_board import RankBoard
from tests.support.processes import run_distributed
from tests.support.waiting import wait_for


def leave_notes(rank: int, world_size: int) -> dict[str, str]:
    """Every rank but the last leaves a note."""
    shared = RankBoard.of_run(rank, world_size)
    assert shared is not None
    board = shared.connect()
    if rank < world_size - 1:
        time.sleep(0.05 * rank)
        board.leave("status", f"old {rank}")
        board.leave("status", f"from {rank}")
        board.add("told")
    wait_for(lambda: board.add("told", 0) == world_size - 1)
    return {str(other): note for other, note in board.notes("status").items()}


def test_all_ranks_read_the_newest_notes_of_those_that_left_one() -> None:
    assert run_distributed(leave_notes, 3) == [{"0": "from 0", "1": "from 1"}] * 3


def test_one_process_has_no_board() -> None:
    assert RankBoard.of_run(0, 1) is None
