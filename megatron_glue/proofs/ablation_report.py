"""Shows what ``tools/ablate.py`` measured, as Markdown and as a picture. It measures nothing and judges nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_glue.proofs.pictures import markdown_table, save_figure

Rows = list[dict[str, Any]]
SECONDS_PER_HOUR = 3600


def cost_per_million_tokens(row: dict[str, Any], gpu_hour_price: float) -> float:
    """What training on a million live tokens costs.

    Args:
        row: Of one variant.
        gpu_hour_price: Of one rank, in any currency.
    """
    hours = 1e6 / row["tokens_per_second"] / SECONDS_PER_HOUR
    return hours * row["ranks"] * gpu_hour_price


def to_markdown(content: dict[str, Any], gpu_hour_price: float | None) -> str:
    """The whole report.

    Args:
        content: As the tool writes with ``--json``: title, variants, complaints, depths.
        gpu_hour_price: See :func:`cost_per_million_tokens`; ``None`` leaves costs out.
    """
    rows: Rows = content["variants"]
    complaints = [f"- FAILED {line}" for line in content["complaints"]]
    lines = [
        f"# The three optimisations, one by one: {content['title']}",
        "",
        *(complaints or ["Losses and gradient norms agree; counters are as they must be."]),
        "",
        "## Time",
        "",
        _time_table(rows, gpu_hour_price),
        "",
        f"Utilisation: {rows[0]['utilisation_note']}. A sample is one pack. min-max: of the ratio over rounds.",
        "",
        "## What was done",
        "",
        _count_table(rows),
        "",
        _memory_note(rows),
        "",
        "## Losses",
        "",
        "One-pass grouping takes over the baseline's weights before every round, so its curve is one comparison per "
        "round from equal weights.",
        "",
        _loss_table(rows),
        "",
    ]
    if content.get("depths"):
        lines += ["## Gain against depth", "", _depth_table(content["depths"]), ""]
    return "\n".join(lines)


def _time_table(rows: Rows, gpu_hour_price: float | None) -> str:
    header = ["variant", "step ms", "min", "max", "ratio", "min-max", "tokens/s", "samples/s per rank", "utilisation"]
    header += [] if gpu_hour_price is None else ["cost per 1M tokens"]
    table = []
    for row in rows:
        times_ms = [1e3 * seconds for seconds in row["step_times_s"]]
        cells = [row["variant"], f"{row['median_step_ms']:.1f}", f"{min(times_ms):.1f}", f"{max(times_ms):.1f}"]
        cells += [f"{row['ratio']:.2f}x", f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['samples_per_second_per_rank']:.2f}"]
        cells.append("not available" if row["utilisation"] is None else f"{row['utilisation']:.0%}")
        if gpu_hour_price is not None:
            cells.append(f"{cost_per_million_tokens(row, gpu_hour_price):.4f}")
        table.append(cells)
    return markdown_table(header, table)


def _count_table(rows: Rows) -> str:
    header = ["variant", "metadata builds", "host reads", "reload copy ms", "reload wait ms", "overlap", "peak MiB"]
    table = []
    for row in rows:
        peak = row["peak_bytes_of_a_step"]
        table.append(
            [
                row["variant"],
                str(row["metadata_builds"]),
                str(row["host_reads"]),
                f"{row['reload_copy_ms']:.1f}",
                f"{row['reload_wait_ms']:.1f}",
                f"{row['overlap_efficiency']:.0%}",
                "-" if peak is None else f"{peak / 2**20:.1f}",
            ]
        )
    return markdown_table(header, table)


def _memory_note(rows: Rows) -> str:
    if rows[0]["peak_bytes_of_a_step"] is None:
        return (
            "Peak memory: not available on a CPU, where all variants share the resident memory of one process; "
            "tools/bench/activation_memory.py measures each in its own."
        )
    return "Peak memory: of a step, above what was allocated before it."


def _loss_table(rows: Rows) -> str:
    header = ["variant", "first", "last", "largest difference", "of gradient norms", "held out"]
    table = []
    for row in rows:
        heldout = f"{row['heldout'][-1][1]:.6f}" if row["heldout"] else "-"
        table.append(
            [
                row["variant"],
                f"{row['losses'][0]:.6f}",
                f"{row['losses'][-1]:.6f}",
                f"{row['loss_difference']:.1e}",
                f"{row['grad_norm_difference']:.1e}",
                heldout,
            ]
        )
    return markdown_table(header, table)


def _depth_table(depths: dict[str, Rows]) -> str:
    names = [row["variant"] for row in next(iter(depths.values()))]
    table = [[depth, *(f"{row['ratio']:.2f}x" for row in rows)] for depth, rows in depths.items()]
    return markdown_table(["layers", *names], table)


def draw(pyplot: Any, content: dict[str, Any], path: Path) -> None:
    """Draw times, curves, their differences and, if measured, the gain against depth.

    Args:
        pyplot: ``matplotlib.pyplot``.
        content: See :func:`to_markdown`.
        path: Picture to write.
    """
    rows: Rows = content["variants"]
    depths = content.get("depths") or {}
    figure, axes = pyplot.subplots(2, 3 if depths else 2, figsize=(14 if depths else 10, 7), layout="constrained")
    _draw_times(axes[0][0], rows)
    _draw_losses(axes[0][1], rows)
    _draw_differences(axes[1][1], rows)
    _draw_throughput(axes[1][0], rows)
    if depths:
        _draw_depths(axes[0][2], depths)
        _draw_depths(axes[1][2], depths, in_ms=True)
    figure.suptitle(content["title"], fontsize=10)
    save_figure(pyplot, figure, path)


def _draw_times(axes: Any, rows: Rows) -> None:
    axes.boxplot([[1e3 * seconds for seconds in row["step_times_s"]] for row in rows], orientation="horizontal")
    axes.set_yticks(range(1, len(rows) + 1), [row["variant"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step (box: quartiles)")
    axes.grid(axis="x", alpha=0.3)


def _draw_throughput(axes: Any, rows: Rows) -> None:
    bars = axes.barh([row["variant"] for row in rows], [row["tokens_per_second"] for row in rows], color="#2c7fb8")
    axes.bar_label(bars, [f" {row['ratio']:.2f}x" for row in rows], fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second (labels: ratio of step times)")


def _draw_losses(axes: Any, rows: Rows) -> None:
    for index, row in enumerate(rows):
        # Curves lie on each other: later ones are thinner, so that all can be seen.
        width = 5.0 - 0.9 * index
        (line,) = axes.plot(range(1, len(row["losses"]) + 1), row["losses"], linewidth=width, label=row["variant"])
        if row["heldout"]:
            rounds, losses = zip(*row["heldout"], strict=True)
            axes.plot(rounds, losses, "o", markersize=9 - 1.4 * index, color=line.get_color())
    axes.set_xlabel("round; lines: training, dots: held out")
    axes.set_ylabel("loss, nats per token")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_differences(axes: Any, rows: Rows) -> None:
    for index, row in enumerate(rows[1:]):
        pairs = zip(row["losses"], rows[0]["losses"], strict=True)
        differences = [abs(own - base) / abs(base) if base else abs(own) for own, base in pairs]
        axes.plot(range(1, len(differences) + 1), differences, marker=".", linewidth=4 - index, label=row["variant"])
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round")
    axes.set_ylabel("relative difference of the loss")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_depths(axes: Any, depths: dict[str, Rows], *, in_ms: bool = False) -> None:
    numbers = [int(depth) for depth in depths]
    for index, first in enumerate(next(iter(depths.values()))):
        values = [rows[index]["median_step_ms" if in_ms else "ratio"] for rows in depths.values()]
        axes.plot(numbers, values, marker="o", label=first["variant"])
    axes.set_xticks(numbers)
    axes.set_xlabel("layers")
    axes.set_ylabel("ms per step" if in_ms else "step time of the baseline / own")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
