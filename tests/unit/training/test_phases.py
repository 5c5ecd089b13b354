"""Every phase of a step has its name on a profiler's timeline, and nothing is touched while names are off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.phases import PHASES
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import train_step
from tests.support.cases import small_config, write_corpus

ONE_DENSE_LAYER = {"num_experts": 4, "moe_layer_freq": (0, 1), "moe_ffn_hidden_size": 16}


def build(folder: Path, *, has_ranges: bool, has_one_pass: bool = True) -> Session:
    corpus = write_corpus(folder / "corpus.jsonl")
    switches = {"enable_metadata_cache": True, "enable_grouped_index": has_one_pass}
    config = small_config(
        corpus, moe=ONE_DENSE_LAYER, logging={"nvtx_ranges": has_ranges}, training={"accelerator": switches}
    )
    return build_session(config, ParallelMesh(), torch.device("cpu"), folder / "offload")


@pytest.mark.parametrize("has_one_pass", [True, False])
def test_every_phase_is_named_and_no_number_changes(tmp_path: Path, has_one_pass: bool) -> None:
    named = build(tmp_path, has_ranges=True, has_one_pass=has_one_pass)
    plain = build(tmp_path, has_ranges=False, has_one_pass=has_one_pass)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = train_step(named)
    expected = train_step(plain)
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(result.grad_norm, expected.grad_norm)
    found = [event.name for event in profiler.events() if event.is_user_annotation]
    absent = set() if has_one_pass else {"dispatch", "exchange"}
    assert set(PHASES) - set(found) == absent, "one mask per expert dispatches nothing"
    assert {name: found.count(name) for name in ("data wait", "forward", "moe", "ffn", "backward", "optimizer")} == {
        "data wait": 1,
        "forward": 4,
        "moe": 4,
        "ffn": 4,
        "backward": 4,
        "optimizer": 1,
    }
    for session in (named, plain):
        session.close()


def test_off_means_that_no_method_was_replaced(tmp_path: Path) -> None:
    session = build(tmp_path, has_ranges=False)
    owners = [session.engine, session.optimizer, session.data.loader, *session.engine.module.modules()]
    assert not [owner for owner in owners if {"forward", "backward", "step", "next_step"} & set(vars(owner))]
    session.close()
