"""The sections that say what the model is: the decoder and its mixture-of-experts layers.

A part of ``sections.py``, which gathers all of them; what is said there holds here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_glue.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Section, option


class ModelConfig(Section):
    """Shape of the decoder."""

    num_layers: PositiveInt = option(4, "Decoder blocks.")
    hidden_size: PositiveInt = option(256, "Width of the residual stream.")
    ffn_hidden_size: PositiveInt | None = option(
        None, "Width of the dense feed-forward; unset: 4 x hidden for GELU, 8/3 x hidden rounded up to 64 for SwiGLU."
    )
    num_attention_heads: PositiveInt = option(4, "Query heads.")
    num_query_groups: PositiveInt | None = option(None, "Key/value heads; unset: as many as query heads.")
    kv_channels: PositiveInt | None = option(None, "Width of one head; unset: hidden size / query heads.")
    max_position_embeddings: PositiveInt | None = option(
        None, "Longest position of the RoPE, sinusoidal or learned table, in tokens; unset: the sequence length."
    )
    position_embedding_type: Literal["rope", "sinusoidal", "learned", "none"] = option(
        "rope", "How positions enter the model; off: none."
    )
    rotary_base: Annotated[float, Field(gt=0)] = option(10000.0, "Base of the RoPE frequencies.")
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = option(1.0, "Share of each head that RoPE rotates.")
    normalization: Literal["RMSNorm", "LayerNorm"] = option("RMSNorm", "Kind of norm.")
    norm_epsilon: Annotated[float, Field(gt=0)] = option(1e-5, "Added to the variance in norms.")
    qk_layernorm: bool = option(False, "Normalise queries and keys per head; off: false.")
    window_size: NonNegativeInt = option(0, "Sliding attention window, in tokens, self included; off: 0.")
    window_attn_skip_freq: PositiveInt | tuple[int, ...] | None = option(
        None, "Every N-th layer attends fully (N), or one 0/1 per layer (1 = windowed); unset: all layers windowed."
    )
    swiglu: bool = option(True, "SwiGLU feed-forward; off: GELU.")
    add_bias_linear: bool = option(False, "Biases in linear layers; off: false.", off_flag="disable_bias_linear")
    untie_embeddings_and_output_weights: bool = option(False, "Own weights for the output layer; off: tied.")
    attention_dropout: Probability = option(0.0, "Dropout on attention probabilities; off: 0.")
    hidden_dropout: Probability = option(
        0.0, "Dropout on each block's two residual branches and the embedding; off: 0."
    )
    init_method_std: Annotated[float, Field(gt=0)] = option(0.02, "Standard deviation of initial weights.")
    make_vocab_size_divisible_by: PositiveInt = option(128, "The vocabulary is padded to a multiple of this.")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Width of the dense feed-forward."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 64 * -(-8 * self.hidden_size // 192) if self.swiglu else 4 * self.hidden_size

    def window_of_layer(self, layer_index: int) -> int:
        """Sliding window of one layer in tokens, 0 for full attention."""
        skip = self.window_attn_skip_freq
        if self.window_size == 0 or skip is None:
            return self.window_size
        windowed = skip[layer_index] == 1 if isinstance(skip, tuple) else (layer_index + 1) % skip != 0
        return self.window_size if windowed else 0


class MoEConfig(Section):
    """Mixture-of-experts layers."""

    num_experts: NonNegativeInt = option(0, "Experts per MoE layer; off (dense model): 0.")
    moe_router_topk: PositiveInt = option(2, "Experts per token.")
    moe_ffn_hidden_size: PositiveInt | None = option(None, "Width of one expert; unset: the dense width.")
    moe_layer_freq: PositiveInt | tuple[int, ...] = option(
        1, "Every N-th layer is MoE, counted from the first (N), or one 0/1 per layer (1 = MoE)."
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = option("softmax", "Scores from router logits.")
    moe_router_norm_topk_prob: bool = option(True, "Weights of the chosen experts sum to 1; off: raw scores.")
    moe_router_topk_scaling_factor: Annotated[float, Field(gt=0)] = option(1.0, "Factor on the weights; off: 1.")
    moe_aux_loss_coeff: NonNegativeFloat = option(0.01, "Weight of the load-balancing loss; off: 0.")
    moe_z_loss_coeff: NonNegativeFloat = option(0.001, "Weight of the router z-loss; off: 0.")
    moe_aux_loss_scope: Literal["micro-batch", "sequence"] = option(
        "micro-batch", "Tokens over which load is compared: a whole micro-batch or each document of it."
    )
    moe_shared_expert_intermediate_size: NonNegativeInt = option(
        0, "Width of the shared expert that every token passes; off: 0."
    )
    moe_router_enable_expert_bias: bool = option(
        False, "Balance load by a bias on the choice of experts (auxiliary-loss-free); off: false."
    )
    moe_shared_expert_overlap: bool = option(
        False, "Compute the shared expert while rows travel to the routed ones; off: false."
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "deepep"] = option(
        "alltoall",
        "How tokens reach experts of other ranks: a row per choice to its rank (alltoall), all tokens to all ranks "
        "without a host read (allgather), or a row per token and rank by the library DeepEP (deepep, Megatron's flex).",
        values={"alltoall": "alltoall", "allgather": "allgather", "deepep": "deepep", "flex": "deepep"},
    )
    moe_overlap_chunks: PositiveInt = option(
        1,
        "Groups of a rank's experts that rows are exchanged for one after the other, each exchange beside the experts "
        "of another group; off: 1.",
    )
    moe_static_capacity_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = option(
        None,
        "Exchange a fixed number of rows with every rank, this many times an even share, so that a training step reads "
        "nothing on the host; a step in which a rank's rows do not fit is run again with exchanges of any size; off: "
        "unset.",
    )
    moe_router_bias_update_rate: NonNegativeFloat = option(0.001, "Step of that bias per optimizer step; off: 0.")

    def is_moe_layer(self, layer_index: int) -> bool:
        """Whether a layer (counted from 0) holds experts."""
        if self.num_experts == 0:
            return False
        if isinstance(self.moe_layer_freq, tuple):
            return self.moe_layer_freq[layer_index] == 1
        return layer_index % self.moe_layer_freq == 0
