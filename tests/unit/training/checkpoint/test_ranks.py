"""Ranks in one process; what several agree on is tested with ranks in tests/distributed/training/checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.parts import GlobalTensor, Part
from megatron_glue.training.checkpoint.ranks import Ranks

ALONE = Ranks(0, 1, None, Path("runs/a"))


def test_one_process_writes_everything() -> None:
    tensors = {
        "a": GlobalTensor.whole(torch.zeros(2)),
        "b": GlobalTensor.of_parts((4,), [Part((0,), torch.zeros(1)), Part((3,), torch.zeros(1))]),
    }
    entries = [(entry.name, entry.shape, entry.part.offsets) for entry in ALONE.choose_own(tensors)]
    assert entries == [("a", (2,), (0,)), ("b", (4,), (0,)), ("b", (4,), (3,))]


def test_what_a_rank_raises_is_one_line_of_one_kind() -> None:
    def fail(error: Exception) -> CheckpointError | ConfigError:
        def work() -> None:
            raise error

        with pytest.raises((CheckpointError, ConfigError)) as caught:
            ALONE.together(work)
        assert "\n" not in str(caught.value)
        return caught.value

    assert str(fail(OSError(28, "No space left on device", "x/y"))) == "x/y: No space left on device"
    assert str(fail(OSError(28, "No space left on device"))) == "runs/a: No space left on device"
    assert str(fail(ValueError("two\nlines"))) == "runs/a: ValueError: two lines"
    own = ConfigError("--save", "x", "reason", "remedy")
    assert fail(own) is own
    assert ALONE.together(lambda: 3) == 3


def test_the_first_rank_answers_for_all() -> None:
    assert ALONE.ask_first(lambda: 0) == 0
    assert ALONE.ask_first(lambda: None) is None
    assert ALONE.union_of(["a", "b"], {"b", "c"}) == {"b"}
