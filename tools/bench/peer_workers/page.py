"""Writes the figures of ``tools/bench/peers.py`` as a Markdown page. It measures nothing.

The page is written anew by every run that is asked for it, so nothing in it is typed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

HEAD = """# Beside other frameworks

Written by `python tools/bench/peers.py --markdown docs/peers.md` ({date}, {machine}). Every contestant is a process
of its own that holds one model of the same sizes, gets the same token ids and takes one training step when it is told
to: forward, backward, AdamW, the loss read on the host; fp32. They take turns step by step in rotating order. "Ours
is" is the median over {rounds} rounds of peer time / our time. Nobody clips gradients, nobody has a z-loss.

GFLOP/s count the model's matrix products and the causal half of attention's, forward and backward, recomputation not
included; "of torch.mm" is that rate against the same products alone through `torch.mm`, on this machine, in the same
run. It can pass 100%, because `--matmul-backend auto` takes faster products where there are any: the row "products
alone, auto" has their rate. Peak memory is resident memory, libraries included.

"""


def markdown(
    result: Mapping[str, tuple[str, Sequence[Mapping[str, Any]]]],
    machine: str,
    rounds: int,
    verdicts: Mapping[str, str],
) -> str:
    """Write the page.

    Args:
        result: By case: what its rows are packed from, and a row per contestant.
        machine: Named at the top.
        rounds: Counted steps of each.
        verdicts: By case, the line below its table; absent where no peer took part.

    Returns:
        The text.
    """
    parts = [HEAD.format(date=date.today().isoformat(), machine=machine, rounds=rounds)]
    for name, (data, rows) in result.items():
        parts.append(f"## {name}\n\n{data}.\n\n")
        parts.append("| | step s | min-max | tokens/s | ours is | GFLOP/s | of torch.mm | peak MiB |\n")
        parts.append("|---|---|---|---|---|---|---|---|\n")
        parts.extend(_line(row) for row in rows)
        if name in verdicts:
            parts.append(f"\nOurs: {verdicts[name]}.\n")
        parts.append("\n")
    versions = sorted({row["version"] for _, rows in result.values() for row in rows if row.get("version")})
    parts.append(f"Versions: {', '.join(versions)}.\n")
    return "".join(parts)


def table_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a table says of a contestant that took part."""
    is_model = not row["name"].startswith("products")
    return (
        row["name"],
        f"{row['median_s']:.3f}",
        f"{row['min_s']:.3f}-{row['max_s']:.3f}",
        f"{row['tokens_per_s']:,.0f}" if is_model else "",
        f"{row['ratio_to_ours']:.2f}x" if row["is_peer"] else "",
        f"{row['gflops']:.0f}",
        f"{row['share_of_torch_mm']:.0%}",
        f"{row['peak_mib']:,.0f}",
    )


def _line(row: Mapping[str, Any]) -> str:
    if row["absent"]:
        return f"| {row['name']} | absent: {row['absent']} | | | | | | |\n"
    return "| " + " | ".join(table_cells(row)) + " |\n"
