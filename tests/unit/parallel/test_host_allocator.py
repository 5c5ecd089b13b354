import subprocess
import sys

import pytest

from megatron_glue.parallel.host_allocator import keep_freed_memory
from tests.support.commands import ROOT, environment

FAULTS = """
import resource, torch
from megatron_glue.parallel.host_allocator import keep_freed_memory
torch.set_num_threads(1)
if {is_kept}:
    assert keep_freed_memory()
def use():
    torch.empty(4 * 2**20).fill_(1.0)
for _ in range(15):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_blocks_come_back_without_page_faults() -> None:
    """20 blocks of 16 MiB are 81,920 pages: none of them again, if the first ones are kept."""
    code = FAULTS.format(is_kept=True)
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 1000


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
