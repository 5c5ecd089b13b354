"""The memory estimate beside what a step really holds, and how each engine and technique changes it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.planning.memory import MemoryEstimate, estimate_memory
from megatron_glue.training.session import build_session
from megatron_glue.training.step import accumulate_gradients, train_settled_step
from tests.support.alive_storages import AliveStorages
from tests.support.cases import small_config, write_corpus

FACTOR = 1.4
"""How far activations may be off, either way; what is kept between steps is exact."""
VOCAB_SIZE = 259
CPU = torch.device("cpu")
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "moe": {},
    "dense": {"moe": {"num_experts": 0}},
    "full recompute": {"activation": {"recompute_granularity": "full"}},
    "some blocks recomputed": {
        "activation": {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
        }
    },
    "selective recompute": {
        "activation": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe"]}
    },
    "mostly logits": {
        "model": {"num_layers": 1, "hidden_size": 16},
        "moe": {"num_experts": 0},
        "activation": {"recompute_granularity": "full"},
        "backend": {"cross_entropy_chunk_tokens": 256},
    },
    "bf16": {"training": {"precision": "bf16"}},
}


class Peak(AliveStorages):
    """The most that was alive at one time, operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._sizes = {key: entry for key, entry in self._sizes.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.num_bytes)
        return result


def config_of(corpus: Path, overrides: dict[str, Any]) -> RunConfig:
    sections = {
        "model": MODEL,
        "moe": {"moe_ffn_hidden_size": 64},
        "data": {"seq_length": 256},
        "training": {"global_batch_size": 2},
        "backend": {"matmul_backend": "torch", "grouped_mm_backend": "torch", "cross_entropy_chunk_tokens": 128},
    }
    merged = {name: {**sections.get(name, {}), **overrides.get(name, {})} for name in {*sections, *overrides}}
    return small_config(corpus, **merged)


def one(config: RunConfig) -> MemoryEstimate:
    (estimate,) = estimate_memory(config, 1, VOCAB_SIZE, "cpu")
    return estimate


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_beside_a_measured_step(overrides: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(write_corpus(tmp_path / "corpus.jsonl"), overrides)
    session = build_session(config, ParallelMesh(), CPU, tmp_path)
    estimate = one(config)
    train_settled_step(session)
    state = session.optimizer.torch_optimizer.state.values()
    moments = sum(value.nbytes for of in state for value in of.values() if value.numel() > 1)
    assert moments == estimate.optimizer
    masters = sum(parameter.nbytes for parameter in session.built.model.parameters())
    copies = [entry[1] for p in session.built.model.parameters() if (entry := getattr(p, "_compute_copy", None))]
    assert masters + sum(copy.nbytes for copy in copies) == estimate.parameters
    gc.collect()
    with Peak() as alive:
        accumulate_gradients(session)
    gradients = sum(p.grad.nbytes for p in session.built.model.parameters() if p.grad is not None)
    assert gradients == estimate.gradients
    measured = alive.peak - gradients
    estimated = estimate.total - estimate.parameters - estimate.gradients - estimate.optimizer
    session.close()
    assert measured / FACTOR < estimated < measured * FACTOR


def at(world_size: int, pp_rank: int = 0, **overrides: Any) -> MemoryEstimate:
    config = small_config("corpus.jsonl", **overrides)
    return estimate_memory(config, world_size, VOCAB_SIZE, "cuda")[pp_rank]


def test_fsdp2_splits_what_stays_over_the_ranks() -> None:
    parallel = {"data_parallel_engine": "fsdp2"}
    one, many = at(1, moe={"num_experts": 0}), at(4, parallel=parallel, moe={"num_experts": 0})
    assert many.optimizer == one.optimizer / 4
    assert many.parameters == 4 * one.num_parameters / 4
    assert many.transit > 0
    assert one.transit == 0
    deep: dict[str, Any] = {"model": {"num_layers": 8}, "moe": {"num_experts": 0}}
    kept = at(4, parallel=parallel | {"zero_stage": 2}, **deep)
    assert kept.transit > at(4, parallel=parallel, **deep).transit


def test_deepspeed_splits_more_with_each_stage() -> None:
    stages = [
        at(4, parallel={"data_parallel_engine": "deepspeed", "zero_stage": stage}, moe={"num_experts": 0})
        for stage in range(4)
    ]
    assert [stage.optimizer for stage in stages] == [8 * stages[0].num_parameters / n for n in (1, 4, 4, 4)]
    assert [stage.gradients for stage in stages] == [4 * stages[0].num_parameters / n for n in (1, 1, 4, 4)]
    assert stages[3].parameters < stages[2].parameters
    assert (
        at(4, parallel={"data_parallel_engine": "deepspeed"}).optimizer
        == at(4, parallel={"data_parallel_engine": "deepspeed", "zero_stage": 1}).optimizer
    )


def test_experts_are_split_over_their_own_ranks() -> None:
    parallel = {"data_parallel_engine": "fsdp2", "expert_model_parallel_size": 2}
    assert at(4, parallel=parallel).num_parameters < at(4).num_parameters
    # ep 2 x edp 2: each expert number is a quarter of one, as without ep.
    assert at(4, parallel=parallel).optimizer == at(4, parallel={"data_parallel_engine": "fsdp2"}).optimizer


def test_an_early_stage_of_1f1b_keeps_more_micro_batches() -> None:
    overrides = {
        "model": {"num_layers": 4},
        "parallel": {"pipeline_model_parallel_size": 2},
        "training": {"global_batch_size": 8},
    }
    first, last = at(2, 0, **overrides), at(2, 1, **overrides)
    assert first.activations == 2 * last.activations
    assert first.loss == 0 < last.loss
    gpipe = overrides | {"parallel": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "gpipe"}}
    assert at(2, 0, **gpipe).activations == 4 * first.activations


def test_offload_keeps_as_many_inputs_as_there_are_buffers() -> None:
    deep = {"num_layers": 12}
    recompute = at(1, model=deep, activation={"recompute_granularity": "full"})
    single = at(1, model=deep, activation={"activation_offload": True})
    double = at(1, model=deep, training={"accelerator": {"enable_double_buffer": True}})
    assert recompute.activations == 12 / 3 * single.activations
    assert double.activations == 4 / 3 * single.activations
    some = at(1, model=deep, activation={"activation_offload": True, "offload_num_layers": 6})
    assert single.activations < some.activations < recompute.activations
    modules = at(1, model=deep, activation={"activation_offload": True, "offload_modules": ["attn_core"]})
    assert modules.activations < at(1, model=deep).activations


def test_tensor_and_context_ranks_share_activations() -> None:
    alone = at(1, moe={"num_experts": 0})
    tensor = {"tensor_model_parallel_size": 2}
    plain = at(2, moe={"num_experts": 0}, parallel=tensor).activations
    assert alone.activations / 2 < plain < alone.activations
    with_sequence = at(2, moe={"num_experts": 0}, parallel=tensor | {"sequence_parallel": True}).activations
    assert with_sequence == pytest.approx(alone.activations / 2)
    context = at(2, moe={"num_experts": 0}, parallel={"context_parallel_size": 2}).activations
    assert context == alone.activations / 2
