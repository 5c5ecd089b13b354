"""Ranks that fail together: one rank's error ends the work of all, with its reason, before anyone waits for it.

Stands at the stations of a run where a rank can fail alone: reading data, building the model. It is no place for work
that itself contains collectives: a rank that fails half way through one leaves its peers inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import all_reduce_max, gather_rows, max_over_ranks

_MESSAGE_BYTES = 1024
_LOST_PEER_TEXTS = ("connection", "timed out", "timeout")
T = TypeVar("T")


class PeerFailedError(RuntimeError):
    """Another rank failed; the message is its reason."""


def together(work: Callable[[], T], group: ProcessGroup | None) -> T:
    """Do this rank's part; return once all ranks have done theirs, raise on all of them if one failed.

    Args:
        work: This rank's part, without collectives in it.
        group: The ranks; every one of them must call this.

    Returns:
        What ``work`` returned.

    Raises:
        Exception: This rank's own failure, as it was raised.
        PeerFailedError: With the first failed rank's message, on ranks whose own part went well.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    message = first_message(str(failure) or type(failure).__name__ if failure else "", group)
    if failure is not None:
        raise failure
    if message:
        raise PeerFailedError(message)
    return result  # pyright: ignore[reportReturnType]


def first_message(message: str, group: ProcessGroup | None) -> str:
    """The message of the lowest rank that has one, on all ranks; empty if none has. Blocks the host, not the device.

    Args:
        message: This rank's message, cut to 1024 bytes; empty for none.
        group: The ranks.
    """
    if group is None:
        return message
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    lowest = -max_over_ranks(-rank if message else -num_ranks, group)
    if lowest == num_ranks:
        return ""
    text = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    if rank == lowest:
        data = message.encode()[:_MESSAGE_BYTES]
        text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return bytes(all_reduce_max(text, group).numpy()).rstrip(b"\0").decode(errors="ignore")


def gather_texts(text: str, group: ProcessGroup | None) -> list[str]:
    """The text of every rank, on every rank, in the order of ranks. Blocks the host, not the device.

    Args:
        text: This rank's; not empty.
        group: The ranks.
    """
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [bytes(rows.numpy()).decode() for rows in gather_rows(own, group)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on the device; torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in ("not enough memory", "DefaultCPUAllocator", "Cannot allocate memory")
    )


def is_anomaly(error: BaseException) -> bool:
    """Whether autograd's anomaly detection found a NaN; torch raises a plain RuntimeError that names the operator."""
    return type(error) is RuntimeError and "returned nan values in its" in str(error)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank ended or did not answer in time.

    gloo reports both as plain RuntimeErrors whose text is all there is to tell them by.
    """
    if isinstance(error, PeerFailedError | dist.DistError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and "gloo" in text and any(part in text for part in _LOST_PEER_TEXTS)
