"""A worker with a model of Hugging Face transformers, trained by a plain loop with torch's AdamW.

Variants are ``MODEL/EXPERTS/OPTIMIZER``, for example ``mixtral/grouped_mm/fused``: the model class, the library's own
implementation of experts (``-`` for dense models), and AdamW as the class builds it by default or fused. Rows of
several documents are flattened into one row with restarting positions, as ``DataCollatorWithFlattening`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol import BenchSpec, PeerAbsentError, draw_batches, serve


def build(spec: BenchSpec, rank: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """Build the model. See :func:`protocol.serve`."""
    import torch

    torch.set_num_threads(spec.num_threads)
    torch.manual_seed(1)
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PeerAbsentError(f"transformers cannot be imported: {error}") from error
    if spec.world_size > 1:
        raise PeerAbsentError("no expert parallelism on a CPU")
    model_name, experts, optimizer_name = spec.variant.split("/")
    model = _build_model(transformers, spec, model_name, experts)
    fused = {"fused": True} if optimizer_name == "fused" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), **fused)
    batches = draw_batches(spec, rank)

    def step() -> float:
        ids_BS, lengths = next(batches)
        ids = torch.from_numpy(ids_BS)
        if spec.document_tokens is None:
            inputs = {"input_ids": ids, "labels": ids.clone()}
        else:
            flat = [length for row in lengths for length in row]
            positions = torch.cat([torch.arange(length) for length in flat])
            labels = ids.reshape(1, -1).clone()
            labels[0, positions == 0] = -100
            inputs = {"input_ids": ids.reshape(1, -1), "labels": labels, "position_ids": positions[None]}
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return step, {"version": f"transformers {transformers.__version__}", "num_parameters": num_parameters}


def _build_model(transformers: Any, spec: BenchSpec, name: str, experts: str) -> Any:
    import torch

    shape = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_heads,
        "max_position_embeddings": max(4096, spec.row_tokens),
        "use_cache": False,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }
    if name == "llama":
        config, model_class = transformers.LlamaConfig(**shape), transformers.LlamaForCausalLM
        choice = {}
    elif name == "mixtral":
        config = transformers.MixtralConfig(
            **shape,
            num_local_experts=spec.num_experts,
            num_experts_per_tok=spec.top_k,
            output_router_logits=True,
            sliding_window=None,
        )
        model_class, choice = transformers.MixtralForCausalLM, {"experts_implementation": experts}
    else:
        config = transformers.Qwen3MoeConfig(
            **shape,
            head_dim=spec.hidden_size // spec.num_heads,
            num_experts=spec.num_experts,
            num_experts_per_tok=spec.top_k,
            moe_intermediate_size=spec.ffn_hidden_size,
            output_router_logits=True,
            norm_topk_prob=True,
        )
        model_class, choice = transformers.Qwen3MoeForCausalLM, {"experts_implementation": experts}
    return model_class._from_config(config, attn_implementation="sdpa", dtype=torch.float32, **choice)


if __name__ == "__main__":
    serve(build)
