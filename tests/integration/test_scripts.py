"""Launchers start what they are given, with as many processes as they are told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT, environment


def test_train_single_starts_one_process_per_nproc(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # One write per rank: unbuffered, print would send a line and its end apart, and the ranks' would mix.
    program.write_text("import os, sys; os.write(1, f'rank {os.environ[\"RANK\"]} {sys.argv[1:]}\\n'.encode())\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(ROOT / "scripts/train_single.sh"), str(program), "--flag", "two words"]
    outcome = subprocess.run(
        command, env=environment(NPROC="2", PATH=path), capture_output=True, text=True, timeout=120, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    lines = sorted(line for line in outcome.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} ['--flag', 'two words']" for rank in range(2)]
