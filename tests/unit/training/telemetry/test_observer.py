"""The watch of a real session: what its records hold, and what happens to a sink that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint.saving import RunSaver
from megatron_glue.training.checkpoint.store import CheckpointStore
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import train_step
from megatron_glue.training.telemetry.flops import ModelFlops
from megatron_glue.training.telemetry.observer import RunObserver
from megatron_glue.training.telemetry.record import MetricRecord
from tests.support.cases import small_config, write_corpus

CPU = torch.device("cpu")


class ListSink:
    """Keeps records, and fails when told to."""

    name = "list"

    def __init__(self, fails_at: int = 0) -> None:
        self.records: list[MetricRecord] = []
        self.fails_at, self.num_closed = fails_at, 0

    def write(self, record: MetricRecord) -> None:
        if record.iteration == self.fails_at:
            raise OSError(28, "No space left on device")
        self.records.append(record)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def session(tmp_path: Path) -> Session:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    accelerator = {"enable_metadata_cache": True, "metrics_interval": 2}
    config = small_config(corpus, training={"accelerator": accelerator}, logging={"peak_tflops": 1.0})
    return build_session(config, ParallelMesh(), CPU, tmp_path / "offload")


def observe(session: Session, folder: Path, sinks: list[ListSink], log_at: tuple[int, ...]) -> list[str]:
    said: list[str] = []
    saver = RunSaver(CheckpointStore(folder, 1, ParallelMesh()))
    with RunObserver(session, saver, sinks, said.append) as observer:
        for iteration in range(1, max(log_at) + 1):
            observer.begin_step(is_logging=iteration in log_at)
            session.metrics.add(train_step(session), 0.5)
            observer.end_step()
            if iteration in log_at:
                reads = session.num_step_host_reads
                observer.log(0.25)
                assert session.num_step_host_reads == reads, "reads of a record are none of the step's"
    session.close()
    return said


def test_records_are_of_the_interval(session: Session, tmp_path: Path) -> None:
    sink = ListSink()
    observe(session, tmp_path, [sink], (1, 3, 4))
    assert [record.iteration for record in sink.records] == [1, 3, 4]
    first, second, third = sink.records
    assert second.values["step_ms"] == 500
    assert second.values["samples_per_second_per_gpu"] == pytest.approx(4 / 0.5)
    assert second.values["lr"] == 0.25
    lengths_S = session.data.loader.step_segment_lengths
    flops = ModelFlops(session.config, session.data.tokenizer.vocab_size)
    assert third.values["mfu"] == pytest.approx(flops.of_step(lengths_S) / 0.5 / 1e12)
    assert third.values["packing_efficiency"] == pytest.approx(int(lengths_S.sum()) / (4 * 128))
    assert "cache_hits_total" in first.values
    assert "cache_hits_total" in second.values, "iteration 2 lies between"
    assert "cache_hits_total" in third.values
    pairs = [sum(sum(row) for row in record.expert_load.values()) for record in sink.records]
    assert pairs == pytest.approx([2 * 4] * 3), "two layers, four experts, multiples of an even share"


def test_counters_wait_for_their_interval(session: Session, tmp_path: Path) -> None:
    sink = ListSink()
    observe(session, tmp_path, [sink], (2, 3, 4))
    assert ["cache_hits_total" in record.values for record in sink.records] == [True, False, True]


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(session: Session, tmp_path: Path) -> None:
    sinks = [ListSink(), ListSink(fails_at=2), ListSink()]
    said = observe(session, tmp_path, sinks, (1, 2, 3))
    assert [len(sink.records) for sink in sinks] == [3, 1, 3]
    assert said == ["warning: list gets no further metrics: OSError: [Errno 28] No space left on device"]
    assert [sink.num_closed for sink in sinks] == [1, 1, 1]
