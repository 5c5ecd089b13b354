"""The real models under DeepSpeed: gradients of step 0, three steps, an evaluation and a sample, as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.gather import gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.closing import sample
from megatron_glue.training.session import build_session
from megatron_glue.training.step import accumulate_gradients, train_step
from tests.support.cases import small_config, write_corpus
from tests.support.deepspeed_runs import needs_deepspeed
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

pytestmark = needs_deepspeed

CPU = torch.device("cpu")
ACCELERATOR = {"enable_metadata_cache": True, "enable_double_buffer": True, "enable_grouped_index": True}
SHARD_EVERYTHING = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1}
# Stages 1 and 3 with recompute and offload; stage 3 keeps no weight whole between its uses.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "dense-stage1": (2, 1, 1, {"moe": {"num_experts": 0}, "training": {"accelerator": ACCELERATOR}}),
    "dense-stage3": (2, 3, 1, {"moe": {"num_experts": 0}, "training": {"accelerator": ACCELERATOR}}),
    "moe-stage2": (4, 2, 2, {}),
}
MODEL = {"hidden_dropout": 0.1, "qk_layernorm": True, "window_size": 24}


def run(rank: int, world_size: int, corpus: str, parallel: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder = Path(corpus).parent / f"offload-{world_size}-{rank}"
    config = small_config(corpus, parallel=parallel, model=MODEL, **{k: dict(v) for k, v in settings.items()})
    mesh = ParallelMesh.build(config.parallel, "cpu")
    session = build_session(config, mesh, CPU, folder)
    loss = accumulate_gradients(session) / session.data.loader.step_label_tokens
    gradients = session.engine.full_gradients()
    session.close()
    session = build_session(config, mesh, CPU, folder)
    for _ in range(3):
        session.metrics.add(train_step(session), 0.0)
    continuation = sample(session)
    weights = gather_full_parameters(session.engine.module, mesh)
    session.metrics.add(train_step(session), 0.0)
    session.metrics.flush(session.host_reader, mesh.world_group)
    num_parameters = session.engine.num_local_parameters()
    session.close()
    return {
        "loss": loss,
        "gradients": gradients,
        "weights": weights,
        "losses": torch.tensor(session.metrics.losses),
        "grad_norms": torch.tensor(session.metrics.grad_norms),
        "sample": continuation,
        "num_parameters": num_parameters,
    }


@pytest.mark.parametrize("case", CASES)
def test_real_models_equal_one_process(case: str, tmp_path: Path) -> None:
    world_size, stage, ep_size, settings = CASES[case]
    corpus = str(write_corpus(tmp_path / "corpus.jsonl"))
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": SHARD_EVERYTHING if stage == 3 else {}}))
    parallel = {
        "data_parallel_engine": "deepspeed",
        "zero_stage": stage,
        "expert_model_parallel_size": ep_size,
        "deepspeed_config": str(file),
    }
    one = run(0, 1, corpus, {}, settings)
    results = run_distributed(run, world_size, corpus, parallel, settings, timeout_s=180.0)
    assert_close(sum(result["loss"] for result in results), one["loss"], what="first-step loss")
    whole = one["num_parameters"]
    for result in results:
        assert result["gradients"].keys() == one["gradients"].keys()
        for name, expected in one["gradients"].items():
            assert_close(result["gradients"][name], expected, what=f"gradient of {name}")
        for name in ("losses", "grad_norms"):
            assert_close(result[name], one[name], what=name)
        for name, expected in one["weights"].items():
            assert_close(result["weights"][name], expected, what=f"weight {name} after three steps", tolerance=1e-4)
        assert result["sample"] == one["sample"]
    if stage == 3:
        assert sum(result["num_parameters"] for result in results) == whole


def build_with(rank: int, world_size: int, corpus: str, parallel: dict[str, Any]) -> list[str]:
    config = small_config(corpus, parallel={"data_parallel_engine": "deepspeed", **parallel})
    mesh = ParallelMesh.build(config.parallel, "cpu")
    with pytest.raises(ConfigError) as error:
        build_session(config, mesh, CPU, None)
    return [str(error.value)]


def test_experts_in_stage_3_are_refused_on_all_ranks(tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.jsonl"))
    answers = run_distributed(build_with, 2, corpus, {"zero_stage": 3})
    assert answers[0] == answers[1]
    assert answers[0][0].startswith("--zero-stage=3: ")
