"""Sends records to Weights & Biases, or keeps them for it in the run's folder (``WANDB_MODE=offline``).

The library is loaded here only, when it is asked for, and finds its key itself. A run keeps its identity in its folder:
resumed, it goes on as the same run. Its own axis is ``iteration``. wandb's internal step only ever grows and drops what
comes with a smaller one, as the iterations do that a resumed run makes again; it therefore counts milliseconds since
the run was first started, so that no process of the run can fall behind another one.

What a process has handed over and not seen finished may be lost when it is killed: wandb writes behind it. The
run's folder therefore says since when nothing was finished, and the next process hands the records of that time over
once more, from the run's own file.
"""

from __future__ import annotations

import importlib
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.training.summary import write_json
from megatron_glue.training.telemetry.record import SPECS, MetricRecord

IDENTITY_NAME = "wandb.json"


class WandbSink:
    """One run there.

    Args:
        project: Its project.
        run_name: Its name.
        folder: The run's folder: offline files and the run's identity stand there.
        config: Settings to show beside it.

    Attributes:
        unfinished_since_s: When a process began, in seconds since the epoch, that was killed with this run open;
            ``None`` if none was.

    Raises:
        ConfigError: If the library is missing or will not start a run.
    """

    name = "wandb"

    def __init__(self, project: str, run_name: str, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            reason = "the library wandb is not installed"
            remedy = "pip install 'megatron_glue[wandb]', or leave the flag out"
            raise ConfigError(flag_of("wandb_project"), project, reason, remedy) from error
        identity = _identity_of(folder)
        self._folder, self._identity, self._step = folder, identity, 0
        self._created_s = float(identity["created"])
        self.unfinished_since_s: float | None = identity.get("open_since")
        try:
            self._run: Any = wandb.init(
                project=project,
                name=run_name,
                id=identity["id"],
                dir=str(folder),
                resume="allow",
                config=dict(config),
                settings=wandb.Settings(console="off", disable_git=True, silent=True),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            remedy = "run wandb login, or set WANDB_MODE=offline"
            raise ConfigError(flag_of("wandb_project"), project, reason, remedy) from error
        write_json(folder / IDENTITY_NAME, {"open_since": time.time()} | identity)
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, record: MetricRecord) -> None:
        """Log every figure, under its group."""
        values: dict[str, Any] = {"iteration": record.iteration}
        values |= {f"{SPECS[name].group}/{name}": value for name, value in record.values.items()}
        for name, of_layer in record.by_layer.items():
            values |= {f"{SPECS[name].group}/{name}/layer_{layer}": value for layer, value in of_layer.items()}
        self._step = max(self._step + 1, int(1e3 * (time.time() - self._created_s)))
        self._run.log(values, step=self._step)
        for line in record.alarms:
            self._run.alert(title="megatron_glue", text=f"iteration {record.iteration}: {line}")

    def close(self) -> None:
        """Wait until all is sent or written."""
        self._run.finish()
        kept = {name: value for name, value in self._identity.items() if name != "open_since"}
        write_json(self._folder / IDENTITY_NAME, kept)


def _identity_of(folder: Path) -> dict[str, Any]:
    """The run's identity: found in its folder, or made and left there."""
    path = folder / IDENTITY_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        has_times = all(isinstance(found.get(name, 0.0), int | float) for name in ("created", "open_since"))
        if isinstance(found["id"], str) and "created" in found and has_times:
            return found
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # a new run, or a damaged file: then it is a new run over there
    made = {"id": secrets.token_hex(4), "created": time.time()}
    write_json(path, made)
    return made
