"""A sample continuation from the trained model, for the eye.

It runs the whole prefix for every new token and keeps no key/value cache: it shows that a model learnt something, it
does not serve one. Every rank runs the same tokens, so expert-parallel layers find all their peers.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_glue.parallel.collectives import broadcast_
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import ForwardContext, PackedSequence


@dataclass(frozen=True)
class SamplingPlan:
    """How to continue a prompt.

    Attributes:
        num_tokens: New tokens at most.
        max_context_tokens: Newest tokens that the model sees; older ones are cut off.
        temperature: Divides the logits; above 0.
        seed: Seed of the draws.
        end_token: Sampling stops when this id is drawn.
    """

    num_tokens: int
    max_context_tokens: int
    temperature: float = 0.7
    seed: int = 0
    end_token: int | None = None


def printable(text: str) -> str:
    """Escape control characters: an untrained byte model must not ring the bell or change the terminal's state."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


@torch.no_grad()
def sample_continuation(
    next_logits: Callable[[Tensor, ForwardContext, int], Tensor],
    prompt_ids: Sequence[int],
    plan: SamplingPlan,
    device: torch.device,
    mesh: ParallelMesh,
) -> list[int]:
    """Continue a prompt token by token.

    Args:
        next_logits: Maps (ids_T, context, row) to the fp32 [V] logits behind that row (``StepExecutor.next_logits``).
            The caller has switched the model to evaluation.
        prompt_ids: At least one token id.
        plan: How to continue.
        device: The model's device.
        mesh: The run's mesh. All ranks go on with the token that its first rank drew: logits may differ in the last bit
            between ranks, and a rank that stops early would leave its peers in a collective.

    Returns:
        The new token ids, without the prompt and without the end token.

    Raises:
        ValueError: If the prompt is empty.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids=(): a continuation needs at least one token to start from")
    generator = torch.Generator().manual_seed(plan.seed)
    ids = list(prompt_ids)
    for _ in range(plan.num_tokens):
        window = ids[-plan.max_context_tokens :]
        # Sequence parallelism splits the rows of the sequence evenly. Context parallelism does not split it at all.
        num_pad = -len(window) % mesh.tp_size if mesh.sequence_parallel else 0
        sequence = PackedSequence.from_lengths([len(window)], num_pad).to(device)
        context = ForwardContext(sequence=sequence, residual_rows=mesh.residual_rows(sequence.num_tokens))
        input_ids_T = torch.tensor(window + [0] * num_pad, dtype=torch.int64).to(device)
        logits_V = next_logits(input_ids_T, context, len(window) - 1)
        probabilities_V = torch.softmax(logits_V.float().cpu() / plan.temperature, dim=-1)
        token = int(broadcast_(torch.multinomial(probabilities_V, 1, generator=generator), mesh.world_group))
        if token == plan.end_token:
            break
        ids.append(token)
    return ids[len(prompt_ids) :]
