"""The parameters that one rank holds, counted from the configuration: nothing is built.

The sizes are those of the builders in ``layers/`` and ``moe/``, written once more as arithmetic, so that a plan for
hundreds of ranks takes no memory and no time; tests hold the two together. What the data-parallel engine splits further
is the business of ``memory.py``.

Letters: D model, H query heads, G kv heads, C head width, F ffn width, E experts, V rows of the padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_glue.config.sections import RunConfig
from megatron_glue.config.stage_plan import StagePlan
from megatron_glue.layers.embedding import padded_vocab_size


@dataclass(frozen=True)
class AxisSizes:
    """How many ranks split what.

    Attributes:
        pp: Layers.
        dp: Data.
        cp: Each sequence.
        tp: Each layer's weights.
        kv_copies: Tensor-parallel ranks that hold the same KV head.
        fsdp: Ranks that a sharding engine splits dense weights over.
        ep: Experts.
        etp: Each expert.
        edp: Ranks that hold the same part of the same experts.
        sequence_parallel: Whether tensor-parallel ranks split the tokens of the residual stream.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    kv_copies: int = 1
    fsdp: int = 1
    ep: int = 1
    etp: int = 1
    edp: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class TensorSize:
    """One parameter on one rank.

    Attributes:
        numel: Its numbers.
        layer: Global index of its block; ``None`` for embedding, final norm and output layer.
        is_table: Whether it is a table of token or position vectors.
        is_expert: Whether it belongs to a routed expert.
        keeps_fp32: Whether layers read it in fp32 whatever the compute dtype (a router's weight).
    """

    numel: int
    layer: int | None = None
    is_table: bool = False
    is_expert: bool = False
    keeps_fp32: bool = False


def rank_parameters(config: RunConfig, sizes: AxisSizes, pp_rank: int, vocab_size: int) -> list[TensorSize]:
    """List the parameters of a rank, before a data-parallel engine splits them.

    Args:
        config: A validated configuration.
        sizes: Its axes.
        pp_rank: Which pipeline rank.
        vocab_size: Real entries of the vocabulary.

    Returns:
        One entry per parameter.
    """
    plan, tensors = StagePlan.from_config(config), []
    for stage in plan.stages_of(pp_rank):
        layers = plan.layers[stage]
        is_first, is_last = layers.start == 0, layers.stop == config.model.num_layers
        tensors += _ends(config, sizes, vocab_size, is_first=is_first, is_last=is_last)
        for layer in layers:
            tensors += _block(config, sizes, layer)
    return tensors


def vocabulary_rows(config: RunConfig, sizes: AxisSizes, vocab_size: int) -> int:
    """Rows of the padded vocabulary on one tensor-parallel rank."""
    return padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by) // sizes.tp


def _ends(config: RunConfig, sizes: AxisSizes, vocab_size: int, *, is_first: bool, is_last: bool) -> list[TensorSize]:
    model, width = config.model, config.model.hidden_size
    table = TensorSize(vocabulary_rows(config, sizes, vocab_size) * width, is_table=True)
    tensors = []
    if is_first:
        tensors.append(table)
        if model.position_embedding_type == "learned":
            num_positions = model.max_position_embeddings or config.data.seq_length
            tensors.append(TensorSize(num_positions * width, is_table=True))
    if is_last:
        tensors += _norm(config, width, None)
        if model.untie_embeddings_and_output_weights or not is_first:
            tensors.append(table)
    return tensors


def _block(config: RunConfig, sizes: AxisSizes, layer: int) -> list[TensorSize]:
    model, moe = config.model, config.moe
    tensors = [*_norm(config, model.hidden_size, layer), *_norm(config, model.hidden_size, layer)]
    tensors += _attention(config, sizes, layer)
    if not moe.is_moe_layer(layer):
        return tensors + _ffn(config, model.ffn_width // sizes.tp, layer)
    tensors.append(TensorSize(moe.num_experts * model.hidden_size, layer, keeps_fp32=True))
    width = (moe.moe_ffn_hidden_size or model.ffn_width) // sizes.etp * (moe.num_experts // sizes.ep)
    num_parts = 2 if model.swiglu else 1
    tensors += [TensorSize(parts * width * model.hidden_size, layer, is_expert=True) for parts in (num_parts, 1)]
    if moe.moe_shared_expert_intermediate_size:
        tensors += _ffn(config, moe.moe_shared_expert_intermediate_size // sizes.tp, layer)
    return tensors


def _attention(config: RunConfig, sizes: AxisSizes, layer: int) -> list[TensorSize]:
    model = config.model
    heads, width = model.num_attention_heads // sizes.tp, model.hidden_size
    rows = model.num_kv_heads * sizes.kv_copies // sizes.tp * (model.num_attention_heads // model.num_kv_heads + 2)
    tensors = [TensorSize(rows * model.head_dim * width, layer), TensorSize(width * heads * model.head_dim, layer)]
    if model.add_bias_linear:
        tensors += [TensorSize(rows * model.head_dim, layer), TensorSize(width, layer)]
    if model.qk_layernorm:
        tensors += [*_norm(config, model.head_dim, layer), *_norm(config, model.head_dim, layer)]
    return tensors


def _ffn(config: RunConfig, own_width: int, layer: int) -> list[TensorSize]:
    model, num_parts = config.model, 2 if config.model.swiglu else 1
    tensors = [TensorSize(parts * own_width * model.hidden_size, layer) for parts in (num_parts, 1)]
    if model.add_bias_linear:
        tensors += [TensorSize(num_parts * own_width, layer), TensorSize(model.hidden_size, layer)]
    return tensors


def _norm(config: RunConfig, width: int, layer: int | None) -> list[TensorSize]:
    weights = 1 if config.model.normalization == "RMSNorm" else 2
    return [TensorSize(width, layer)] * weights
