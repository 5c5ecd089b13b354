"""What Linux says about the processor. Kernels are chosen by it, and times are comparable on the same one only."""

from __future__ import annotations

from pathlib import Path


def processor_facts(file: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Read the facts about a core by the names that Linux gives them (``vendor_id``, ``model name``, ...).

    Args:
        file: Where the kernel lists its cores; the last one is taken.

    Returns:
        Empty where the system does not say.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
