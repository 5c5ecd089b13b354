"""Lets the C library keep the memory that tensors on a CPU give back.

A training step frees and asks for the same large blocks again and again. glibc gives what is free at the end of its
heap back to the system, and gets it again page by page, zeroed. Blocks of 32 MiB and more for which the heap has no
room it maps one by one, and gives each of them back as soon as it is free: at 16,384 tokens a tensor of the width 512
is that large. CUDA has torch's caching allocator for this; on a CPU the C library can be told to take everything from
its heap and to keep it. docs/performance.md has what that saves and costs.

The price: the heap stays as large as the largest step, evaluation or checkpoint made it, until the process ends. Peak
memory grows by a few per cent, as blocks of the heap cannot be moved together.

Called once, when a training program starts. It allocates nothing itself.
"""

from __future__ import annotations

import ctypes
import sys

# Numbers of parameters in glibc's malloc.h, with their values here.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_SETTINGS = {
    _M_MMAP_MAX: 0,  # no block has a mapping of its own; the threshold for that goes no higher than 32 MiB
    _M_TRIM_THRESHOLD: -1,  # free memory at the heap's end is kept, however much; a limit goes no higher than 2 GiB
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
