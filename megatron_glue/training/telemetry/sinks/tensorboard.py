"""Writes records as TensorBoard events; the library is loaded here only, when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.training.telemetry.record import SPECS, MetricRecord

FLUSH_S = 5.0
"""What is written reaches the files this often at most: TensorBoard reads them every 30 s, and each flush waits for the
library's thread. It flushes by itself after two minutes."""


class TensorBoardSink:
    """A folder of event files.

    Args:
        folder: Where to; it is made if missing.
        first_iteration: Of this process. TensorBoard drops points of a run before it that lie there or later, which a
            resumed run makes again.

    Raises:
        ConfigError: If the library is missing or the folder cannot be written.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, first_iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                flag_of("tensorboard_dir"), folder, "the library tensorboard is not installed", remedy()
            ) from error
        try:
            self._writer: Any = SummaryWriter(str(folder), purge_step=first_iteration)
            self._flushed_at = -FLUSH_S
        except OSError as error:
            reason = f"cannot be written ({(error.strerror or str(error)).lower()})"
            raise ConfigError(flag_of("tensorboard_dir"), folder, reason, "give a folder you own") from error

    def write(self, record: MetricRecord) -> None:
        """Write a scalar for each figure, under its group; those of layers with the layer's number."""
        for name, value in record.values.items():
            self._add(f"{SPECS[name].group}/{name}", value, record)
        for name, of_layer in record.by_layer.items():
            for layer, value in of_layer.items():
                self._add(f"{SPECS[name].group}/{name}/layer_{layer}", value, record)
        for line in record.alarms:
            self._writer.add_text("alarms", line, record.iteration, record.time_s)
        if record.time_s - self._flushed_at >= FLUSH_S:
            self._flushed_at = record.time_s
            self._writer.flush()

    def _add(self, tag: str, value: float, record: MetricRecord) -> None:
        self._writer.add_scalar(tag, value, record.iteration, record.time_s)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


def remedy() -> str:
    """How to get the library."""
    return "pip install 'megatron_glue[metrics]', or leave the flag out"
