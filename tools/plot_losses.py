#!/usr/bin/env python3
"""Draw the loss curve of one or several runs from the files that ``--summary-path`` wrote.

Needs matplotlib: ``pip install -e '.[bench]'``.

    python pretrain_moe.py --summary-path run.json
    python tools/plot_losses.py run.json --output losses.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def load(path: str) -> dict[str, Any]:
    """Read one summary.

    Args:
        path: File that ``--summary-path`` wrote.

    Returns:
        Its content.

    Raises:
        ValueError: If it is none, with the file's name and the reason.
    """
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict) or not content.get("losses"):
        raise ValueError(f"{path}: has no losses; give a file that --summary-path wrote")
    return content


def draw(summaries: dict[str, dict[str, Any]], output: str) -> None:
    """Draw all curves in one picture, each with its held-out loss and the loss of predicting by frequency.

    Args:
        summaries: Summary by file name.
        output: Picture to write; its ending chooses the format.
    """
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, summary in summaries.items():
        losses = summary["losses"]
        (line,) = axes.plot(range(1, len(losses) + 1), losses, label=f"{name}: training", linewidth=1.2)
        axes.plot(len(losses), summary["heldout_loss"], "o", color=line.get_color(), label=f"{name}: held out")
    entropy = next(iter(summaries.values()))["unigram_entropy"]
    axes.axhline(entropy, linestyle="--", color="grey", linewidth=1, label="predicting by frequency")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=110)


def main() -> int:
    """Parse the command line, read, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summaries", nargs="+", metavar="SUMMARY", help="JSON files written by --summary-path")
    parser.add_argument("--output", default="losses.png", help="picture to write (default losses.png)")
    arguments = parser.parse_args()
    try:
        summaries = {Path(path).stem: load(path) for path in arguments.summaries}
        draw(summaries, arguments.output)
    except ImportError:
        print("error: matplotlib is not installed; run pip install -e '.[bench]'", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
