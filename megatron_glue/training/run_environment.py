"""With what a run was made: versions of everything that computes, for the log, for ``env.json`` and to compare ranks.

Optional libraries are looked up by their package's metadata, never imported. It reads no environment variable.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_glue import __version__
from megatron_glue.config.loading import ResolvedConfig, as_dict
from megatron_glue.training.start_report import Optimisation

ENV_NAME = "env.json"
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_LIBRARIES = {
    "NumPy": ("numpy",),
    "Triton": ("triton",),
    "DeepSpeed": ("deepspeed",),
    "Transformer Engine": ("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13"),
    "DeepEP": ("deep-ep", "deep_ep"),
}
_GIT_TIMEOUT_S = 10


@functools.cache
def software() -> Mapping[str, str]:
    """Return the version of everything that decides what a rank computes; ``none`` for what is not there.

    Returns:
        Name as users know it -> version. The same keys on every rank.
    """
    return {
        "megatron_glue": __version__,
        "git revision": git_revision(PACKAGE_ROOT.parent),
        "source": source_digest(PACKAGE_ROOT),
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "driver": driver_version(DRIVER_FILE),
        "NCCL": _nccl_version(),
        **{name: _installed(packages) for name, packages in _LIBRARIES.items()},
    }


def describe_software(versions: Mapping[str, str]) -> str:
    """One line for the log."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def git_revision(root: Path) -> str:
    """Return the commit of a checkout, with ``+changes`` where tracked files differ from it.

    Args:
        root: Top of the checkout.

    Returns:
        ``none`` where there is no git, or the folder is no checkout of its own (an installed package inside somebody
        else's checkout has no revision).
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return "none"
    revision = _git(root, "rev-parse", "HEAD")
    if revision is None:
        return "none"
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return revision[:12] + ("+changes" if changes else "")


def source_digest(root: Path) -> str:
    """Return a digest of all Python files below a folder, names included: local changes have no version.

    Args:
        root: The package's folder.
    """
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def driver_version(file: Path) -> str:
    """Return the version of the NVIDIA driver as its kernel module reports it; ``none`` without one.

    Args:
        file: The module's version file.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "none"
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else "unknown"


def environment_record(
    resolved: ResolvedConfig, optimisations: Sequence[Optimisation], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Gather what ``env.json`` holds.

    Args:
        resolved: The configuration and where it came from.
        optimisations: See :func:`megatron_glue.training.start_report.optimisations`.
        run: What the run adds: ranks, kernels, where it resumed.

    Returns:
        JSON values by name. No variable of the environment is among them.
    """
    changed = {name: source for name, source in resolved.provenance.items() if source != "default"}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "command": sys.argv[0],
        "software": dict(software()),
        **run,
        "optimisations": [
            {"name": entry.name, "on": entry.is_on, "reason": entry.reason, "source": entry.source}
            for entry in optimisations
        ],
        "provenance": changed,
        "config": as_dict(resolved.config),
    }


def _git(root: Path, *words: str) -> str | None:
    """Ask git; ``None`` if there is none, or it refuses."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _nccl_version() -> str:
    if not torch.cuda.is_available():
        return "none"
    from torch.cuda import nccl

    version: Any = nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _installed(packages: Sequence[str]) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"
