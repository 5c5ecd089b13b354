"""Small configurations that tests share: every part of the stack, little of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_glue.config.loading import from_dict
from megatron_glue.config.sections import RunConfig
from megatron_glue.proofs.sample_documents import write_sample_documents


def write_corpus(path: Path, num_documents: int = 64, seed: int = 0) -> Path:
    """Write documents of skewed lengths, 1 to about 200 bytes, as JSONL."""
    return write_sample_documents(path, num_documents, seed)


def small_config(corpus: Path | str, **overrides: Any) -> RunConfig:
    """A two-layer MoE on a small corpus.

    Args:
        corpus: JSONL file, see :func:`write_corpus`.
        **overrides: Field values by section, e.g. ``moe={"num_experts": 0}``.
    """
    sections: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2},
        "moe": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16},
        "data": {"data_path": [str(corpus)], "seq_length": 128, "heldout_fraction": 0.2, "packing_window": 16},
        "optimizer": {"lr": 0.01, "min_lr": 0.001, "lr_warmup_iters": 2},
        "training": {"train_iters": 6, "global_batch_size": 4, "eval_iters": 1, "device": "cpu", "precision": "fp32"},
    }
    for section, values in overrides.items():
        sections.setdefault(section, {}).update(values)
    return from_dict(sections)
