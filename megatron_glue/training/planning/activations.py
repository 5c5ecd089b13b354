"""How many bytes the forward pass of a micro-batch leaves on a rank for its backward pass.

Counted are the tensors that our layers save, at their full size; tensors that two operators save count once. For one
block, with T tokens of a micro-batch on this context-parallel rank, S rows of the residual stream (T, or T / tp under
sequence parallelism), c bytes of the compute dtype, all widths those of this rank:

    norms and residual stream   c S D x 4                    two inputs of norms, two results
    attention                   c T C (H + 2 G) + c T C H    q, k, v; the result
                                + 4 T H                      log-sum-exp
                                + c T C (H + G)              with norms of q and k: what they were computed from
    dense feed-forward          c T F (parts + 1)            first product, activated
    router                      4 S (4 E + D)                fp32 input (where c is not 4), logits, probabilities
    experts, R = S K etp rows   c R (D x 2 + F (parts + 1))  rows in and out, first product, activated
    shared expert               c T F_shared (parts + 1)

Rows of experts are those of an even load: a rank whose experts are chosen more often needs more. Recompute keeps the
input of a block, c S D, and rebuilds one block at a time, when the blocks behind it are done with. Offload keeps as
many of these inputs as there are buffers and copies under way. A pipeline keeps several micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_glue.config.sections import RunConfig
from megatron_glue.config.stage_plan import StagePlan, schedule_kind
from megatron_glue.training.planning.parameters import AxisSizes

INPUTS_UNDER_WAY = 2
"""Inputs that still leave the device while the next blocks run, beside the reload buffers."""


@dataclass(frozen=True)
class BlockBytes:
    """What one block keeps of one micro-batch, in bytes.

    Attributes:
        input: The residual stream that it starts from.
        norms: Results of its two norms.
        stream: The residual stream between attention and feed-forward.
        attention_inputs: q, k and v.
        attention_output: Attention's result and log-sum-exp.
        ffn: Products of the dense feed-forward, or of the shared expert.
        router: Of the router.
        expert_rows: Rows into the experts and out of them.
        expert_products: Their first product.
        expert_hidden: Their activated first product.
    """

    input: float
    norms: float
    stream: float
    attention_inputs: float
    attention_output: float
    ffn: float
    router: float
    expert_rows: float
    expert_products: float
    expert_hidden: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())

    @property
    def gradients(self) -> float:
        """The largest gradients that exist at one time while the block runs backward."""
        return max(self.ffn, self.expert_products + self.expert_hidden, self.attention_inputs) + 2 * self.input


@dataclass(frozen=True)
class ActivationBytes:
    """Of one rank, in bytes.

    Attributes:
        kept: From forward to backward, of all micro-batches that are under way.
        working: The block that is being recomputed, and gradients of activations.
    """

    kept: float
    working: float


def block_bytes(config: RunConfig, sizes: AxisSizes, layer: int, compute_bytes: int) -> BlockBytes:
    """Count what one block keeps, as if nothing were recomputed or offloaded.

    Args:
        config: A validated configuration.
        sizes: Its axes.
        layer: Global index of the block.
        compute_bytes: Bytes of a number in the compute dtype.
    """
    model, moe = config.model, config.moe
    tokens = config.training.micro_batch_size * config.data.seq_length / sizes.cp
    rows = tokens / sizes.tp if sizes.sequence_parallel else tokens
    heads, head_dim = model.num_attention_heads / sizes.tp, model.head_dim
    kv_heads = model.num_kv_heads * sizes.kv_copies / sizes.tp
    parts, stream = 2 if model.swiglu else 1, compute_bytes * rows * model.hidden_size
    attention_inputs = compute_bytes * tokens * head_dim * (heads + 2 * kv_heads)
    if model.qk_layernorm:
        attention_inputs += compute_bytes * tokens * head_dim * (heads + kv_heads)
    is_moe = moe.is_moe_layer(layer)
    ffn_width = moe.moe_shared_expert_intermediate_size if is_moe else model.ffn_width
    expert_rows, expert_width, router = 0.0, 0.0, 0.0
    if is_moe:
        expert_rows = rows * moe.moe_router_topk * sizes.etp
        expert_width = (moe.moe_ffn_hidden_size or model.ffn_width) / sizes.etp
        router = 4 * rows * (4 * moe.num_experts + (model.hidden_size if compute_bytes != 4 else 0))
    return BlockBytes(
        input=stream,
        norms=2 * stream,
        stream=stream,
        attention_inputs=attention_inputs,
        attention_output=compute_bytes * tokens * head_dim * heads + 4 * tokens * heads,
        ffn=compute_bytes * tokens * ffn_width / sizes.tp * (parts + 1),
        router=router,
        expert_rows=2 * compute_bytes * expert_rows * model.hidden_size,
        expert_products=compute_bytes * expert_rows * expert_width * parts,
        expert_hidden=compute_bytes * expert_rows * expert_width,
    )


def activation_bytes(config: RunConfig, sizes: AxisSizes, pp_rank: int, compute_bytes: int) -> ActivationBytes:
    """Count what the blocks of a rank keep at the worst moment of a step.

    Args:
        config: A validated configuration.
        sizes: Its axes.
        pp_rank: Which pipeline rank.
        compute_bytes: Bytes of a number in the compute dtype.
    """
    plan = StagePlan.from_config(config)
    kept, working = 0.0, 0.0
    for stage in plan.stages_of(pp_rank):
        blocks = [block_bytes(config, sizes, layer, compute_bytes) for layer in plan.layers[stage]]
        num_recomputed = 0
        if config.recompute:
            num_recomputed = min(config.num_recomputed_blocks or len(blocks), len(blocks))
        whole, recomputed = blocks[num_recomputed:], blocks[:num_recomputed]
        kept_whole = _kept_whole(config, whole)
        kept += _inputs_kept(config, recomputed) + kept_whole
        # The first blocks are recomputed, the last ones run backward first: what these kept is free by then.
        rebuilt = [block.total - kept_whole for block in recomputed] + [_rebuilt(config, block) for block in whole]
        working = max(working, max([*rebuilt, 0.0]) + max(block.gradients for block in blocks))
    return ActivationBytes(kept * micro_batches_under_way(config, sizes, pp_rank), working)


def micro_batches_under_way(config: RunConfig, sizes: AxisSizes, pp_rank: int) -> float:
    """How many micro-batches' activations a rank holds at most, in units of all its layers.

    1F1B holds one for each pipeline rank from this one to the last; GPipe all of a step; interleaved 1F1B (Narayanan et
    al. 2021) 2 (P - r - 1) + (v - 1) P + 1 virtual stages of v. Zero bubble counts as the first rank of 1F1B, as
    gradients of weights wait.
    """
    training = config.training
    num_micro_batches = training.global_batch_size / (training.micro_batch_size * sizes.dp)
    if sizes.pp == 1:
        return 1.0
    schedule = schedule_kind(config)
    num_stages = len(StagePlan.from_config(config).stages_of(pp_rank))
    limits = {
        "1f1b": sizes.pp - pp_rank,
        "gpipe": num_micro_batches,
        "zb": sizes.pp,
        "interleaved": (2 * (sizes.pp - pp_rank - 1) + (num_stages - 1) * sizes.pp + 1) / num_stages,
    }
    return min(num_micro_batches, limits[schedule])


def _inputs_kept(config: RunConfig, blocks: list[BlockBytes]) -> float:
    """Inputs of recomputed blocks that are on the device at one time."""
    if not blocks:
        return 0.0
    size, num_blocks = blocks[0].input, len(blocks)
    if not config.offload or config.activation.offload_modules:
        return num_blocks * size
    leaving = min(config.activation.offload_num_layers or num_blocks, num_blocks)
    buffers = (2 if config.accelerator.enable_double_buffer else 1) + INPUTS_UNDER_WAY
    return (num_blocks - leaving + min(leaving, buffers)) * size


def _kept_whole(config: RunConfig, blocks: list[BlockBytes]) -> float:
    """Blocks that are not recomputed as a whole: without what is rebuilt, and what leaves the device."""
    kept = sum(block.total - _rebuilt(config, block) for block in blocks)
    # Two blocks' worth is on its way out, or back already.
    return kept - sum(_leaving(config, block) for block in blocks[INPUTS_UNDER_WAY:])


def _rebuilt(config: RunConfig, block: BlockBytes) -> float:
    """What ``--recompute-modules`` rebuilds. Attention's result stays, as the product behind it keeps it."""
    experts = block.expert_rows + block.expert_products + block.expert_hidden
    is_moe = experts > 0
    modules = config.recomputed_modules
    parts = {
        "layernorm": block.norms,
        "mlp": block.ffn,
        "moe": block.router + experts if is_moe else 0.0,
        "moe_act": 0.0 if "moe" in modules else block.expert_hidden,
    }
    return sum(size for name, size in parts.items() if name in modules)


def _leaving(config: RunConfig, block: BlockBytes) -> float:
    """What ``--offload-modules`` moves off the device, unless it is rebuilt anyway."""
    rebuilt = config.recomputed_modules
    parts = {
        "attn_core": block.attention_inputs + block.attention_output,
        "mlp_act": 0.0 if "mlp" in rebuilt else block.ffn,
        "moe_act": 0.0 if "moe" in rebuilt else block.expert_rows + block.expert_products,
    }
    return sum(size for name, size in parts.items() if name in config.activation.offload_modules)
