"""Ranks observe what one process observes, and a run that is not the same is found out in every quantity it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.gather import gather_full_parameters, global_name
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.proofs import observation
from megatron_glue.proofs.comparison import compare
from megatron_glue.proofs.observation import digest, observe_on_rank, promised_content
from tests.support.cases import small_config, write_corpus
from tests.support.processes import RankFailedError, run_distributed
from tests.support.tolerances import RELATIVE_NORM

TOLERANCE = RELATIVE_NORM[torch.float32]
OPTIMIZER = {"adam_eps": 1e-6, "lr": 0.01, "min_lr": 0.001, "lr_warmup_iters": 2}


def config_of(folder: Path, **overrides: Any) -> RunConfig:
    corpus = folder / "corpus.jsonl"
    overrides.setdefault("optimizer", {})
    overrides["optimizer"] = OPTIMIZER | overrides["optimizer"]
    return small_config(corpus if corpus.exists() else write_corpus(corpus), **overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observation")


@pytest.fixture(scope="module")
def one_process(folder: Path) -> dict[str, Any]:
    return observe_on_rank(0, 1, config_of(folder), str(folder / "reference"))


@pytest.mark.parametrize(
    "parallel",
    [{}, {"expert_model_parallel_size": 2}, {"data_parallel_engine": "fsdp2"}],
    ids=["ddp", "ep", "fsdp2"],
)
def test_two_ranks_observe_the_same(parallel: dict[str, Any], folder: Path, one_process: dict[str, Any]) -> None:
    reports = run_distributed(observe_on_rank, 2, config_of(folder, parallel=parallel), str(folder / "ranks"))
    comparison = compare(reports, one_process)
    assert comparison.failures(TOLERANCE) == []
    compared = {difference.what for difference in comparison.differences}
    assert "aux-only gradient of blocks.0.ffn.router.weight" in compared
    assert "z-only gradient of blocks.1.ffn.router.weight" in compared
    assert "weight embedding.weight" in compared
    assert {"aux loss of step 2", "z loss of step 0"} <= compared


def observe_wrong_embedding(rank: int, world_size: int, config: RunConfig, folder: str) -> dict[str, Any]:
    """The first stage's copy of the tied embedding goes wrong after the last step; the last stage's stays right."""
    num_gathered = 0

    def gather(model: nn.Module, mesh: ParallelMesh) -> dict[str, Tensor]:
        nonlocal num_gathered
        num_gathered += 1
        if num_gathered == 2 and mesh.pp_rank == 0:
            named = {global_name(name, param): param for name, param in model.named_parameters()}
            with torch.no_grad():
                named["embedding.weight"].add_(100.0)
        return gather_full_parameters(model, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observation, "gather_full_parameters", gather)
        return observe_on_rank(rank, world_size, config, folder)


def test_both_ends_of_a_tied_embedding_are_looked_at(folder: Path) -> None:
    config = config_of(folder, parallel={"pipeline_model_parallel_size": 2})
    with pytest.raises(RankFailedError, match=r"embedding.weight is not the same on pipeline stages 0 and 1"):
        run_distributed(observe_wrong_embedding, 2, config, str(folder / "tied"))


def test_what_a_configuration_promises(folder: Path, one_process: dict[str, Any]) -> None:
    always = ["losses", "grad_norms", "gradients", "weights"]
    routed = ["expert_counts", "aux_gradients", "aux_losses", "z_gradients", "z_losses"]
    assert one_process["promised"] == always + routed
    assert promised_content(config_of(folder, moe={"num_experts": 0})) == always
    without = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.01}
    assert promised_content(config_of(folder, moe=without)) == [*always, "expert_counts"]
    biased = config_of(folder, moe={"moe_router_enable_expert_bias": True})
    assert promised_content(biased) == [*always, *routed, "router_biases"]


@pytest.mark.parametrize(
    ("overrides", "complaints"),
    [
        ({"training": {"seed": 1}}, ["loss of step 0", "gradient of embedding.weight"]),
        ({"moe": {"moe_aux_loss_coeff": 0.02}}, ["aux-only gradient of blocks.0.ffn.router.weight"]),
        ({"moe": {"moe_z_loss_coeff": 0.0011}}, ["z-only gradient of blocks.0.ffn.router.weight"]),
        ({"optimizer": {"weight_decay": 0.11}}, ["weight embedding.weight"]),
        ({"training": {"global_batch_size": 2}}, ["packs of step 0", "tokens of step 0"]),
    ],
    ids=["seed", "aux", "z", "decay", "batch"],
)
def test_another_run_is_found_out(
    overrides: dict[str, Any], complaints: list[str], folder: Path, one_process: dict[str, Any]
) -> None:
    report = observe_on_rank(0, 1, config_of(folder, **overrides), str(folder / "other"))
    failures = compare([report], one_process).failures(TOLERANCE)
    for complaint in complaints:
        assert any(complaint in line for line in failures), failures


def test_a_small_factor_on_auxiliary_losses_hides_in_the_main_gradient(
    folder: Path, one_process: dict[str, Any]
) -> None:
    report = observe_on_rank(0, 1, config_of(folder, moe={"moe_z_loss_coeff": 0.001001}), str(folder / "other"))
    found = {d.what: d.value for d in compare([report], one_process).differences}
    name = "gradient of blocks.0.ffn.router.weight"
    assert found[f"z-only {name}"] == pytest.approx(1e-3, rel=0.01)
    assert found[f"z-only {name}"] > 1.5 * found[name], "which is why each loss is looked at alone"


def test_digests_see_bits_shapes_and_dtypes() -> None:
    ones = torch.ones(2, 3)
    assert digest([ones]) == digest([ones.t().contiguous().t()])
    different = [ones.view(3, 2), ones.double(), torch.nextafter(ones, 2 * ones), torch.tensor(1.0)]
    assert len({digest([tensor]) for tensor in [ones, *different]}) == 5
