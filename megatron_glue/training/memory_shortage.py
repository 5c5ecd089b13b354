"""What a run's memory is spent on, in one line, for the moment when there is none left; and which flag lowers it.

Parameters, gradients and moments are counted from the tensors that the session holds; what else torch has allocated is
activations and workspaces. It allocates nothing on the device and waits for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.grad_norm import local_gradient
from megatron_glue.training.session import Session

_MIB = 2**20
_REST = "activations and the rest"


def memory_table(session: Session) -> dict[str, int]:
    """Bytes by what they are for, on this rank.

    Args:
        session: At any place, also in the middle of a step.

    Returns:
        ``weights``, ``gradients``, ``moments`` and ``activations and the rest``; together what torch has allocated on a
        GPU, or the process' resident memory on a CPU.
    """
    params = list(session.engine.model.parameters())
    states = session.optimizer.torch_optimizer.state.values()
    table = {
        "weights": _num_bytes(params),
        "gradients": _num_bytes(param.grad for param in params if param.grad is not None),
        "moments": _num_bytes(value for state in states for value in state.values() if isinstance(value, Tensor)),
    }
    return table | {_REST: max(_used_bytes(session.device) - sum(table.values()), 0)}


def describe_shortage(session: Session, error: BaseException) -> str:
    """Say in one line what was asked for, what memory is spent on, and what to change.

    Args:
        session: The run whose allocation failed.
        error: What torch raised.

    Returns:
        One line.
    """
    table = memory_table(session)
    largest = max(table, key=lambda name: table[name])
    spent = ", ".join(f"{name} {num_bytes / _MIB:,.0f} MiB" for name, num_bytes in table.items())
    advice = remedy(session.config, largest)
    return (
        f"out of memory on {session.device} in {session.heartbeat.phase} of iteration {session.iteration + 1}: "
        f"{first_sentence(error)}; {spent}; {_limits(session.device)}; most is {largest}: {advice}"
    )


def remedy(config: RunConfig, largest: str) -> str:
    """Flags that lower the largest part and are not set yet.

    Args:
        config: The run's.
        largest: A key of :func:`memory_table`.
    """
    if largest != _REST:
        if config.parallel.data_parallel_engine == "ddp":
            return "--data-parallel-engine fsdp2 splits it over data-parallel ranks"
        field = "tensor_model_parallel_size" if config.moe.num_experts == 0 else "expert_model_parallel_size"
        return f"raise {flag_of(field)} or the number of ranks"
    activation = config.activation
    steps = []
    if not config.recompute and activation.recompute_granularity in ("auto", "none") and not config.offload:
        steps.append("--recompute-granularity full")
    if not config.offload:
        steps.append("--double-buffer-ckpt")
    if config.training.micro_batch_size > 1:
        steps.append(f"a smaller {flag_of('micro_batch_size')} (now {config.training.micro_batch_size})")
    steps.append(f"a smaller {flag_of('seq_length')} (now {config.data.seq_length}) or more context-parallel ranks")
    return "use " + ", or ".join(steps)


def first_sentence(error: BaseException) -> str:
    """What was asked for, without torch's advice and its numbers of other pools."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "DefaultCPUAllocator" in text:
        text = text[text.index("DefaultCPUAllocator") :]
    sentences = text.split(". ")
    # "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
    num_kept = 2 if len(sentences) > 1 and sentences[1].startswith("Tried") else 1
    return ". ".join(sentences[:num_kept]).rstrip(".")


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of storages on this rank; views of one storage count once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (local_gradient(tensor).untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())


def _used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def _limits(device: torch.device) -> str:
    """What there is, and what others have of it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (
            f"{free / _MIB:,.0f} of {total / _MIB:,.0f} MiB free, {unused / _MIB:,.0f} MiB held by torch's cache (if "
            "that is much: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        )
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"this machine has {pages * size / _MIB:,.0f} MiB"
