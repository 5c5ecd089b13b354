import importlib.util
import os
import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT

KERNELS = {
    "_count_in_blocks",
    "_scan_blocks",
    "_scan_experts",
    "_scatter_pairs",
    "_copy_to_rows",
    "_sum_rows",
    "_spread_gradient",
    "_route",
    "_add_parts",
    "_route_backward",
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.support.triton_compile", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == KERNELS
