"""Floor 4: documents, tokens and packs."""

from megatron_glue.data.documents import DocumentSet, build_datasets, split_heldout, tokenize_documents
from megatron_glue.data.heldout import EvalPlan, eval_batches, eval_label_tokens, unigram_entropy
from megatron_glue.data.loader import BatchLoader, BatchPlan
from megatron_glue.data.pack_stream import PackStream, StreamPosition
from megatron_glue.data.packing import PackingRule
from megatron_glue.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer

__all__ = [
    "BatchLoader",
    "BatchPlan",
    "ByteTokenizer",
    "DocumentSet",
    "EvalPlan",
    "PackStream",
    "PackingRule",
    "StreamPosition",
    "Tokenizer",
    "build_datasets",
    "build_tokenizer",
    "eval_batches",
    "eval_label_tokens",
    "split_heldout",
    "tokenize_documents",
    "unigram_entropy",
]
