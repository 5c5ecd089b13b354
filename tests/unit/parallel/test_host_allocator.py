import subprocess
import sys

import pytest

from megatron_glue.parallel.host_allocator import keep_freed_memory
from tests.support.commands import ROOT, environment

RESIDENT = """
import ctypes, sys
from megatron_glue.parallel.host_allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = library.memset.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20
num_blocks, size = int(sys.argv[2]), int(sys.argv[3]) * 2**20
places = [0] * num_blocks
before = resident_mib()
for index in range(num_blocks):
    places[index] = library.malloc(size)
    library.memset(places[index], 1, size)
assert resident_mib() - before > 0.95 * num_blocks * size / 2**20
for place in reversed(places):
    library.free(place)
print(resident_mib() - before)
"""


def still_resident_mib(kind: str, num_blocks: int, block_mib: int) -> int:
    """What stays with the process of blocks that were given back to the C library."""
    words = [sys.executable, "-c", RESIDENT, kind, str(num_blocks), str(block_mib)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
@pytest.mark.parametrize(
    ("num_blocks", "block_mib"),
    [(8, 24), (4, 48), (30, 24)],
    ids=["from the heap", "too large for the heap of glibc as it comes", "more than half a GiB"],
)
def test_what_a_step_frees_is_there_for_the_next(num_blocks: int, block_mib: int) -> None:
    total_mib = num_blocks * block_mib
    assert still_resident_mib("kept", num_blocks, block_mib) > 0.95 * total_mib
    assert still_resident_mib("given back", num_blocks, block_mib) < 0.3 * total_mib


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
