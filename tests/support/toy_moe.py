"""A tiny model with every kind of parameter that a data-parallel engine must treat differently, and its recompute.

Dense weights, experts split over ep with an all-to-all, a router weight that stays fp32, a weight tied between
embedding and head, one whose first dim does not divide, and one that only some tokens reach. Real layers are not needed
here: the engines see parameters, hooks and autograd only.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.parallel.collectives import all_to_all_equal, all_to_all_rows
from megatron_glue.parallel.data_parallel import DataParallelEngine
from megatron_glue.parallel.managed_block import ManagedBlock
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import keep_full_precision, local
from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec

VOCAB, HIDDEN, FFN, EXPERTS = 7, 6, 4, 4
# Tokens of each micro-batch of one optimizer step; token 0 occurs only in the first. One has none at all.
STEP = [[0, 1, 2, 3, 4], [5, 6, 1], [], [2, 2, 2, 2], [3, 4, 5, 6, 1, 2], [6], [4, 4], [1, 2, 3, 4, 5, 6, 1]]
NUM_STEP_TOKENS = sum(len(tokens) for tokens in STEP)


@dataclass(frozen=True, eq=False)
class ToyContext:
    """What blocks are called with: a frozen dataclass with tensors and a cache, as the real one."""

    ids_T: Tensor
    cache: dict[Any, Any] = field(default_factory=dict)
    micro_batch: int = 0
    decisions: Any = None
    is_recompute: bool = False
    router_log: Any = None
    saved_tensor_regions: Any = None
    selective: Any = None


def parameter(name: str, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return nn.Parameter(0.5 * torch.randn(*shape, generator=generator))


class ToyExperts(nn.Module):
    def __init__(self, name: str, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.num_local = EXPERTS // mesh.ep_size
        own = slice(mesh.ep_rank * self.num_local, (mesh.ep_rank + 1) * self.num_local)
        for key, shape in (("up", (EXPERTS, HIDDEN, FFN)), ("down", (EXPERTS, FFN, HIDDEN))):
            whole = parameter(f"{name}.{key}", *shape)
            part = nn.Parameter(whole.detach()[own].clone())
            set_shard_spec(part, ShardSpec(f"{name}.{key}", shape, (("ep", 0),)))
            self.register_parameter(key, part)

    def forward(self, x_TD: Tensor, expert_T: Tensor) -> Tensor:
        order_T = torch.argsort(expert_T, stable=True)
        counts_E = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add_(0, expert_T, torch.ones_like(expert_T))
        received_E = all_to_all_equal(counts_E, self.mesh.ep_group)
        send = counts_E.view(self.mesh.ep_size, -1).sum(1).tolist()
        receive = received_E.view(self.mesh.ep_size, -1).sum(1).tolist()
        x_RD = all_to_all_rows(x_TD[order_T], send, receive, self.mesh.ep_group)
        local_ids = torch.arange(self.num_local).repeat(EXPERTS // self.num_local)
        expert_R = torch.repeat_interleave(local_ids, received_E)
        up, down = local(self.up, x_TD.dtype), local(self.down, x_TD.dtype)
        y_RD = torch.einsum("rf,rfd->rd", F.gelu(torch.einsum("rd,rdf->rf", x_RD, up[expert_R])), down[expert_R])
        y_TD = all_to_all_rows(y_RD, receive, send, self.mesh.ep_group)
        return y_TD[torch.argsort(order_T)]


class ToyBlock(nn.Module):
    def __init__(self, name: str, mesh: ParallelMesh, has_rare: bool, has_experts: bool) -> None:
        super().__init__()
        self.mix = parameter(f"{name}.mix", HIDDEN, HIDDEN)
        self.scale = parameter(f"{name}.scale", HIDDEN)
        self.odd = parameter(f"{name}.odd", 3, HIDDEN)
        self.rare = parameter(f"{name}.rare", HIDDEN) if has_rare else None
        self.router = parameter(f"{name}.router", EXPERTS, HIDDEN)
        keep_full_precision(self.router)
        self.experts = ToyExperts(f"{name}.experts", mesh) if has_experts else None

    def forward(self, x_TD: Tensor, context: ToyContext) -> Tensor:
        context.cache["uses"] = context.cache.get("uses", 0) + 1
        dtype = x_TD.dtype
        h = F.gelu((x_TD * local(self.scale, dtype)) @ local(self.mix, dtype)) + local(self.odd, dtype).sum(0)
        if self.rare is not None and 0 in context.ids_T.tolist():
            h = h + local(self.rare, dtype)
        expert_T = (context.ids_T * 3 + 1) % EXPERTS
        scores_TE = (h.float() @ local(self.router, torch.float32).T).softmax(-1)
        gate_T1 = scores_TE.gather(1, expert_T[:, None]).to(dtype)
        return x_TD + h + gate_T1 * (h if self.experts is None else self.experts(h, expert_T))


class ToyModel(nn.Module):
    """Embedding, blocks, a head tied to the embedding, and the summed loss inside forward."""

    forward_methods = ("logits",)

    def __init__(
        self,
        mesh: ParallelMesh,
        *,
        run: str = "plain",
        dtype: torch.dtype = torch.float32,
        has_rare: bool = False,
        has_experts: bool = True,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.embedding = parameter("embedding", VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embedding
        self.blocks = nn.ModuleList(
            ManagedBlock(ToyBlock(f"blocks.{i}", mesh, has_rare, has_experts), RUNNERS[run]) for i in range(2)
        )

    def forward(self, context: ToyContext) -> Tensor:
        labels_T = (context.ids_T + 1) % VOCAB
        return -self._logits(context).log_softmax(-1).gather(1, labels_T[:, None]).sum() / NUM_STEP_TOKENS

    def logits(self, context: ToyContext) -> Tensor:
        return self._logits(context)

    def _logits(self, context: ToyContext) -> Tensor:
        x_TD = F.embedding(context.ids_T, local(self.embedding, self.dtype))
        for block in self.blocks:
            x_TD = block(x_TD, context)
        return (x_TD @ local(self.head.weight, self.dtype).T).float()


def run_plain(block: nn.Module, x_TD: Tensor, context: Any) -> Tensor:
    return block(x_TD, context)


def run_recomputed(block: nn.Module, x_TD: Tensor, context: Any) -> Tensor:
    return _Recompute.apply(block, context, x_TD, *block.parameters())


def run_managed(block: nn.Module, x_TD: Tensor, context: Any) -> Tensor:
    return ActivationManager(ActivationPlan(recompute=True), "cpu").run_block(block, x_TD, context)


# Two kinds of recompute: a Function that hides the block's graph and takes its parameters as inputs, and the activation
# manager's, which keeps the graph and refills its saved tensors. Both must work in the shells.
RUNNERS = {"plain": run_plain, "function": run_recomputed, "manager": run_managed}


class _Recompute(torch.autograd.Function):
    """Explicit inputs, a second run in backward, autograd.grad."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, context: Any, x_TD: Tensor, *params: Tensor) -> Tensor:
        ctx.block, ctx.context = block, context
        ctx.save_for_backward(x_TD)
        return block(x_TD, context)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (saved_TD,) = ctx.saved_tensors
        x_TD = saved_TD.detach().requires_grad_()
        params = list(ctx.block.parameters())
        with torch.enable_grad():
            y_TD = ctx.block(x_TD, ctx.context)
        return None, None, *torch.autograd.grad(y_TD, [x_TD, *params], grad_outputs[0], allow_unused=True)


def run_step(engine: DataParallelEngine, mesh: ParallelMesh, step: list[list[int]] = STEP) -> float:
    """One optimizer step's forward and backward over a step's micro-batches; returns this rank's share of the loss."""
    mine = step[mesh.dp_rank :: mesh.dp_size]
    loss_sum = 0.0
    for index, tokens in enumerate(mine):
        context = ToyContext(torch.tensor(tokens, dtype=torch.int64))
        with engine.micro_batch(is_last=index == len(mine) - 1):
            loss = engine.module(context)
            engine.backward(loss)
        assert context.cache["uses"] >= 2, "hooks must hand the very same context to blocks"
        loss_sum += loss.item()
    engine.finish_backward()
    return loss_sum
