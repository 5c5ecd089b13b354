"""Lets the C library keep the memory that tensors on a CPU give back.

A training step frees and asks for the same large blocks again and again. glibc gives what is free at the end of its
heap, and blocks of 32 MiB and more, back to the system, and gets them again page by page, zeroed. CUDA has torch's
caching allocator for this; on a CPU the C library can be told to keep up to 512 MiB. Peak memory hardly changes,
because the next step takes it again.

Called once, when a training program starts. It allocates nothing itself.
"""

from __future__ import annotations

import ctypes
import sys

# Numbers of parameters in glibc's malloc.h, with their values here.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_SETTINGS = {
    _M_MMAP_THRESHOLD: 32 * 2**20,  # the largest that glibc takes: smaller blocks come from the heap
    _M_TRIM_THRESHOLD: 512 * 2**20,  # free memory at the heap's end that is kept
    _M_TOP_PAD: 64 * 2**20,  # the heap grows by so much at a time
    _M_ARENA_MAX: 1,  # one heap for all threads, so that none keeps what another could use
}


def keep_freed_memory() -> bool:
    """Set the limits of glibc's ``malloc`` for this process.

    Returns:
        Whether they were set; False where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    answers = [mallopt(parameter, value) for parameter, value in _SETTINGS.items()]
    return all(answer == 1 for answer in answers)
