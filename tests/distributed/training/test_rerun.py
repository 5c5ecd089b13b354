"""Steps under ``--moe-static-capacity-factor`` whose rows find no room, against runs with exchanges of any size.

Two ranks share the experts and have two micro-batches each in a step. Room is made short in chosen steps only.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.config.sections import RunConfig
from megatron_glue.moe import dispatcher_bounded
from megatron_glue.parallel.gather import gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint.saving import RunSaver
from megatron_glue.training.checkpoint.store import CheckpointStore
from megatron_glue.training.loop import Run, train
from megatron_glue.training.monitor import Monitor
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import settle_step, train_step
from tests.support.cases import small_config, write_corpus
from tests.support.layout_runs import ADAM_TOLERANCE
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

CPU = torch.device("cpu")
NUM_STEPS = 4
MODEL = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MOE = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_ffn_hidden_size": 16}
ONE_PASS = {"enable_grouped_index": True, "enable_metadata_cache": True}
OFFLOAD = {"accelerator": ONE_PASS | {"enable_double_buffer": True}}
Report = dict[str, Any]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("rerun") / "corpus.jsonl"))


def config_of(corpus: str, factor: float | None, engine: str = "ddp", **training: Any) -> RunConfig:
    return small_config(
        corpus,
        model=MODEL,
        moe=MOE | {"moe_static_capacity_factor": factor},
        parallel={"expert_model_parallel_size": 2, "data_parallel_engine": engine},
        training={"train_iters": NUM_STEPS, "accelerator": ONE_PASS, **training},
        data={"seq_length": 64},
    )


def build(config: RunConfig, folder: Path) -> Session:
    torch.set_num_threads(1)
    return build_session(config, ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads), CPU, folder)


def make_room_short(session: Session, steps: Collection[int], patch: pytest.MonkeyPatch) -> None:
    """In steps, counted from 0, a rank has room for 8 rows; else for all."""

    def slots_per_rank(_factor: float, num_pairs: int, _num_ranks: int) -> int:
        return 8 if session.iteration in steps else num_pairs

    patch.setattr(dispatcher_bounded, "slots_per_rank", slots_per_rank)


def spoil_gradient(session: Session, step: int) -> None:
    """Make one gradient NaN in a step, on all ranks."""
    first = session.engine.gradient_parameters()[0]
    first.register_hook(lambda grad: grad * float("nan") if session.iteration == step else grad)


def observe(session: Session) -> Report:
    metrics, loader = session.metrics, session.data.loader
    metrics.flush(session.host_reader, session.mesh.world_group)
    report = {
        "weights": {name: t.clone() for name, t in gather_full_parameters(session.engine.module, session.mesh).items()},
        "biases": [router.expert_bias_E.clone() for router in session.built.routers.values()],
        "losses": torch.tensor(metrics.losses),
        "grad_norms": torch.tensor(metrics.grad_norms),
        "aux_losses": torch.tensor(metrics.aux_losses),
        "counters": {
            "expert_counts": metrics.expert_counts,
            "tokens": (metrics.num_tokens, metrics.step_tokens, metrics.num_dropped),
            "position": asdict(loader.position),
            "iteration": session.iteration,
            "micro_batches": session.num_micro_batches,
            "skipped": session.optimizer.num_skipped_updates,
        },
        "reruns": [rerun.iteration for rerun in session.reruns],
        "reads": session.num_step_host_reads,
        "reload_steps": len(session.built.activation.step_times()),
    }
    session.close()
    return report


def run_steps(config: RunConfig, folder: Path, steps: Collection[int], prepare: Callable[[Session], None]) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        session = build(config, folder)
        make_room_short(session, steps, patch)
        prepare(session)
        rates = []
        for _ in range(NUM_STEPS):
            result = train_step(session)
            session.metrics.add(result, 0.0)
            rates.append(result.lr)
        settled = settle_step(session)
        rates[-1] = settled.lr if settled else rates[-1]
        # A discarded step may have been given another rate than the one that counts.
        return observe(session) | {"last_rate": rates[-1]}


def spoil_second(session: Session) -> None:
    spoil_gradient(session, 1)


SHORT_STEPS: dict[str, tuple[Collection[int], Callable[[Session], None]]] = {
    "never": ((), lambda session: None),
    "two in a row": ((1, 2), lambda session: None),
    "first and last": ((0, NUM_STEPS - 1), lambda session: None),
    "with a gradient that is not finite": ((1,), spoil_second),
}


def run_all(rank: int, world_size: int, corpus: str) -> dict[str, tuple[Report, Report]]:
    """(with bounded exchanges, with exact ones) by case."""
    folder = Path(corpus).parent / f"rank-{rank}"
    plain = run_steps(config_of(corpus, None), folder, (), lambda session: None)
    spoiled = run_steps(config_of(corpus, None), folder, (), spoil_second)
    found = {}
    for name, (steps, prepare) in SHORT_STEPS.items():
        bounded = run_steps(config_of(corpus, 2.0), folder, steps, prepare)
        found[name] = bounded, spoiled if prepare is spoil_second else plain
    always = range(NUM_STEPS)
    found["always"] = run_steps(config_of(corpus, 1.0), folder, always, lambda session: None), plain
    offloaded = config_of(corpus, 1.0, "fsdp2", **OFFLOAD)
    expected = run_steps(config_of(corpus, None, "fsdp2", **OFFLOAD), folder, (), lambda session: None)
    found["always, fsdp2"] = run_steps(offloaded, folder, always, lambda session: None), expected
    return found


@pytest.fixture(scope="module")
def reports(corpus: str) -> list[dict[str, tuple[Report, Report]]]:
    return run_distributed(run_all, 2, corpus, timeout_s=120.0)


def assert_same(actual: Report, expected: Report, what: str) -> None:
    for name, weight in expected["weights"].items():
        assert_close(actual["weights"][name], weight, what=f"{what}: {name}", tolerance=ADAM_TOLERANCE)
    for kind in ("losses", "grad_norms", "aux_losses"):
        is_finite = torch.isfinite(expected[kind])
        assert torch.equal(torch.isfinite(actual[kind]), is_finite), f"{what}: {kind}"
        assert_close(actual[kind][is_finite], expected[kind][is_finite], what=f"{what}: {kind}")
    for actual_E, expected_E in zip(actual["biases"], expected["biases"], strict=True):
        assert torch.equal(actual_E, expected_E), f"{what}: biases"
    assert actual["counters"] == expected["counters"], what
    assert actual["last_rate"] == expected["last_rate"], what


@pytest.mark.parametrize("name", SHORT_STEPS)
def test_a_step_without_room_is_run_again(name: str, reports: list[dict[str, tuple[Report, Report]]]) -> None:
    for of_rank in reports:
        actual, expected = of_rank[name]
        assert actual["reruns"] == [step + 1 for step in SHORT_STEPS[name][0]]
        assert_same(actual, expected, name)
        assert expected["counters"]["skipped"] == (1 if "finite" in name else 0)


@pytest.mark.parametrize("name", ["always", "always, fsdp2"])
def test_a_run_of_repeated_steps_is_the_exact_run_to_the_bit(
    name: str, reports: list[dict[str, tuple[Report, Report]]]
) -> None:
    for of_rank in reports:
        actual, expected = of_rank[name]
        assert actual["reruns"] == [1, 2, 3, 4]
        assert_same(actual, expected, name)
        assert all(torch.equal(actual["weights"][key], weight) for key, weight in expected["weights"].items())
        assert torch.equal(actual["losses"], expected["losses"])
        # A repetition belongs to the step that its wall time is counted into.
        assert actual["reload_steps"] == expected["reload_steps"] == (NUM_STEPS if "fsdp2" in name else 0)


def test_f80_a_run_whose_rows_have_room_reads_nothing(reports: list[dict[str, tuple[Report, Report]]]) -> None:
    for of_rank in reports:
        actual, expected = of_rank["never"]
        assert actual["reads"] == 0
        layers, micro_batches = 2, 2
        assert expected["reads"] == NUM_STEPS * layers * micro_batches
        repeated, _ = of_rank["two in a row"]
        assert repeated["reads"] == 2 * layers * micro_batches, "only steps that were run again"


def loop_to_the_end(session: Session, root: str) -> str:
    """What the real loop says."""
    said = io.StringIO()
    monitor = Monitor("plain", enabled=True, total=NUM_STEPS, stream=said)
    store = CheckpointStore(Path(root), 9, session.mesh)
    train(Run(session, RunSaver(store, monitor.say), monitor))
    return said.getvalue()


def save_and_resume(rank: int, world_size: int, corpus: str, root: str) -> tuple[Report, Report, Report, str]:
    """An exact run, one that saves behind a repeated step, and one that resumes from there."""
    folder = Path(corpus).parent / f"rank-{rank}"
    every_second = {"save_interval": 2, "eval_interval": 3, "eval_iters": 1}
    session = build(config_of(corpus, None, **every_second), folder)
    loop_to_the_end(session, f"{root}/exact")
    exact = observe(session)
    with pytest.MonkeyPatch.context() as patch:
        session = build(config_of(corpus, 2.0, **every_second), folder)
        make_room_short(session, (1, 2), patch)
        said = loop_to_the_end(session, f"{root}/bounded")
        whole = observe(session)
        session = build(config_of(corpus, 2.0, **every_second), folder)
        make_room_short(session, (2,), patch)
        store = CheckpointStore(Path(root) / "bounded", 9, session.mesh)
        session.adopt(store.load(store.path_of(2), session.training_state()))
        loop_to_the_end(session, f"{root}/resumed")
    return exact, whole, observe(session), said


def test_a_checkpoint_behind_a_repeated_step_resumes_the_exact_run(corpus: str, tmp_path: Path) -> None:
    for exact, whole, resumed, said in run_distributed(save_and_resume, 2, corpus, str(tmp_path), timeout_s=120.0):
        for what, report in (("whole", whole), ("resumed", resumed)):
            for name, weight in exact["weights"].items():
                assert_close(report["weights"][name], weight, what=f"{what}: {name}", tolerance=ADAM_TOLERANCE)
            assert_close(report["losses"], exact["losses"], what=f"{what}: losses")
            assert report["counters"]["position"] == exact["counters"]["position"]
            assert report["counters"]["tokens"][0] == exact["counters"]["tokens"][0]
        assert (whole["reruns"], resumed["reruns"]) == ([2, 3], [3])
        # Evaluated behind iteration 3, saved behind 2 and 4: what has to be run again is settled by then.
        lines = [line for line in said.splitlines() if "run again with exchanges of any size" in line]
        assert [line.partition(" was ")[0] for line in lines] == ["iteration 2", "iteration 3"]
        assert all("rows of experts found no room (--moe-static-capacity-factor 2)" in line for line in lines)
        assert said.index(lines[0]) < said.index("saved checkpoint")


def save_unsettled(rank: int, world_size: int, corpus: str) -> str:
    session = build(config_of(corpus, 2.0), Path(corpus).parent / f"rank-{rank}")
    train_step(session)
    with pytest.raises(AssertionError, match="settle_step") as raised:
        session.training_state()
    settle_step(session)
    session.training_state()
    session.close()
    return str(raised.value)


def test_nothing_is_saved_before_the_newest_step_is_settled(corpus: str) -> None:
    assert all("run again" in text for text in run_distributed(save_unsettled, 2, corpus))
