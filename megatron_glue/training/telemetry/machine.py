"""What the machine says of itself: memory of this process, bytes through its network, how busy the device is.

Read from the kernel's and the driver's counters, without a further package. What a machine does not have is ``None``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

PROC = Path("/proc")
INFINIBAND = Path("/sys/class/infiniband")
NETWORK_S = 1.0
_WORD_BYTES = 4


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where the kernel does not say."""
    try:
        return int((PROC / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def network_bytes() -> int | None:
    """Bytes that this machine has received and sent since it started, over its network cards and InfiniBand ports.

    Loopback is left out, and so are cards that only stand for others (bridges, pairs of containers): their bytes pass a
    real one too. In a container, whose only card is such a one, it counts.
    """
    try:
        lines = (PROC / "net/dev").read_text().splitlines()[2:]
    except OSError:
        return None
    cards: dict[str, int] = {}
    for line in lines:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        if name.strip() != "lo" and len(fields) >= 9:
            cards[name.strip()] = int(fields[0]) + int(fields[8])
    real = {name: count for name, count in cards.items() if not name.startswith(("docker", "br-", "veth", "virbr"))}
    return sum((real or cards).values()) + _infiniband_bytes()


def _infiniband_bytes() -> int:
    """RDMA goes past the kernel's network cards; ports count words of four bytes."""
    total = 0
    for counter in ("port_xmit_data", "port_rcv_data"):
        for path in INFINIBAND.glob(f"*/ports/*/counters/{counter}"):
            try:
                total += int(path.read_text()) * _WORD_BYTES
            except (OSError, ValueError):
                continue
    return total


class NetworkRate:
    """Bytes per second through the machine's network, since it was last read."""

    def __init__(self) -> None:
        self._start = (time.perf_counter(), network_bytes())

    def read(self) -> float | None:
        """The mean since the last call that returned one; ``None`` where there are no counters, and within
        :data:`NETWORK_S` of it: adapters' counters may take milliseconds to read."""
        (start_s, start_bytes), now_s = self._start, time.perf_counter()
        if start_bytes is None or now_s - start_s < NETWORK_S:
            return None
        now_bytes = network_bytes()
        if now_bytes is None:
            return None
        self._start = (now_s, now_bytes)
        return (now_bytes - start_bytes) / (now_s - start_s)


class Utilization:
    """How busy the device is.

    Args:
        device: Where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_available = True
        self._start = (time.perf_counter(), time.process_time())

    def read(self) -> float | None:
        """Share of time that a kernel ran in the driver's newest sample; on a CPU the processor time of this process
        since the last call, as a share of its threads' time. ``None`` where it cannot be had."""
        if self._device.type != "cuda":
            (wall, used), now = self._start, (time.perf_counter(), time.process_time())
            self._start = now
            return (now[1] - used) / max((now[0] - wall) * torch.get_num_threads(), 1e-9)
        if self._is_available:
            try:
                return torch.cuda.utilization(self._device) / 100
            except Exception:
                # Without NVML's bindings torch raises one error, without a driver's permission another: asked once.
                self._is_available = False
        return None
