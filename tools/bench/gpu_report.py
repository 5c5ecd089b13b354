#!/usr/bin/env python3
"""Say which GPU is there, and put what tools/bench/gpu.sh left behind into one Markdown table. It measures nothing.

    python tools/bench/gpu_report.py --probe FOLDER    writes FOLDER/device.json; exit code 2 where torch sees no GPU
    python tools/bench/gpu_report.py FOLDER            writes FOLDER/gpu.md from what is there

A section that failed has its status in the first table and no figures of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.pictures import markdown_table
from megatron_glue.training.exit_codes import exit_code_of
from megatron_glue.training.summary import write_json


def describe_device() -> dict[str, Any]:
    """Name the GPU and what drives it.

    Raises:
        ConfigError: If torch sees none.
    """
    if not torch.cuda.is_available():
        reason = f"torch {torch.__version__} sees no GPU here"
        raise ConfigError("--device", "cuda", reason, "run this on a machine with one, with a CUDA build of torch")
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gib": properties.total_memory / 2**30,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def sections_table(folder: Path) -> str:
    """How each section went."""
    lines = (folder / "sections.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    return markdown_table(["section", "status", "seconds"], [row[:3] for row in rows])


def ablation_table(content: dict[str, Any]) -> str:
    """The figures that tell what each optimisation gains."""
    rows = []
    for row in content["variants"]:
        peak = row["peak_bytes_of_a_step"]
        rows.append(
            [
                row["variant"],
                f"{row['median_step_ms']:.1f}",
                f"{row['ratio']:.2f}x",
                f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                "-" if peak is None else f"{peak / 2**20:.0f}",
                str(row["host_reads"]),
                f"{row['reload_wait_ms']:.1f}",
                f"{row['overlap_efficiency']:.0%}",
                f"{row['loss_difference']:.1e}",
            ]
        )
    header = ["variant", "median step ms", "ratio", "min-max", "tokens/s", "peak MiB", "host reads"]
    table = markdown_table([*header, "reload wait ms", "overlap", "loss diff"], rows)
    return "\n\n".join([content["title"], table, *(f"FAILED {line}" for line in content["complaints"])])


def timeline_table(content: dict[str, Any]) -> str:
    """Copies and what hides them."""
    rows = []
    for name in ("one buffer", "two buffers"):
        row = content[name]
        means = [sum(row[key]) / len(row[key]) for key in ("copy_ms", "compute_ms", "reload_wait_ms")]
        cells = [f"{row['median_step_ms']:.1f}", *(f"{mean:.1f}" for mean in means), f"{row['overlap_efficiency']:.0%}"]
        rows.append([name, *cells])
    header = ["variant", "median step ms", "copy ms", "compute ms", "wait ms", "overlap efficiency"]
    gain = f"Two buffers: {content['gain']:.2f}x the speed of one."
    return "\n\n".join([content["title"], markdown_table(header, rows), gain])


def reads_table(content: dict[str, Any]) -> str:
    """Host reads of one step by model."""
    rows = []
    for model in content["models"]:
        reads = [read for report in model["ranks"] for read in report["reads"]]
        in_layers = sum(read["count"] for read in reads if read["layer"] >= 0)
        outside = sum(read["count"] for read in reads if read["layer"] < 0)
        rows.append([model["model"], str(in_layers), str(outside)])
    note = "Reads that the budget excepts are counted too."
    table = markdown_table(["model", "reads in layers", "outside of layers"], rows)
    overruns = [f"FAILED {line}" for line in content["overruns"]]
    return "\n\n".join([table, note, *(overruns or ["Within the budget."])])


def operators_table(content: dict[str, Any]) -> str:
    """Each operator's ways."""
    rows = [
        [
            f"{row['operator']} ({row['sizes']}): {row['way']}",
            f"{row['median_ms']:.3f}",
            f"{row['min_ms']:.3f}-{row['max_ms']:.3f}",
            f"{row['ratio']:.2f}x",
            f"{row['difference']:.1e}",
        ]
        for row in content["rows"]
    ]
    table = markdown_table(["operator and way", "median ms", "min-max", "time / ours", "difference"], rows)
    return f"{content['title']}\n\n{table}"


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "sync_audit": ("Host reads of a step", reads_table),
    "ablation_glue_bound": ("The three optimisations, glue-bound preset, bf16", ablation_table),
    "ablation_fine_tuning": ("The three optimisations, fine-tuning on short documents, bf16", ablation_table),
    "timeline": ("Copies under compute", timeline_table),
    "operators": ("Operators", operators_table),
}


def to_markdown(folder: Path) -> str:
    """The report of one run of gpu.sh.

    Args:
        folder: Its output folder.
    """
    device = json.loads((folder / "device.json").read_text())
    parts = [
        f"# {device['name']}, {device['date']}",
        f"Compute capability {device['compute_capability']}, {device['memory_gib']:.0f} GiB, torch {device['torch']}, "
        f"CUDA {device['cuda']}, Python {device['python']}. Made by `tools/bench/gpu.sh`.",
        sections_table(folder),
    ]
    for name, (heading, table) in FIGURES.items():
        file = folder / f"{name}.json"
        if file.exists():
            parts += [f"## {heading}", table(json.loads(file.read_text()))]
    return "\n\n".join(parts) + "\n"


def run() -> int:
    """Probe or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of gpu.sh")
    parser.add_argument("--probe", action="store_true", help="only describe the GPU")
    arguments = parser.parse_args()
    if arguments.probe:
        device = describe_device()
        write_json(arguments.folder / "device.json", device)
        print(f"{device['name']}, compute capability {device['compute_capability']}, torch {device['torch']}")
    else:
        (arguments.folder / "gpu.md").write_text(to_markdown(arguments.folder), encoding="utf-8")
        print(f"wrote {arguments.folder / 'gpu.md'}")
    return 0


def main() -> int:
    """Entry point with one-line errors."""
    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
