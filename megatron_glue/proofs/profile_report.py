"""Shows the profile of a step, and two of them beside each other, as Markdown and as a picture.

Works on the plain dictionary that ``tools/profile_step.py`` saves, so a result of last week can be shown beside one of
today. It analyses nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_glue.proofs.pictures import COLORS, markdown_table, save_figure
from megatron_glue.proofs.step_profile import CATEGORIES

Result = dict[str, Any]


def to_markdown(result: Result) -> str:
    """The whole report of one profile.

    Args:
        result: As saved by the tool.
    """
    profile, step_ms = result["profile"], result["step_ms"]
    lines = [
        f"# Profile of a training step: {result['title']}",
        "",
        f"**{result['explanation']}**",
        "",
        f"A step takes {step_ms:.1f} ms (median of {result['num_timed_steps']} without the profiler; "
        f"{profile['profiled_step_ms']:.1f} ms under it, {result['num_profiled_steps']} steps). Shares are those of "
        "the profiled steps, milliseconds are shares of the step without the profiler.",
        "",
        "## Where the time goes",
        "",
        markdown_table(
            ["", "share", "ms per step"],
            [
                [name, f"{profile['shares'][name]:.1%}", f"{profile['shares'][name] * step_ms:.1f}"]
                for name in CATEGORIES
            ],
        ),
        "",
        "## The three signals",
        "",
        markdown_table(["signal", "per step"], signal_rows(result)),
        "",
        "## What each switch does, by the model",
        "",
        _switch_table(result),
        "",
        f"Amdahl's ceiling: without any glue and without any copy in sight a step would be at most "
        f"{profile['ceiling_without_glue_and_copies']:.2f}x as fast.",
        "",
    ]
    if result["phases_ms"]:
        rows = [[name, f"{ms:.2f}"] for name, ms in result["phases_ms"].items()]
        lines += ["## Phases", "", "On the host, under the profiler, with what runs inside them.", ""]
        lines += [markdown_table(["phase", "ms per step"], rows), ""]
    if profile["small_operators"]:
        rows = [
            [f"`{each['name']}`", f"{each['count_per_step']:.0f}", f"{each['ms_per_step']:.2f}"]
            for each in profile["small_operators"]
        ]
        lines += ["## Small operators that take longest", "", markdown_table(["name", "per step", "ms"], rows), ""]
    return "\n".join(lines)


def signal_rows(result: Result) -> list[list[str]]:
    """Name and value of the three signals, for people."""
    profile, step_ms = result["profile"], result["step_ms"]
    copies = f"{profile['shares']['copy'] * step_ms:.2f} ms waited, {result['copy_ms']:.2f} ms copied"
    return [
        ["gaps between large operators", f"{profile['shares']['glue']:.1%}"],
        ["waits of the host for device values", f"{profile['syncs_per_step'] + result['host_reads_per_step']:.0f}"],
        ["copies serial with compute", copies],
    ]


def comparison_markdown(before: Result, after: Result) -> str:
    """Two profiles beside each other.

    Args:
        before: A result.
        after: Another.
    """
    rows = [["step, ms", *(f"{each['step_ms']:.1f}" for each in (before, after)), _ratio(before, after)]]
    for name in CATEGORIES:
        ms = [each["profile"]["shares"][name] * each["step_ms"] for each in (before, after)]
        rows.append([f"{name}, ms", f"{ms[0]:.1f}", f"{ms[1]:.1f}", f"{ms[1] - ms[0]:+.1f}"])
    for first, second in zip(signal_rows(before), signal_rows(after), strict=True):
        rows.append([first[0], first[1], second[1], ""])
    rows.append(["verdict", before["profile"]["verdict"], after["profile"]["verdict"], ""])
    lines = [
        "# Two training steps compared",
        "",
        f"- before: {before['title']}; {before['switches']}",
        f"- after: {after['title']}; {after['switches']}",
        "",
        markdown_table(["", "before", "after", "change"], rows),
        "",
    ]
    expected = sum(
        each["gain_ms"] or 0.0
        for each, other in zip(after["expectations"], before["expectations"], strict=True)
        if each["is_on"] and not other["is_on"]
    )
    if expected:
        found = before["step_ms"] - after["step_ms"]
        lines += [f"The model expects {expected:.1f} ms from the switches turned on; measured: {found:.1f} ms.", ""]
    return "\n".join(lines)


def draw(pyplot: Any, results: dict[str, Result], path: Path) -> None:
    """Draw shares, phases and switches of one profile or of several.

    Args:
        pyplot: ``matplotlib.pyplot``.
        results: Results by the name to show.
        path: Picture to write.
    """
    figure, (top, left, right) = pyplot.subplots(
        3, 1, figsize=(9, 7.2), layout="constrained", height_ratios=(0.8 + 0.5 * len(results), 3, 1.6)
    )
    _draw_shares(top, results)
    _draw_phases(left, results)
    _draw_switches(right, results)
    save_figure(pyplot, figure, path)


def _draw_shares(axes: Any, results: dict[str, Result]) -> None:
    names = list(results)
    starts = [0.0] * len(names)
    for category in CATEGORIES:
        widths = [each["profile"]["shares"][category] * each["step_ms"] for each in results.values()]
        bars = axes.barh(names, widths, left=starts, color=COLORS[category], label=category)
        longest = max(each["step_ms"] for each in results.values())
        labels = [f"{width:.0f}" if width > 0.04 * longest else "" for width in widths]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    verdicts = ", then ".join(each["profile"]["verdict"] for each in results.values())
    axes.set_title(f"Where a step's time goes: {verdicts}", fontsize=10, loc="left", pad=24)
    axes.legend(ncols=len(CATEGORIES), loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8, frameon=False)


def _draw_phases(axes: Any, results: dict[str, Result]) -> None:
    phases = list(dict.fromkeys(phase for each in results.values() for phase in each["phases_ms"]))
    height = 0.8 / len(results)
    for index, (name, result) in enumerate(results.items()):
        places = [place + index * height for place in range(len(phases))]
        axes.barh(places, [result["phases_ms"].get(phase, 0.0) for phase in phases], height, label=name)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(phases))], phases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step on the host, under the profiler, with what runs inside")
    axes.grid(axis="x", alpha=0.3)
    if len(results) > 1:
        axes.legend(fontsize=8)


def _draw_switches(axes: Any, results: dict[str, Result]) -> None:
    last = list(results.values())[-1]
    gains = [each for each in last["expectations"] if each["gain_ms"] is not None]
    labels = [f"{each['switch']} ({'on' if each['is_on'] else 'off'})" for each in gains]
    bars = axes.barh(labels, [each["gain_ms"] for each in gains], color=COLORS["optimizer"])
    axes.bar_label(bars, [f" {each['gain_ms']:.1f} ms" for each in gains], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("ms per step that the switch saves, by the model")


def _switch_table(result: Result) -> str:
    rows = []
    for each in result["expectations"]:
        if each["gain_ms"] is None:
            gain, ratio = "-", "-"
        else:
            verb = "saves" if each["is_on"] else "would save"
            gain = f"{verb} {each['gain_ms']:.1f} ms"
            ratio = "-" if each["ratio"] is None else f"{each['ratio']:.2f}x"
        rows.append([f"`{each['switch']}`", "on" if each["is_on"] else "off", gain, ratio, each["formula"]])
    return markdown_table(["switch", "now", "per step", "without / with", "model"], rows)


def _ratio(before: Result, after: Result) -> str:
    return f"{before['step_ms'] / after['step_ms']:.2f}x"
