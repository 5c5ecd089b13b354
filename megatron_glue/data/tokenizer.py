"""How text becomes token ids and back.

The default is one id per UTF-8 byte: nothing to download, nothing to train, every text can be written. It knows no
merges, so sequences are about four times longer than with a trained vocabulary. Stands at the very start of a batch's
way: documents are encoded once, when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import DataConfig

NUM_BYTE_IDS = 256


class Tokenizer(Protocol):
    """What the data room needs from a tokenizer. A special id that the vocabulary does not have is None."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included; all ids are smaller."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id that may stand before a text."""
        ...

    @property
    def eod_id(self) -> int | None:
        """Id that ends every document."""
        ...

    @property
    def pad_id(self) -> int | None:
        """Id that fills a pack up; never attended, never a label."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text in one dimension, without specials."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; specials have none."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte (0-255), then the named specials."""

    bos_id = NUM_BYTE_IDS
    eod_id = NUM_BYTE_IDS + 1
    pad_id = NUM_BYTE_IDS + 2
    vocab_size = NUM_BYTE_IDS + 3

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids that stand for no byte, by name."""
        return {"bos": self.bos_id, "eod": self.eod_id, "pad": self.pad_id}

    def encode(self, text: str) -> np.ndarray:
        """Encode a text.

        Args:
            text: Any string. A lone surrogate, which UTF-8 cannot write, becomes three bytes that decode to U+FFFD.

        Returns:
            uint16 ids, one per byte, without specials; read-only.
        """
        ids = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.uint16)
        ids.flags.writeable = False
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, for example those of a sampled continuation.

        Args:
            ids: Ids below ``vocab_size``, an array or any iterable of integers on the host.

        Returns:
            The text. Specials are left out; bytes that are not UTF-8 become U+FFFD, so the result can be printed.

        Raises:
            ValueError: On an id outside the vocabulary.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        outside = array[(array < 0) | (array >= self.vocab_size)]
        if outside.size:
            raise ValueError(f"id {outside[0]} is outside the vocabulary of {self.vocab_size}")
        return array[array < NUM_BYTE_IDS].astype(np.uint8).tobytes().decode("utf-8", "replace")


def build_tokenizer(data_config: DataConfig) -> Tokenizer:
    """Return the tokenizer that the configuration names.

    Raises:
        ConfigError: On an unknown name.
    """
    if data_config.tokenizer_type == "byte":
        return ByteTokenizer()
    raise ConfigError("--tokenizer-type", data_config.tokenizer_type, "is not known", "use byte")
