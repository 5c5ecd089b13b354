"""What every test relies on, however the suite was started.

Where there is no CUDA device, Triton's interpreter runs the kernels on the CPU. It must be told so before anything
imports Triton, and some paths of torch do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_is_heard() -> Iterator[None]:
    """Take SIGINT back where it is ignored, as in a suite that a shell started in the background.

    An ignored signal is inherited by every process, and tests send it to themselves and to what they start.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
