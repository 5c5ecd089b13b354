"""MoE layers of test size and a dense oracle that computes every expert on every token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.backends.grouped_mm import grouped_mm_torch
from megatron_glue.layers.initialisation import init_expert_normal_, init_normal_
from megatron_glue.moe.balance import RouterBalance
from megatron_glue.moe.build import expert_spec
from megatron_glue.moe.dispatcher_registry import DispatcherNeeds, load_dispatcher
from megatron_glue.moe.experts import GroupedExperts
from megatron_glue.moe.layer import MoELayer, MoELayerConfig
from megatron_glue.moe.router import Router, RouterConfig
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import set_shard_spec


@dataclass(frozen=True)
class MoECase:
    """Sizes and choices of one test layer; the defaults are small and have no auxiliary losses."""

    num_experts: int = 4
    top_k: int = 2
    hidden_size: int = 8
    ffn_size: int = 12
    gated: bool = True
    one_pass: bool = True
    score_function: Any = "softmax"
    normalise_weights: bool = True
    weight_scale: float = 1.0
    has_expert_bias: bool = False
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    balance_documents: bool = False
    layer_index: int = 0
    overlap_shared_expert: bool = False
    dispatcher: str = "alltoall"
    num_chunks: int = 1
    capacity_factor: float | None = None

    def with_(self, **changes: Any) -> MoECase:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def build(self, mesh: ParallelMesh | None = None, shared_expert: nn.Module | None = None) -> MoELayer:
        """Build the layer; weights depend on global expert ids only."""
        mesh = mesh or ParallelMesh()
        reader = HostReader()
        router = Router(
            self.hidden_size,
            RouterConfig(
                self.num_experts,
                self.top_k,
                self.score_function,
                self.normalise_weights,
                self.weight_scale,
                self.has_expert_bias,
            ),
        )
        experts = GroupedExperts(
            self.num_experts // mesh.ep_size,
            self.hidden_size,
            self.ffn_size // mesh.etp_size,
            gated=self.gated,
            grouped_mm=grouped_mm_torch,
        )
        init_normal_(router.weight, 0.5, 7, "router.weight")
        for name, param in experts.named_parameters():
            spec = expert_spec(name, param, mesh)
            init_expert_normal_(param, 0.3, 7, spec, spec.local_slices(mesh.axis_sizes, mesh.axis_ranks))
            set_shard_spec(param, spec)
        needs = DispatcherNeeds(
            group=mesh.ep_etp_group,
            num_replicas=mesh.etp_size,
            num_experts=self.num_experts,
            num_chunks=self.num_chunks,
            capacity_factor=self.capacity_factor,
            device=torch.device("cpu"),
            dtype=torch.float32,
            host_reader=reader,
        )
        return MoELayer(
            router,
            experts,
            load_dispatcher(self.dispatcher, needs),
            shared_expert,
            RouterBalance(
                self.layer_index, self.aux_loss_coeff, self.z_loss_coeff, self.balance_documents, mesh.tp_cp_group
            ),
            MoELayerConfig(
                self.layer_index,
                reader,
                one_pass=self.one_pass,
                overlap_shared_expert=self.overlap_shared_expert,
            ),
        )


def dense_experts(layer: MoELayer, x_TD: Tensor) -> Tensor:
    """Output of every expert on every token, [T, E, D], by plain autograd operators."""
    experts = layer.experts
    parts = torch.einsum("td,epfd->tepf", x_TD, experts.gate_up_weight)
    hidden = F.silu(parts[:, :, 0]) * parts[:, :, 1] if experts.gated else F.gelu(parts[:, :, 0], approximate="tanh")
    return torch.einsum("tef,edf->ted", hidden, experts.down_weight)


def dense_layer(layer: MoELayer, x_TD: Tensor, expert_ids_TK: Tensor) -> Tensor:
    """The layer's output for a given choice, softmax scores, normalised weights, no shared expert."""
    scores_TE = torch.softmax(x_TD @ layer.router.weight.t(), -1)
    mask_TE = F.one_hot(expert_ids_TK, scores_TE.shape[1]).sum(1).to(scores_TE.dtype)
    weights_TE = scores_TE * mask_TE
    weights_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
    return torch.einsum("te,ted->td", weights_TE, dense_experts(layer, x_TD))


def random_rows(num_rows: int, hidden_size: int, seed: int = 0) -> Tensor:
    """fp32 rows from a generator of their own, with gradients on."""
    return torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(seed)).requires_grad_()
