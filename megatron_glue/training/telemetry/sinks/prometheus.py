"""Serves the newest figures to Prometheus: its text format, over Python's own HTTP server, on the first rank.

The page is put together when somebody asks, by the server's thread: steps may be far shorter than the time between two
scrapes, and a record only leaves its values. Figures that a record lacks stay as they were. There is no password and no
encryption, so the port is bound to this machine unless the user says otherwise. (The format: prometheus.io, "Exposition
formats", version 0.0.4.)
"""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.training.telemetry.record import METRICS, MetricRecord

PREFIX = "megatron_glue_"
PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TIMEOUT_S = 10


class PrometheusSink:
    """The server of one run.

    Args:
        host: Address to bind.
        port: Port to bind; 0: any that is free.
        run_name: Label ``run`` of every figure.

    Raises:
        ConfigError: If the port cannot be had.
    """

    name = "Prometheus"

    def __init__(self, host: str, port: int, run_name: str) -> None:
        self._run_name = run_name
        # Replaced as a whole and never changed: the server's thread reads it at any time.
        self._newest: tuple[int | None, dict[tuple[str, int | None], float]] = (None, {})
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            reason = f"{host} cannot be bound to it ({(error.strerror or str(error)).lower()})"
            raise ConfigError(flag_of("metrics_port"), port, reason, "give a free port, or another host") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics-endpoint", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_address[1]

    @property
    def page(self) -> bytes:
        """What a scrape gets now; empty before the first record."""
        iteration, values = self._newest
        return b"" if iteration is None else render(values, iteration, self._run_name).encode()

    def write(self, record: MetricRecord) -> None:
        """Take the figures over."""
        values = dict(self._newest[1])
        values.update({(name, None): value for name, value in record.values.items()})
        for name, of_layer in record.by_layer.items():
            values.update({(name, layer): value for layer, value in of_layer.items()})
        self._newest = (record.iteration, values)

    def close(self) -> None:
        """End the server and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def render(values: dict[tuple[str, int | None], float], iteration: int, run_name: str) -> str:
    """Put the page together.

    Args:
        values: (name, MoE layer if it is one of a layer) -> value.
        iteration: Of the newest record.
        run_name: Label ``run`` of every figure.
    """
    run = _escape(run_name)
    lines = _head("iteration", "gauge", "Iterations done. (1)")
    lines.append(f'{PREFIX}iteration{{run="{run}"}} {iteration}')
    for spec in METRICS:
        own = [(layer, value) for (name, layer), value in values.items() if name == spec.name]
        if own:
            lines += _head(spec.name, spec.kind, f"{spec.doc} ({spec.unit})")
        for layer, value in own:
            labels = f'run="{run}"' if layer is None else f'run="{run}",layer="{layer}"'
            lines.append(f"{PREFIX}{spec.name}{{{labels}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, doc: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {_escape(doc)}", f"# TYPE {PREFIX}{name} {kind}"]


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], sink: PrometheusSink) -> None:
        self.sink = sink
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no event of the run."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _TIMEOUT_S
    server_version, sys_version = "megatron_glue", ""

    def do_GET(self) -> None:
        """Send the page."""
        if self.path.split("?")[0] != PATH:
            self.send_error(404, explain=f"figures are under {PATH}")
            return
        page = self.server.sink.page
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not told."""
