"""Builds the sinks that a configuration asks for, and the observer that feeds them."""

from __future__ import annotations

from pathlib import Path

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.loading import as_dict
from megatron_glue.parallel.agreement import together
from megatron_glue.training.checkpoint.saving import RunSaver
from megatron_glue.training.monitor import Monitor
from megatron_glue.training.session import Session
from megatron_glue.training.telemetry.observer import RunObserver
from megatron_glue.training.telemetry.sinks.console import ConsoleSink
from megatron_glue.training.telemetry.sinks.jsonl import JsonlSink, read_records
from megatron_glue.training.telemetry.sinks.prometheus import PrometheusSink
from megatron_glue.training.telemetry.sinks.sink import MetricSink
from megatron_glue.training.telemetry.sinks.tensorboard import TensorBoardSink
from megatron_glue.training.telemetry.sinks.weights_and_biases import WandbSink

METRICS_NAME = "metrics.jsonl"


def build_observer(session: Session, saver: RunSaver, monitor: Monitor) -> RunObserver:
    """Start the watch of a run; every rank calls this, and all end if the first cannot have a sink.

    Args:
        session: Built, and resumed if there was a checkpoint.
        saver: Its checkpoints; their folder holds the file of records.
        monitor: What the user sees.

    Returns:
        An observer with the sinks of ``LoggingConfig`` on the first rank.

    Raises:
        ConfigError: If a library is missing, or a folder, file or port cannot be had.
        PeerFailedError: If that happened on the first rank.
    """
    sinks = together(lambda: _build_sinks(session, saver.store.root, monitor), session.mesh.world_group)
    return RunObserver(session, saver, sinks, monitor.say)


def _build_sinks(session: Session, folder: Path, monitor: Monitor) -> list[MetricSink]:
    if session.mesh.rank != 0:
        return []
    sinks: list[MetricSink] = [ConsoleSink(monitor)]
    try:
        _add_sinks(sinks, session, folder)
    except Exception:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _add_sinks(sinks: list[MetricSink], session: Session, folder: Path) -> None:
    config, logging = session.config, session.config.logging
    path = Path(logging.metrics_path) if logging.metrics_path is not None else folder / METRICS_NAME
    try:
        sinks.append(JsonlSink(path))
    except OSError as error:
        reason = f"cannot be written ({(error.strerror or str(error)).lower()})"
        raise ConfigError(flag_of("metrics_path"), path, reason, "give a file in a folder you own") from error
    if logging.metrics_port is not None:
        sinks.append(PrometheusSink(logging.metrics_host, logging.metrics_port, config.training.name))
    if logging.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(Path(logging.tensorboard_dir), session.iteration + 1))
    if logging.wandb_project is not None:
        name = logging.wandb_exp_name or config.training.name
        sink = WandbSink(logging.wandb_project, name, folder, as_dict(config))
        sinks.append(sink)
        if (since_s := sink.unfinished_since_s) is not None:
            # What lies behind the checkpoint will be made again.
            for record in read_records(path):
                if record.time_s >= since_s and record.iteration <= session.iteration:
                    sink.write(record)
