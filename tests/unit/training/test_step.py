"""One optimizer step: its gradient does not depend on how the step is cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import accumulate_gradients, train_step
from megatron_glue.types import IGNORE_LABEL, ForwardContext, PackedBatch, PackedSequence
from tests.support.cases import small_config, write_corpus
from tests.support.tolerances import assert_close

CPU = torch.device("cpu")
NO_AUX = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}


class FixedLoader:
    """Hands out the same micro-batches every step."""

    def __init__(self, batches: list[PackedBatch]) -> None:
        self._batches = batches
        self.step_label_tokens = sum(batch.num_label_tokens for batch in batches)
        self.step_valid_tokens = sum(batch.sequence.num_valid_tokens for batch in batches)

    def next_step(self) -> list[PackedBatch]:
        return self._batches

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("step") / "corpus.jsonl"))


def build(corpus: str, **overrides: Any) -> Session:
    return build_session(small_config(corpus, **overrides), ParallelMesh(), CPU, Path(corpus).parent / "offload")


def gradients(session: Session) -> dict[str, Tensor]:
    accumulate_gradients(session)
    session.close()
    return {name: param.grad for name, param in session.engine.module.named_parameters() if param.grad is not None}


def with_batches(session: Session, batches: list[PackedBatch]) -> Session:
    session.data.loader.close()
    session.data = replace(session.data, loader=FixedLoader(batches))
    return session


def batch_of(lengths: list[int], num_labels: int, num_pad: int = 0, seed: int = 0) -> PackedBatch:
    """Random tokens of which the first ``num_labels`` have labels."""
    sequence = PackedSequence.from_lengths(lengths, num_pad)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (sequence.num_tokens,), generator=generator)
    labels = torch.randint(0, 256, (sequence.num_tokens,), generator=generator)
    labels[num_labels:] = IGNORE_LABEL
    return PackedBatch(ids, labels, sequence, num_labels)


@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_f30_accumulation_does_not_change_the_gradient(micro_batch_size: int, corpus: str) -> None:
    expected = gradients(build(corpus, moe=NO_AUX))
    actual = gradients(build(corpus, moe=NO_AUX, training={"micro_batch_size": micro_batch_size}))
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, what=name)


def test_f29_every_token_counts_the_same(corpus: str) -> None:
    """1 label in one micro-batch and 99 in another: a mean of means would weigh the one 99 times as much."""
    one, many = batch_of([100], 1, seed=1), batch_of([100], 99, seed=2)
    together = PackedBatch(
        torch.cat([one.input_ids_T, many.input_ids_T]),
        torch.cat([one.labels_T, many.labels_T]),
        PackedSequence.from_lengths([100, 100]),
        100,
    )
    actual = gradients(with_batches(build(corpus, moe=NO_AUX), [one, many]))
    expected = gradients(with_batches(build(corpus, moe=NO_AUX), [together]))
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, what=name)


@pytest.mark.parametrize("num_copies", [2, 8])
def test_f64_aux_gradient_does_not_depend_on_accumulation(num_copies: int, corpus: str) -> None:
    aux_only = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1}
    batch = replace(batch_of([40, 24], 0), num_label_tokens=0)
    expected = gradients(with_batches(build(corpus, moe=aux_only), [batch]))
    actual = gradients(with_batches(build(corpus, moe=aux_only), [batch] * num_copies))
    routers = [name for name in expected if "router" in name]
    assert len(routers) == 2
    for name in routers:
        assert expected[name].norm() > 0
        assert_close(actual[name], expected[name], what=name)


def test_f26_f32_a_step_without_any_label_is_finite_and_changes_nothing_by_loss(corpus: str) -> None:
    empty = batch_of([], 0, num_pad=64)
    session = with_batches(build(corpus, moe=NO_AUX), [empty, empty])
    result = train_step(session)
    session.close()
    assert result.loss.item() == 0.0
    assert result.grad_norm.item() == 0.0
    assert all(torch.isfinite(param).all() for param in session.engine.module.parameters())


def test_f62_padding_is_neither_routed_nor_counted(corpus: str) -> None:
    session = with_batches(build(corpus), [batch_of([30, 18], 20, num_pad=16)])
    result = train_step(session)
    session.close()
    assert result.expert_counts_LE is not None
    assert result.expert_counts_LE.sum(dim=1).tolist() == [48 * 2, 48 * 2]


def test_f113_a_step_that_is_not_finite_is_skipped_and_the_schedule_stands_still(corpus: str) -> None:
    session = build(corpus)
    first = train_step(session)
    weights = {name: param.detach().clone() for name, param in session.engine.module.named_parameters()}
    bad = session.engine.gradient_parameters()[0].register_hook(lambda grad: grad * float("nan"))
    skipped = train_step(session)
    bad.remove()
    for name, param in session.engine.module.named_parameters():
        assert torch.equal(param, weights[name]), name
    after = train_step(session)
    session.close()
    assert not torch.isfinite(skipped.grad_norm)
    assert session.optimizer.num_skipped_updates == 1
    assert first.lr < skipped.lr == after.lr


def test_f113_a_skipped_update_moves_no_balancing_bias(corpus: str) -> None:
    session = build(corpus, moe={"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"})
    (router, *_) = session.built.routers.values()
    bias_E = router.expert_bias_E
    assert bias_E is not None
    train_step(session)
    before = bias_E.clone()
    assert before.any()
    with torch.no_grad():
        session.built.parts[0].final_norm.weight.fill_(float("nan"))
    train_step(session)
    session.close()
    assert session.optimizer.num_skipped_updates == 1
    assert torch.equal(bias_E, before)


def test_metadata_dies_with_the_backward_of_its_micro_batch(corpus: str) -> None:
    session = build(corpus, training={"accelerator": {"enable_metadata_cache": True}})
    batches = [batch_of([20, 44], 64, seed=1), batch_of([64], 64, seed=2)]
    alive: list[int] = []
    backward = session.engine.backward

    def counted(loss: Tensor) -> None:
        backward(loss)
        alive.append(sum(len(batch.sequence.cache_entries) > 0 for batch in batches))

    session.engine.backward = counted
    train_step(with_batches(session, batches))
    session.close()
    assert alive == [1, 1], "that of earlier micro-batches is gone"
    assert not any(batch.sequence.cache_entries for batch in batches)


def test_counters_of_training_leave_evaluation_out(corpus: str) -> None:
    session = build(corpus, training={"accelerator": {"enable_metadata_cache": False}})
    train_step(session)
    before = session.built.metadata_cache.builds, session.host_reader.count
    batch = session.data.eval_batches(CPU)[0]
    with session.uncounted():
        session.engine.module(batch, ForwardContext(sequence=batch.sequence))
    session.close()
    assert (session.built.metadata_cache.builds, session.host_reader.count) == before
    assert before[0] == 4 * 2, "four micro-batches, two layers, nothing recomputed"
