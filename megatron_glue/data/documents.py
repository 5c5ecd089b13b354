"""Documents as token ids: one flat array and where each document lies in it.

Text is encoded once, when it is read, and never kept; a document costs its tokens and 16 bytes. Training and held-out
documents are two selections of the same array. It does not pack, shuffle or make tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import DataConfig
from megatron_glue.data.corpus import load_standard_library
from megatron_glue.data.jsonl import read_texts
from megatron_glue.data.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class DocumentSet:
    """An ordered set of tokenized documents. Its arrays are made read-only.

    Attributes:
        tokens: Flat token ids, uint16 or uint32, of this set and perhaps others.
        starts: int64. Index in ``tokens`` of each document's first token.
        lengths: int64. Tokens of each document, its eod included; all at least 1.
        vocab_size: Ids are smaller than this.
        pad_id: Id that fills packs up.
        num_skipped_empty: Texts that were empty (or white space only) where this set was read from.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    vocab_size: int
    pad_id: int
    num_skipped_empty: int = 0

    def __post_init__(self) -> None:
        assert self.starts.dtype == np.int64, self.starts.dtype
        assert self.lengths.dtype == np.int64, self.lengths.dtype
        assert len(self.starts) == len(self.lengths)
        for values in (self.tokens, self.starts, self.lengths):
            values.flags.writeable = False

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, eods included."""
        return int(self.lengths.sum())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of content and order: equal on all ranks and at every resume, or the position means nothing."""
        digest = hashlib.blake2b(digest_size=16)
        for values in (self.tokens, self.starts, self.lengths):
            digest.update(f"{values.dtype.str}{len(values)};".encode())
            digest.update(values.data.cast("B") if len(values) else b"")
        return digest.hexdigest()

    def document(self, index: int) -> np.ndarray:
        """Return the ids of one document, a read-only view."""
        begin = int(self.starts[index])
        return self.tokens[begin : begin + int(self.lengths[index])]

    def select(self, indices: np.ndarray) -> DocumentSet:
        """Return the set of the documents at ``indices`` (int64), in that order, over the same tokens."""
        return DocumentSet(
            tokens=self.tokens,
            starts=self.starts[indices],
            lengths=self.lengths[indices],
            vocab_size=self.vocab_size,
            pad_id=self.pad_id,
            num_skipped_empty=self.num_skipped_empty,
        )

    def cut(self, max_tokens: int) -> DocumentSet:
        """Return the set with longer documents cut into consecutive pieces, over the same tokens.

        Args:
            max_tokens: Most tokens of a piece, at least 1.

        Returns:
            Pieces in document order; every token is in exactly one.
        """
        num_pieces = -(-self.lengths // max_tokens)
        first_piece = np.cumsum(num_pieces) - num_pieces
        offsets = (np.arange(int(num_pieces.sum())) - np.repeat(first_piece, num_pieces)) * max_tokens
        return DocumentSet(
            tokens=self.tokens,
            starts=np.repeat(self.starts, num_pieces) + offsets,
            lengths=np.minimum(np.repeat(self.lengths, num_pieces) - offsets, max_tokens),
            vocab_size=self.vocab_size,
            pad_id=self.pad_id,
            num_skipped_empty=self.num_skipped_empty,
        )

    def token_counts(self) -> np.ndarray:
        """Return how often each id occurs in the documents, int64 [vocab_size]."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        # In bounded pieces: bincount widens its input to int64.
        for begin in range(0, self.num_documents, 4096):
            pieces = [self.document(index) for index in range(begin, min(begin + 4096, self.num_documents))]
            counts += np.bincount(np.concatenate(pieces), minlength=self.vocab_size)
        return counts


def tokenize_documents(texts: Iterable[str], tokenizer: Tokenizer, *, append_eod: bool = True) -> DocumentSet:
    """Encode texts into one flat array.

    Args:
        texts: Documents; empty ones and those of white space only are skipped and counted.
        tokenizer: Gives the ids.
        append_eod: End every document with the tokenizer's eod id. Lengths include it.

    Returns:
        The documents in their order.

    Raises:
        ConfigError: If eods are asked for and the tokenizer has none. Nothing has been read then.
    """
    if append_eod and tokenizer.eod_id is None:
        raise ConfigError(
            flag_of("tokenizer_type"),
            type(tokenizer).__name__,
            "has no end-of-document id",
            "use a tokenizer with one, e.g. byte",
        )
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    ending = np.array([tokenizer.eod_id] if append_eod else [], dtype=dtype).tobytes()
    buffer, ends, num_skipped = bytearray(), array("q"), 0
    for text in texts:
        if not text.strip():
            num_skipped += 1
            continue
        buffer += np.asarray(tokenizer.encode(text)).astype(dtype, copy=False).tobytes()
        buffer += ending
        ends.append(len(buffer) // dtype.itemsize)
    ends_array = np.array(ends, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends_array])[:-1]
    return DocumentSet(
        tokens=np.frombuffer(buffer, dtype=dtype),
        starts=starts,
        lengths=ends_array - starts,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id or 0,
        num_skipped_empty=num_skipped,
    )


def split_heldout(documents: DocumentSet, fraction: float, seed: int) -> tuple[DocumentSet, DocumentSet]:
    """Split by document into training and held-out documents.

    The split follows a hash of the seed and the document's CONTENT: it depends neither on a random state nor on the
    order of files, and equal documents always fall on the same side. The smallest hashes are held out, so that the
    share is met as exactly as equal documents allow, and at least one document is held out.

    Args:
        documents: All documents.
        fraction: Share of documents to hold out, between 0 and 1.
        seed: The run's seed.

    Returns:
        Training documents and held-out documents, each in the original order.

    Raises:
        ConfigError: If one side would be empty.
    """
    key = hashlib.blake2b(f"heldout {seed}".encode(), digest_size=32).digest()
    hashes = np.empty(documents.num_documents, dtype=np.uint64)
    for index in range(documents.num_documents):
        digest = hashlib.blake2b(documents.document(index).data.cast("B"), digest_size=8, key=key)
        hashes[index] = int.from_bytes(digest.digest(), "little")
    num_heldout = max(1, round(fraction * documents.num_documents))
    is_heldout = hashes <= np.partition(hashes, num_heldout - 1)[num_heldout - 1]
    if is_heldout.all():
        raise ConfigError(
            "--heldout-fraction",
            fraction,
            f"holds out all of the {documents.num_documents} documents (equal documents stay together)",
            "lower it, or give more, different documents",
        )
    return documents.select(np.flatnonzero(~is_heldout)), documents.select(np.flatnonzero(is_heldout))


def build_datasets(data_config: DataConfig, tokenizer: Tokenizer, seed: int) -> tuple[DocumentSet, DocumentSet]:
    """Read, tokenize and split the documents of a run. Every rank does this and gets the same result.

    Args:
        data_config: Where the documents are; without ``data_path`` the embedded corpus.
        tokenizer: Gives the ids; must have an eod id.
        seed: The run's seed; it decides the split.

    Returns:
        Training documents and held-out documents; no document is in both.

    Raises:
        ConfigError: On unreadable data, no documents, or a split that leaves one side empty.
    """
    documents = tokenize_documents(_texts(data_config), tokenizer)
    if documents.num_documents < 2:
        reason = (
            f"{documents.num_documents} documents are left ({documents.num_skipped_empty} texts are empty); "
            "training and evaluation need one each"
        )
        source = ", ".join(data_config.data_path) or "(embedded corpus)"
        raise ConfigError("--data-path", source, reason, "give at least two documents")
    train, heldout = split_heldout(documents, data_config.heldout_fraction, seed)
    if data_config.max_segment_tokens:
        # After the split, or pieces of one document would stand on both sides.
        train, heldout = train.cut(data_config.max_segment_tokens), heldout.cut(data_config.max_segment_tokens)
    return train, heldout


def _texts(data_config: DataConfig) -> Iterator[str]:
    """Yield the run's texts; with ``max_documents``, stop after as many texts that are not empty."""
    paths = data_config.data_path
    texts = read_texts(paths, data_config.json_key) if paths else iter(load_standard_library())
    num_left = data_config.max_documents
    for text in texts:
        yield text
        if data_config.max_documents and text.strip():
            num_left -= 1
            if num_left == 0:
                return
