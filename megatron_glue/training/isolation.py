"""The proof of ``--prove-isolation``: in a pack, no document sees another, and no gradient crosses a boundary.

A stand-in for the run's model is built: two narrow layers with its attention (heads, positions, norms, window,
dropout), its kernels, its cache and its ranks, and with its router and experts if it has any. One pack of documents
passes through it, and then the same pack once for each document, with other tokens in that document. A document that
saw the changed one would have other outputs; one that the changed one saw would have other gradients, since the loss of
the changed one is part of their sum. Lengths stay the same, so the same products run on the same shapes, and what is
isolated keeps its bits.

Experts are the exception: how many rows an expert gets depends on all documents, and the last bit of a product may
depend on the number of its rows. There the routing of every other token must be the same, and values to a tolerance.

It does not prove that the run's weights are healthy, that data-parallel engines sum rightly, or that the stages of a
pipeline hand over what they should: see ``tools/parity.py``. It stands before everything else that a run does.

Shape suffixes: T tokens of the pack, S rows of the residual stream on this rank, K top-k, V rows of the vocabulary on
this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glue.config.sections import RunConfig
from megatron_glue.models.build import BuildPlace, BuiltModel, build_model
from megatron_glue.moe.router import Routing
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.collectives import all_reduce_max
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import local
from megatron_glue.types import ForwardContext, PackedSequence

# One alone, short ones that share a batch, one longer than all that are batched, one token.
_LENGTHS = (7, 40, 38, 150, 1, 16, 33)
_LONGEST_WINDOW = 96
_HIDDEN_SIZE = 64
_VOCAB_SIZE = 128
_WIDTH_PER_RANK = 16
_TOLERANCE = 1e-6


class IsolationError(RuntimeError):
    """A document of a pack changed with another one; the message says which and by how much."""


@dataclass(frozen=True)
class IsolationReport:
    """What was proven. Differences are the largest over all ranks and documents, as shares of the largest value.

    Attributes:
        backend: The attention kernel, and how it meets the tokens of other context-parallel ranks.
        windows: Windows of the layers, 0 for none.
        cp_size: Ranks that split each document.
        num_documents: Documents of the pack.
        num_changed: Those that were changed, one at a time, and whose own outputs changed.
        has_experts: Whether the layers are mixtures of experts.
        has_gradients: Whether a backward pass ran.
        output_difference: Between logits of other documents.
        gradient_difference: Between gradients with respect to their embeddings.
        num_rerouted: Most tokens of other documents that went to other experts, of one rank and one change.
        limit: What differences were held to; 0 for bit-equal. Above it with experts, and where the kernels do not
            repeat their own bits.
    """

    backend: str
    windows: tuple[int, ...]
    cp_size: int
    num_documents: int
    num_changed: int
    has_experts: bool
    has_gradients: bool
    output_difference: float
    gradient_difference: float
    num_rerouted: int
    limit: float

    @property
    def holds(self) -> bool:
        """Whether documents are isolated."""
        largest = max(self.output_difference, self.gradient_difference)
        is_kept = largest <= self.limit and self.num_rerouted == 0
        return is_kept and self.num_changed == self.num_documents

    def describe(self) -> str:
        """One line for the log."""
        windows = " and ".join(str(window) if window else "none" for window in self.windows)
        where = f"attention {self.backend}, window {windows}, cp {self.cp_size}"
        kept = ["outputs", *(["gradients"] if self.has_gradients else []), *(["routing"] if self.has_experts else [])]
        largest = max(self.output_difference, self.gradient_difference)
        rule = f"limit {self.limit:.1g}" if self.limit else "bit-equal"
        text = f"{where}: changed {self.num_changed} of {self.num_documents} documents one by one; the others'"
        if self.holds:
            return f"{text} {', '.join(kept)} stayed (largest difference {largest:.2g}, {rule})"
        return (
            f"{text} outputs differ by {self.output_difference:.2g}, gradients by {self.gradient_difference:.2g} "
            f"({rule}), {self.num_rerouted} tokens went to other experts"
        )


def prove_isolation(
    config: RunConfig, mesh: ParallelMesh, device: torch.device, *, has_gradients: bool = True
) -> IsolationReport:
    """Prove that documents of a pack are isolated under this configuration; collective, the same answer on all ranks.

    Args:
        config: A validated configuration.
        mesh: The run's mesh.
        device: Where this rank computes.
        has_gradients: Whether to run backward too, which not every kernel has everywhere.

    Returns:
        What was proven.

    Raises:
        IsolationError: On all ranks, if a document changed with another one.
        ConfigError: If the kernels cannot be had.
    """
    places = sum(-(-length // config.data.segment_alignment) for length in _LENGTHS) * config.data.segment_alignment
    unit = mesh.cp_size * mesh.tp_size
    # One unit more: there is padding, too.
    num_pad_tokens = (places // unit + 1) * unit - sum(_LENGTHS)
    config = _stand_in(config, mesh, sum(_LENGTHS) + num_pad_tokens)
    mesh = _without_pipeline(mesh)
    pack = _Pack(build_model(config, _VOCAB_SIZE, BuildPlace(mesh, device, HostReader())), config, mesh, device)
    before = pack.run(num_pad_tokens, None, has_gradients=has_gradients)
    again = pack.run(num_pad_tokens, None, has_gradients=has_gradients)
    found = [
        _compare(before, pack.run(num_pad_tokens, document, has_gradients=has_gradients), document)
        for document in range(len(_LENGTHS))
    ]
    outputs, gradients, rerouted, own_outputs = zip(*found, strict=True)
    noise = max(_compare(before, again, None))
    # In double precision: counts and differences are exact.
    own = torch.tensor([max(outputs), max(gradients), max(rerouted), noise, *own_outputs], dtype=torch.float64)
    output_difference, gradient_difference, num_rerouted, noise, *own_outputs = all_reduce_max(
        own, mesh.world_group
    ).tolist()
    is_exact = config.moe.num_experts == 0 and noise == 0
    report = IsolationReport(
        backend=_describe_kernel(pack.built),
        windows=tuple(sorted({config.model.window_of_layer(layer) for layer in range(config.model.num_layers)})),
        cp_size=mesh.cp_size,
        num_documents=len(_LENGTHS),
        num_changed=sum(difference > 0 for difference in own_outputs),
        has_experts=config.moe.num_experts > 0,
        has_gradients=has_gradients,
        output_difference=output_difference,
        gradient_difference=gradient_difference,
        num_rerouted=int(num_rerouted),
        limit=0.0 if is_exact else max(_TOLERANCE, torch.finfo(pack.built.precision.compute_dtype).eps),
    )
    if not report.holds:
        raise IsolationError(f"--prove-isolation: documents of a pack are not isolated: {report.describe()}")
    return report


@dataclass(frozen=True, eq=False)
class _Pass:
    """What one pass left on this rank.

    Attributes:
        segment_ids_S: Document of each row.
        logits_SV: Of each row.
        gradients_SD: Of the summed loss of all documents, with respect to each row's embedding; empty without backward.
        expert_ids: Of each MoE layer int64 [rows, K] for its live rows, which stand first.
    """

    segment_ids_S: Tensor
    logits_SV: Tensor
    gradients_SD: Tensor
    expert_ids: tuple[Tensor, ...]


def _compare(before: _Pass, after: _Pass, document: int | None) -> tuple[float, float, float, float]:
    """Compare two passes between which one document was changed, or none.

    Returns:
        Largest differences of outputs and gradients in all other documents, the number of their tokens that were
        rerouted, summed over layers, and the largest difference of outputs in the changed one.
    """
    is_changed_S = before.segment_ids_S == (-2 if document is None else document)
    rerouted = [
        int(((old != new).any(dim=-1) & ~is_changed_S[: len(old)]).sum())
        for old, new in zip(before.expert_ids, after.expert_ids, strict=True)
    ]
    return (
        _largest(before.logits_SV, after.logits_SV, ~is_changed_S),
        _largest(before.gradients_SD, after.gradients_SD, ~is_changed_S),
        float(sum(rerouted)),
        _largest(before.logits_SV, after.logits_SV, is_changed_S),
    )


def _largest(before: Tensor, after: Tensor, is_compared_S: Tensor) -> float:
    """Largest difference in some rows, as a share of the largest value; infinite if a value is no number."""
    if before.numel() == 0:
        return 0.0
    difference = ((after - before).double().abs() * is_compared_S[:, None]).max()
    share = difference / before.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float(share) if torch.isfinite(share) else float("inf")


class _Pack:
    """The pack and the stand-in that it passes through."""

    def __init__(self, built: BuiltModel, config: RunConfig, mesh: ParallelMesh, device: torch.device) -> None:
        self.built, self._config, self._mesh, self._device = built, config, mesh, device
        self._expert_ids: list[Tensor] = []
        for router in built.routers.values():
            router.register_forward_hook(self._note)

    def _note(self, _router: Any, _arguments: Any, routing: Routing) -> None:
        self._expert_ids.append(routing.expert_ids_TK)

    def run(self, num_pad_tokens: int, changed: int | None, *, has_gradients: bool) -> _Pass:
        """Pass the pack through the model, with other tokens in one document or in none."""
        whole, mesh, data = PackedSequence.from_lengths(_LENGTHS, num_pad_tokens), self._mesh, self._config.data
        ids_T = torch.randint(_VOCAB_SIZE, (whole.num_tokens,), generator=torch.Generator().manual_seed(1))
        if changed is not None:
            ids_T = torch.where(whole.segment_ids_T == changed, (ids_T + 1) % _VOCAB_SIZE, ids_T)
        sequence = whole
        if mesh.cp_size > 1:
            sequence = whole.shard(mesh.cp_rank, mesh.cp_size, data.segment_alignment)
            ids_T = ids_T[sequence.token_ids_T]
        sequence, ids_T = sequence.to(self._device), ids_T.to(self._device)
        rows = mesh.residual_rows(sequence.num_tokens)
        context = ForwardContext(sequence, seed=self._config.training.seed, residual_rows=rows)
        self._expert_ids.clear()
        with torch.set_grad_enabled(has_gradients):
            x_SD, logits_SV = self._forward(ids_T, context)
        gradients_SD = logits_SV.new_empty(0, 1)
        if has_gradients:
            # A sum over tokens: the loss of each document depends on its own logits alone.
            probe_SV = torch.randn(logits_SV.shape, generator=torch.Generator().manual_seed(2))
            (gradients_SD,) = torch.autograd.grad(logits_SV, x_SD, probe_SV.to(logits_SV))
        segment_ids_S = sequence.segment_ids_T if rows is None else sequence.segment_ids_T[rows]
        return _Pass(segment_ids_S, logits_SV.detach(), gradients_SD, tuple(self._expert_ids))

    def _forward(self, ids_T: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        (model,) = self.built.parts
        assert model.embedding is not None, "the stand-in is no part of a pipeline"
        assert model.final_norm is not None, "the stand-in is no part of a pipeline"
        x_SD = model.embedding(ids_T, context, self.built.precision.compute_dtype).detach()
        x_SD.requires_grad_(torch.is_grad_enabled())
        y_SD = x_SD
        for block in model.blocks.values():
            y_SD = block(y_SD, context)
        y_SD = model.final_norm(y_SD)
        return x_SD, F.linear(y_SD, local(model.embedding.weight, y_SD.dtype))


def _stand_in(config: RunConfig, mesh: ParallelMesh, num_tokens: int) -> RunConfig:
    """Two narrow layers with the attention of the run's model."""
    model, moe, width = config.model, config.moe, _WIDTH_PER_RANK * mesh.tp_size
    windows = {model.window_of_layer(layer) for layer in range(model.num_layers)}
    changes = {
        "num_layers": 2,
        "hidden_size": _HIDDEN_SIZE,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": width,
        "window_size": min(max(windows), _LONGEST_WINDOW),
        "window_attn_skip_freq": (1, 0) if len(windows) > 1 else None,
        "max_position_embeddings": num_tokens,
        "untie_embeddings_and_output_weights": False,
        # Large enough that attention and router tell tokens apart.
        "init_method_std": 0.1,
    }
    of_experts = {
        "moe_layer_freq": 1,
        "moe_ffn_hidden_size": _WIDTH_PER_RANK * mesh.etp_size,
        "moe_shared_expert_intermediate_size": width if moe.moe_shared_expert_intermediate_size else 0,
        # These losses compare the documents of a micro-batch, as they should.
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": 0.0,
    }
    of_ranks = {
        "pipeline_model_parallel_size": 1,
        "num_layers_per_virtual_pipeline_stage": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
    }
    accelerator = config.accelerator.model_copy(update={"enable_double_buffer": False})
    activation = {"recompute_granularity": "none", "activation_offload": False}
    return config.model_copy(
        update={
            "model": model.model_copy(update=changes),
            "moe": moe.model_copy(update=of_experts),
            "parallel": config.parallel.model_copy(update=of_ranks),
            "training": config.training.model_copy(update={"accelerator": accelerator}),
            "activation": config.activation.model_copy(update=activation),
        }
    )


def _without_pipeline(mesh: ParallelMesh) -> ParallelMesh:
    """The ranks of one stage; each stage proves the same."""
    sizes, ranks, groups = (
        {axis: value for axis, value in of_axes.items() if axis != "pp"}
        for of_axes in (mesh.sizes, mesh.ranks, mesh.groups)
    )
    return replace(mesh, sizes=sizes, ranks=ranks, groups=groups, embedding_group=None)


def _describe_kernel(built: BuiltModel) -> str:
    backends = built.backends
    return (
        f"{backends.attention_layout} ({backends.context_layout})"
        if backends.context_layout
        else backends.attention_layout
    )
