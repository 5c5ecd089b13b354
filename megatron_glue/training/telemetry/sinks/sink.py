"""What a place for records has to be."""

from __future__ import annotations

from typing import Protocol

from megatron_glue.training.telemetry.record import MetricRecord


class MetricSink(Protocol):
    """A place that records go to. Only the first rank has any; a failure costs the sink and not the run."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def write(self, record: MetricRecord) -> None:
        """Take over a record. Iterations grow, except that a run that resumes goes back to its checkpoint.

        Raises:
            Exception: Whatever goes wrong; it is told, and the sink gets nothing more.
        """
        ...

    def close(self) -> None:
        """Make sure that all is written, and let go of files, ports and threads. Called once."""
        ...
