"""Whole runs of the model under a layout against the same run in one process: what a rank reports, and what must agree.

Which models, layouts and tolerances are compared is for the tests to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.gather import differing_replicas, gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.pipeline import splits_backward_of_functions
from megatron_glue.training.evaluation import evaluate
from megatron_glue.training.generation import SamplingPlan, sample_continuation
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import accumulate_gradients, train_step
from tests.support.processes import RankFailedError, run_distributed
from tests.support.tolerances import assert_close

CPU = torch.device("cpu")
Report = dict[str, Any]
FIRST_LOSS_TOLERANCE = 1e-6
"""Nothing has been updated when it is computed, so it is held closer than the losses behind it."""
ADAM_TOLERANCE = 1e-4
"""For weights under Adam's usual epsilon, which divides the last bits of small gradients by themselves."""


def dp_size_of(world_size: int, parallel: dict[str, Any]) -> int:
    """How many ranks see different micro-batches, under these fields of the parallel section."""
    axes = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
    return world_size // math.prod(parallel.get(axis, 1) for axis in axes)


def nothing_more(_session: Session) -> Report:
    """What most tests do with a session behind its two steps."""
    return {}


def observe_session(
    config: RunConfig, mesh: ParallelMesh, folder: Path, then: Callable[[Session], Report] = nothing_more
) -> Report:
    """Gradients of step 0; then two whole steps from the same start, and what ``then`` does with the session.

    Args:
        config: The run's configuration.
        mesh: The run's mesh; every rank must call this.
        folder: Of the activation disk tier, one for each rank.
        then: Called behind the two steps. It may train on: losses, norms, counts and biases are reported as they stand
            behind it, weights and counters as they stand before it.

    Returns:
        What :func:`assert_same_as_one_process` compares, counters of the two steps, and what ``then`` returned.
    """
    # As in every rank: with more threads sums may have another order, and small products take longer.
    torch.set_num_threads(1)
    session = build_session(config, mesh, CPU, folder)
    loss = accumulate_gradients(session) / session.data.loader.step_label_tokens
    gradients = session.engine.full_gradients()
    session.close()
    session = build_session(config, mesh, CPU, folder)
    train_steps(session, 2)
    cache = session.built.metadata_cache
    report = {
        "loss": loss,
        "gradients": gradients,
        "weights": gather_full_parameters(session.engine.module, mesh),
        "differing_replicas": differing_replicas(session.engine.module, mesh),
        "step_tokens": session.data.loader.step_valid_tokens,
        "builds": cache.builds,
        "reuses": cache.reuses,
        "host_reads": session.num_step_host_reads,
        "micro_batches": session.num_micro_batches,
    }
    report |= then(session)
    session.close()
    metrics, routers = session.metrics, session.built.routers
    return report | {
        "losses": torch.tensor(metrics.losses),
        "grad_norms": torch.tensor(metrics.grad_norms),
        "expert_counts": torch.tensor(metrics.expert_counts),
        "aux_losses": torch.tensor(metrics.aux_losses),
        "biases": {
            layer: router.expert_bias_E.clone() for layer, router in routers.items() if router.expert_bias_E is not None
        },
    }


def train_steps(session: Session, num_steps: int) -> None:
    """Whole steps, with their numbers read and summed over ranks."""
    for _ in range(num_steps):
        session.metrics.add(train_step(session), 0.0)
    session.metrics.flush(session.host_reader, session.mesh.world_group)


def evaluate_and_sample(session: Session) -> Report:
    """The held-out loss and a few tokens, for :func:`assert_answers_as_one_process`; training can go on."""
    mesh, model = session.mesh, session.built.model
    heldout = evaluate(model, session.executor, session.data.eval_batches(CPU), mesh)
    model.eval()
    tokens = sample_continuation(session.executor.next_logits, [100, 101, 102], SamplingPlan(6, 8), CPU, mesh)
    model.train()
    return {"heldout": heldout, "tokens": tokens}


def assert_same_as_one_process(
    reports: list[Report], expected: Report, what: str, weight_tolerance: float | None = None
) -> None:
    """Compare what every rank reported with what one process did.

    Args:
        reports: By rank, each from :func:`observe_session`.
        expected: From the same function in one process, with the same model and data.
        what: The layout, for the message of a failure.
        weight_tolerance: Relative norm for weights after steps; unset: as for everything else.
    """
    loss = torch.stack([report["loss"] for report in reports]).sum()
    assert_close(loss, expected["loss"], what=f"{what}: first-step loss", tolerance=FIRST_LOSS_TOLERANCE)
    for rank, report in enumerate(reports):
        where = f"{what}, rank {rank}"
        for kind, tolerance in (("gradients", None), ("weights", weight_tolerance)):
            assert report[kind].keys() == expected[kind].keys(), f"{where}: names of {kind}"
            for name, tensor in expected[kind].items():
                assert_close(report[kind][name], tensor, what=f"{where}: {kind} of {name}", tolerance=tolerance)
        for kind in ("losses", "grad_norms", "aux_losses"):
            assert_close(report[kind], expected[kind], what=f"{where}: {kind}")
        assert torch.equal(report["expert_counts"], expected["expert_counts"]), f"{where}: expert counts"
        assert report["step_tokens"] == expected["step_tokens"], f"{where}: tokens of a step"
        # F75: what several ranks hold, routers above all, is the same to the bit.
        assert report["differing_replicas"] == [], where
        # F68: they moved once per step, by the counts of all ranks.
        for layer, bias_E in report["biases"].items():
            assert bias_E.any(), f"{where}: the bias of layer {layer} did not move"
            assert torch.equal(bias_E, expected["biases"][layer]), f"{where}: bias of layer {layer}"
    layers = {layer for report in reports for layer in report["biases"]}
    assert layers == expected["biases"].keys(), f"{what}: layers with a bias"


def assert_answers_as_one_process(reports: list[Report], expected: Report, what: str) -> None:
    """Compare what every rank got from :func:`evaluate_and_sample` with what one process got."""
    for rank, report in enumerate(reports):
        assert_close(report["heldout"], expected["heldout"], what=f"{what}, rank {rank}: held-out loss")
        assert report["tokens"] == expected["tokens"], f"{what}, rank {rank}: sampled tokens"


class LayoutRuns:
    """Reports of many layouts, so that each can be a test and they still share the starts of their ranks.

    All cases of one world size run in one process group, one after the other, when the first of them is asked for. If
    one raises on a rank, all of them fail with its error.

    Args:
        cases: World size and configuration, by a name that can be one of a folder.
        folder: Where activation disk tiers get theirs.
        then: Module-level function, see :func:`observe_session`.
    """

    def __init__(
        self,
        cases: dict[str, tuple[int, RunConfig]],
        folder: Path,
        then: Callable[[Session], Report] = nothing_more,
    ) -> None:
        self._cases, self._folder, self._then = cases, folder, then
        self._found: dict[int, list[Report] | RankFailedError] = {}

    def reports(self, name: str) -> list[Report]:
        """What each rank reported of a case, by rank; skips the calling test where this torch cannot run the case."""
        world_size, config = self._cases[name]
        if not _can_run(config):
            pytest.skip("this torch cannot split the backward of an autograd Function")
        if world_size not in self._found:
            self._found[world_size] = self._run(world_size)
        found = self._found[world_size]
        if isinstance(found, RankFailedError):
            raise found.with_traceback(None)
        return [of_rank[name] for of_rank in found]

    def _run(self, world_size: int) -> list[Report] | RankFailedError:
        configs = {name: config for name, (size, config) in self._cases.items() if size == world_size}
        configs = {name: config for name, config in configs.items() if _can_run(config)}
        try:
            return run_distributed(
                _observe_cases,
                world_size,
                configs,
                str(self._folder),
                self._then,
                timeout_s=400.0,
                collective_timeout_s=60.0,
            )
        except RankFailedError as error:
            return error


def _can_run(config: RunConfig) -> bool:
    return config.parallel.pipeline_schedule != "zb" or splits_backward_of_functions()


def _observe_cases(
    rank: int, _world_size: int, configs: dict[str, RunConfig], folder: str, then: Callable[[Session], Report]
) -> dict[str, Report]:
    """Body of a rank."""
    found = {}
    for name, config in configs.items():
        try:
            mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
            found[name] = observe_session(config, mesh, Path(folder) / f"{name}-{rank}", then)
        except BaseException as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found
