"""Shows the figures that a user follows, through the run's monitor; it owns neither the bar nor the stream."""

from __future__ import annotations

from megatron_glue.training.monitor import Monitor
from megatron_glue.training.telemetry.record import MetricRecord

SHOWN = ("loss", "lr", "grad_norm", "tokens_per_second")
OFFLOAD = ("reload_wait_ms", "overlap_efficiency")


class ConsoleSink:
    """The progress line.

    Args:
        monitor: Where it is shown. Whoever made it closes it.
    """

    name = "console"

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def write(self, record: MetricRecord) -> None:
        """Show a record of a logging step, and what it alarms about."""
        for line in record.alarms:
            self._monitor.say(f"iteration {record.iteration}: {line}")
        if all(name in record.values for name in SHOWN):
            names = SHOWN + (OFFLOAD if record.values.get("overlap_efficiency") else ())
            self._monitor.log(record.iteration, {name: record.values[name] for name in names})

    def close(self) -> None:
        """Nothing is held."""
