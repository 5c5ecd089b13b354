"""What memory is spent on, and which flag lowers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.parallel.agreement import is_out_of_memory
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.memory_shortage import describe_shortage, first_sentence, memory_table, remedy
from megatron_glue.training.session import build_session
from megatron_glue.training.step import train_step
from tests.support.cases import small_config, write_corpus

REST = "activations and the rest"


def test_the_table_counts_what_the_session_holds(tmp_path: Path) -> None:
    config = small_config(write_corpus(tmp_path / "corpus.jsonl"))
    session = build_session(config, ParallelMesh(), torch.device("cpu"), tmp_path)
    train_step(session)
    table = memory_table(session)
    num_bytes = 4 * session.engine.num_local_parameters()
    assert table["weights"] == num_bytes
    assert table["gradients"] == 0
    assert num_bytes * 2 <= table["moments"] < num_bytes * 2.1
    assert table[REST] > 0
    line = describe_shortage(
        session, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    )
    assert line.startswith("out of memory on cpu in clipping and update of iteration 2: CUDA out of memory")
    assert "\n" not in line
    session.close()


FSDP2 = {"parallel": {"data_parallel_engine": "fsdp2"}}
OFFLOAD = {"activation": {"activation_offload": True}}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("weights", {}, "--data-parallel-engine fsdp2"),
    ("moments", FSDP2, "--expert-model-parallel-size"),
    (
        "weights",
        FSDP2 | {"moe": {"num_experts": 0}},
        "--tensor-model-parallel-size",
    ),
    (REST, {}, "use --recompute-granularity full, or --double-buffer-ckpt, or a smaller --seq-length (now 128)"),
    (REST, {"activation": {"recompute_granularity": "full"}}, "use --double-buffer-ckpt, or a smaller --seq-length"),
    (
        REST,
        OFFLOAD | {"training": {"micro_batch_size": 4}},
        "use a smaller --micro-batch-size",
    ),
]


@pytest.mark.parametrize(("largest", "sections", "expected"), CASES)
def test_the_remedy_is_one_that_is_not_in_use(largest: str, sections: dict[str, Any], expected: str) -> None:
    assert expected in remedy(small_config("corpus.jsonl", **sections), largest)


def test_a_real_failure_of_the_cpu_allocator_is_known_and_cut_short() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**50)
    assert is_out_of_memory(error.value)
    assert first_sentence(error.value).startswith("DefaultCPUAllocator: can't allocate memory: you tried to allocate")


def test_torchs_advice_is_left_out() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB. If"
    )
    assert first_sentence(error) == "CUDA out of memory. Tried to allocate 2.00 GiB"
