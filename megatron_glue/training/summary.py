"""The numbers at the end of a run: one dictionary, shown as a table and written as JSON.

It formats and writes; where the numbers come from is :func:`megatron_glue.training.closing.collect_summary`.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_glue.config.errors import ConfigError


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory of this process so far: allocated on the GPU, or resident in RAM without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def expert_load(counts: list[list[int]]) -> dict[str, float] | None:
    """Spread of the expert load, as multiples of an even share.

    Args:
        counts: (token, choice) pairs per MoE layer and expert.

    Returns:
        ``min``, ``mean`` and ``max`` over all layers and experts (mean is 1 by construction), or ``None`` without any.
    """
    shares = [count * len(row) / sum(row) for row in counts for count in row if sum(row)]
    if not shares:
        return None
    return {"min": min(shares), "mean": sum(shares) / len(shares), "max": max(shares)}


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write a JSON file; see :func:`write_text`.

    Args:
        path: File to write; its folder is made if missing.
        content: What to write.

    Raises:
        OSError: If the place cannot be written.
    """
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a file aside and rename it, so that a reader never sees half of one.

    Args:
        path: File to write; its folder is made if missing.
        text: What to write.

    Raises:
        OSError: If the place cannot be written.
    """
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():
        # A device or a pipe: renaming would put a file in its place.
        target.write_text(text, encoding="utf-8")
        return
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def check_writable_file(path: str | Path, field: str) -> None:
    """Find out before a run whether its last act will be possible.

    Args:
        path: File that is to be written.
        field: Setting that named it.

    Raises:
        ConfigError: If the folder cannot be made or written, or the path is a folder.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(field, path, f"cannot be written ({reason})", "give a file in a folder you own") from error


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Turn a summary into the rows of its table.

    Args:
        summary: As written to ``--summary-path``.

    Returns:
        (name, value) pairs.
    """
    losses = summary["losses"]
    builds_per_batch = summary["metadata_builds"] / max(summary["micro_batches"], 1)
    rows = [
        ("training loss, first -> last", f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "no step was run"),
        (
            "held-out loss (unigram entropy)",
            f"{summary['heldout_loss']:.4f} ({summary['unigram_entropy']:.4f}) nats/token",
        ),
        ("throughput", f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['ranks']} rank(s)"),
        ("packing efficiency", f"{summary['packing_efficiency']:.2%}"),
        (
            "packed metadata per micro-batch",
            f"{builds_per_batch:.1f} builds ({summary['metadata_builds']} builds, {summary['metadata_built_ahead']} of "
            f"them ahead, {summary['metadata_reuses']} reuses, {summary['host_reads']} host reads)",
        ),
    ]
    if summary["cache"]:
        rows.append(("cache: hits / misses / evictions, peak", describe_cache(summary["cache"])))
    if summary["offloaded_bytes"]:
        rows.append(("activations offloaded", _mib(summary["offloaded_bytes"])))
        waited = f"{summary['reload_wait_ms']:,.1f} ms (overlap {_share(summary['overlap_efficiency'])})"
        rows.append(("waiting for reloads", waited))
    load = summary["expert_load"]
    if load is not None:
        rows.append(("expert load, min / mean / max", f"{load['min']:.2f} / {load['mean']:.2f} / {load['max']:.2f}"))
        rows.append(("dropped tokens", str(summary["dropped_tokens"])))
    if summary["skipped_updates"]:
        rows.append(("skipped updates (loss or gradient not finite)", str(summary["skipped_updates"])))
    if summary["loss_spikes"]:
        rows.append(("loss spikes", str(summary["loss_spikes"])))
    if summary["rerun_iterations"]:
        rows.append(("steps run again for rows without room", str(len(summary["rerun_iterations"]))))
    rows.append(("peak memory", _mib(summary["peak_memory_bytes"])))
    if summary["failed_saves"]:
        rows.append(("failed saves", str(summary["failed_saves"])))
    rows.append(("checkpoint", summary["checkpoint"] or "none"))
    return rows


def describe_cache(counters: dict[str, dict[str, int]]) -> str:
    """Show the counters of a cache in one line, kind by kind.

    Args:
        counters: As ``CacheStatistics.as_dict`` returns them.
    """
    return ", ".join(
        f"{kind.replace('_', ' ')} {of['hits']} / {of['misses']} / {of['evictions']}, {_mib(of['peak_bytes'])}"
        for kind, of in counters.items()
    )


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.0%}"


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """Print the summary as a table."""
    table = Table(title=f"Summary of {summary['name']}: {summary['iterations']} iterations", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    (console or Console()).print(table)
