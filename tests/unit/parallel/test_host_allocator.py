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
size, places = 24 * 2**20, [0] * 8
before = resident_mib()
for index in range(8):
    places[index] = library.malloc(size)
    library.memset(places[index], 1, size)
assert resident_mib() - before > 180
for place in reversed(places):
    library.free(place)
print(resident_mib() - before)
"""


def still_resident_mib(kind: str) -> int:
    """Of 192 MiB in 8 blocks that were given back to the C library."""
    words = [sys.executable, "-c", RESIDENT, kind]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_what_a_step_frees_is_there_for_the_next() -> None:
    assert still_resident_mib("kept") > 180
    assert still_resident_mib("given back") < 60


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
