"""The memory tool runs, its variants agree bit for bit, and memory really falls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "activation_memory.py"


def test_offloaded_inputs_leave_resident_memory(tmp_path):
    """12 inputs of 4 MiB: recompute keeps all of them, two buffers keep two (and one block's working set each)."""
    sizes = ["--layers", "12", "--tokens", "4096", "--dim", "256", "--steps", "1"]
    command = [sys.executable, str(TOOL), *sizes, "--json", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--variants", "recompute", "offload-2"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    recompute, offload = json.loads(done.stdout)
    assert recompute["gradients"] == offload["gradients"]
    assert offload["stats"]["num_reloads"] == 12
    assert offload["peak_mib"] < recompute["peak_mib"] - 6 * 4
    assert list(tmp_path.iterdir()) == []


def test_help_shows_an_example():
    done = subprocess.run([sys.executable, str(TOOL), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "example:" in done.stdout
