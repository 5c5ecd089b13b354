"""What ``build_session`` hands from one part to the next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_glue.backends import registry
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training import session as session_module
from megatron_glue.training.session import build_session
from tests.support.cases import small_config, write_corpus


def test_the_optimizer_is_the_one_that_the_registry_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPTIMIZER", registry._OPTIMIZER[::-1])
    config = small_config(write_corpus(tmp_path / "corpus.jsonl"))
    session = build_session(config, ParallelMesh(), torch.device("cpu"), tmp_path)
    assert session.built.backends.optimizer == "foreach"
    assert session.optimizer.implementation == "foreach"
    session.close()


def test_heldout_documents_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(write_corpus(tmp_path / "corpus.jsonl"))
    session = build_session(config, ParallelMesh(), torch.device("cpu"), tmp_path)
    batches, entropy = session.data.eval_batches(session.device), session.data.unigram_entropy()
    monkeypatch.delattr(session_module, "eval_batches")
    monkeypatch.delattr(session_module, "unigram_entropy")
    assert session.data.eval_batches(session.device) is batches
    assert session.data.unigram_entropy() == entropy > 0
    session.close()
