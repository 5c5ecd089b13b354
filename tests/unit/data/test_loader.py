import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.config.errors import ConfigError
from megatron_glue.data import loader as loader_module
from megatron_glue.data.loader import BatchLoader, BatchPlan
from megatron_glue.data.pack_stream import StreamPosition
from megatron_glue.types.packed_batch import IGNORE_LABEL
from tests.support.data_cases import skewed_lengths, stream_of_lengths

LENGTHS = skewed_lengths(60, largest=120)


def loader_of(plan, lengths=LENGTHS, *, prefetch=False, seed=1):
    return BatchLoader(stream_of_lengths(lengths, seq_length=32, seed=seed), plan, prefetch=prefetch)


def packs_of_steps(loader, num_steps):
    return [[batch.pack_ids for batch in loader.next_step()] for _ in range(num_steps)]


def ids_of_steps(loader, num_steps):
    return [batch.input_ids_T.tolist() for _ in range(num_steps) for batch in loader.next_step()]


@pytest.mark.parametrize(("micro_batch_size", "dp_size"), [(1, 1), (2, 1), (1, 2), (4, 2), (1, 8), (8, 1)])
def test_the_same_packs_make_the_same_step_under_every_layout(micro_batch_size, dp_size):
    steps = []
    for rank in range(dp_size):
        plan = BatchPlan(micro_batch_size, 8, rank, dp_size)
        loader = loader_of(plan)
        for step in range(3):
            batches = loader.next_step()
            assert len(batches) == plan.num_micro_batches == loader.num_micro_batches
            for index, batch in enumerate(batches):
                first = step * 8 + (index * dp_size + rank) * micro_batch_size
                assert batch.pack_ids == tuple(range(first, first + micro_batch_size))
                assert batch.sequence.num_tokens == 32 * micro_batch_size
            steps.append((step, loader.step_label_tokens, loader.step_valid_tokens, batches))
    for step in range(3):
        of_step = [entry for entry in steps if entry[0] == step]
        labels = sum(batch.num_label_tokens for entry in of_step for batch in entry[3])
        valid = sum(batch.sequence.num_valid_tokens for entry in of_step for batch in entry[3])
        assert {entry[1] for entry in of_step} == {labels}
        assert {entry[2] for entry in of_step} == {valid}


def test_label_tokens_are_counted_from_the_labels_themselves():
    loader = loader_of(BatchPlan(2, 4))
    assert loader.step_label_tokens == 0
    for _ in range(3):
        batches = loader.next_step()
        assert isinstance(loader.step_label_tokens, int)
        assert loader.step_label_tokens == sum(int((b.labels_T != IGNORE_LABEL).sum()) for b in batches)


@pytest.mark.parametrize("plan", [(2, 5, 0, 1), (1, 3, 0, 2), (2, 0, 0, 1), (0, 4, 0, 1)])
def test_a_global_batch_that_does_not_divide_is_refused(plan):
    with pytest.raises(ConfigError, match=r"--global-batch-size=.*use a multiple of"):
        BatchPlan(*plan)


@pytest.mark.parametrize("dp_rank", [-1, 2])
def test_a_rank_outside_its_group_is_refused(dp_rank):
    with pytest.raises(ValueError, match="dp_rank"):
        BatchPlan(1, 2, dp_rank, 2)


def test_f92_fewer_packs_than_a_global_batch_roll_over_epochs_with_equal_counts_on_all_ranks():
    for lengths in ([20, 20, 20], [5], [1]):
        per_rank = [packs_of_steps(loader_of(BatchPlan(1, 8, rank, 2), lengths), 2) for rank in range(2)]
        assert [[len(step) for step in steps] for steps in per_rank] == [[4, 4], [4, 4]]
        taken = sorted(pack for steps in per_rank for step in steps for ids in step for pack in ids)
        assert taken == list(range(16))


def test_a_step_without_any_label_reports_zero():
    loader = loader_of(BatchPlan(1, 2), [1])
    loader.next_step()
    assert loader.step_label_tokens == 0
    assert loader.step_valid_tokens == 2


def test_prefetching_changes_nothing():
    plan = BatchPlan(1, 4, 1, 2)
    with loader_of(plan, prefetch=True) as ahead:
        assert ids_of_steps(ahead, 12) == ids_of_steps(loader_of(plan), 12)


@pytest.mark.parametrize("prefetch", [False, True])
def test_f94_two_resumes_lose_and_repeat_nothing(prefetch):
    plan = BatchPlan(2, 4)
    whole = ids_of_steps(loader_of(plan), 9)
    parts, state = [], None
    for num_steps in (2, 3, 4):
        with loader_of(plan, prefetch=prefetch) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            parts += ids_of_steps(loader, num_steps)
            state = loader.state_dict()
    assert parts == whole
    assert state["num_packs_taken"] == 9 * 4


def test_a_prefetched_step_is_not_consumed():
    with loader_of(BatchPlan(1, 4), prefetch=True) as loader:
        assert loader.state_dict()["num_packs_taken"] == 0
        loader.next_step()
        loader._pending.result()
        assert loader.state_dict()["num_packs_taken"] == 4
        assert loader.position.num_packs_taken == 4


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_step_can_be_handed_out_again(prefetch):
    with loader_of(BatchPlan(1, 4), prefetch=prefetch) as loader:
        loader.next_step()
        before = loader.position
        second = ids_of_steps(loader, 1)
        after = loader.position
        third = ids_of_steps(loader, 1)
        loader.rewind(before)
        assert loader.position == before
        assert loader.step_label_tokens == 0
        assert ids_of_steps(loader, 1) == second
        assert loader.position == after
        assert ids_of_steps(loader, 1) == third


def test_loading_a_position_discards_what_was_prefetched():
    plan = BatchPlan(1, 4)
    with loader_of(plan, prefetch=True) as loader:
        start = loader.state_dict()
        first = ids_of_steps(loader, 3)
        loader.load_state_dict(start)
        assert loader.step_label_tokens == 0
        assert ids_of_steps(loader, 3) == first


@pytest.mark.parametrize("prefetch", [False, True])
def test_f98_a_save_at_the_exact_end_of_an_epoch_continues_with_the_next(prefetch):
    lengths = [32] * 64
    plan = BatchPlan(4, 16)
    with loader_of(plan, lengths, prefetch=prefetch) as loader:
        first_epoch = ids_of_steps(loader, 4)
        state = loader.state_dict()
    assert (state["epoch"], state["pack"], state["num_packs_taken"]) == (1, 0, 64)
    with loader_of(plan, lengths, prefetch=prefetch) as resumed:
        resumed.load_state_dict(state)
        later = ids_of_steps(resumed, 8)
        assert resumed.state_dict()["epoch"] == 3
    epochs = [first_epoch, later[:16], later[16:]]
    for epoch in epochs:
        assert sorted(token for ids in epoch for token in ids) == list(range(1, 64 * 32 + 1))
    assert first_epoch != later[:16]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=10), st.integers(0, 9), st.sampled_from([1, 2, 4]))
def test_a_position_can_be_resumed_with_another_layout_and_batch_size(lengths, num_steps, dp_size):
    before = loader_of(BatchPlan(1, 2), lengths)
    for _ in range(num_steps):
        before.next_step()
    after = loader_of(BatchPlan(1, 4, dp_size - 1, dp_size), lengths)
    after.load_state_dict(before.state_dict())
    first = after.next_step()[0].pack_ids[0]
    assert first == 2 * num_steps + dp_size - 1


def test_a_resume_plans_only_the_epoch_it_needs(monkeypatch):
    planned = []
    stream = stream_of_lengths([5, 9, 30], seq_length=32)
    original = loader_module.PackStream.plan
    monkeypatch.setattr(loader_module.PackStream, "plan", lambda self, e: planned.append(e) or original(self, e))
    loader = BatchLoader(stream, BatchPlan(1, 1), prefetch=False)
    state = loader.state_dict() | {"epoch": 5000, "pack": 0, "num_packs_taken": 10_000}
    loader.load_state_dict(state)
    loader.next_step()
    assert set(planned) == {5000}


def test_a_position_in_another_stream_is_refused():
    state = loader_of(BatchPlan(1, 2)).state_dict()
    others = {
        "documents": loader_of(BatchPlan(1, 2), [*LENGTHS, 3]),
        "seed": loader_of(BatchPlan(1, 2), seed=2),
        "seq_length": BatchLoader(stream_of_lengths(LENGTHS, seq_length=16), BatchPlan(1, 2), prefetch=False),
        "packing_window": BatchLoader(stream_of_lengths(LENGTHS, 32, window=3), BatchPlan(1, 2), prefetch=False),
        "segment_alignment": BatchLoader(stream_of_lengths(LENGTHS, 32, alignment=4), BatchPlan(1, 2), prefetch=False),
    }
    for name, other in others.items():
        with pytest.raises(ConfigError, match=f"was saved with {name}"):
            other.load_state_dict(state)
        assert other.position == StreamPosition()


def test_a_position_saved_before_there_was_an_alignment_is_one_without():
    state = loader_of(BatchPlan(1, 2)).state_dict()
    del state["stream"]["segment_alignment"]
    loader_of(BatchPlan(1, 2)).load_state_dict(state)
    aligned = BatchLoader(stream_of_lengths(LENGTHS, 32, alignment=4), BatchPlan(1, 2), prefetch=False)
    with pytest.raises(ConfigError, match=r"--segment-alignment=4: .*was saved with segment_alignment 1"):
        aligned.load_state_dict(state)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_share_the_packs_of_a_step(size, prefetch):
    def steps(rank, size):
        stream = stream_of_lengths(LENGTHS, 32, alignment=8)
        with BatchLoader(stream, BatchPlan(2, 8, 1, 2, rank, size), prefetch=prefetch) as loader:
            return [(loader.next_step(), loader.step_label_tokens, loader.step_valid_tokens) for _ in range(4)]

    for whole, *parts in zip(steps(0, 1), *(steps(rank, size) for rank in range(size)), strict=True):
        assert {part[1:] for part in parts} == {whole[1:]}
        for batch, *shards in zip(whole[0], *(part[0] for part in parts), strict=True):
            assert batch.sequence.token_ids_T is None
            assert {shard.pack_ids for shard in shards} == {batch.pack_ids}
            assert {shard.sequence.num_tokens for shard in shards} == {64 // size}
            assert sum(shard.num_label_tokens for shard in shards) == batch.num_label_tokens
            for shard in shards:
                assert torch.equal(shard.input_ids_T, batch.input_ids_T[shard.sequence.token_ids_T])


def test_a_position_can_be_resumed_with_another_context_parallel_size():
    def loader(*ranks):
        return BatchLoader(stream_of_lengths(LENGTHS, 32, alignment=8), BatchPlan(1, 2, 0, 1, *ranks), prefetch=False)

    whole = loader()
    whole.next_step()
    state = json.loads(json.dumps(whole.state_dict()))
    expected = whole.next_step()
    parts = []
    for rank in range(4):
        parts.append(loader(rank, 4))
        parts[-1].load_state_dict(state)
    for batch, *shards in zip(expected, *(part.next_step() for part in parts), strict=True):
        ids = torch.cat([shard.input_ids_T for shard in shards])
        tokens = torch.cat([shard.sequence.token_ids_T for shard in shards])
        assert torch.equal(ids[torch.argsort(tokens)], batch.input_ids_T)


@pytest.mark.parametrize("cp_rank", [-1, 2])
def test_a_rank_outside_its_context_group_is_refused(cp_rank):
    with pytest.raises(ValueError, match="cp_rank"):
        BatchPlan(1, 2, cp_rank=cp_rank, cp_size=2)


def test_a_position_that_does_not_exist_is_refused():
    loader = loader_of(BatchPlan(1, 2))
    with pytest.raises(ValueError, match="pack=100000"):
        loader.load_state_dict(loader.state_dict() | {"pack": 100_000})


def test_an_error_in_the_thread_surfaces_in_the_caller_and_keeps_the_position(monkeypatch):
    failing = threading.Event()
    original = loader_module.assemble_batch

    def assemble(*arguments):
        if failing.is_set():
            raise RuntimeError("disk on fire")
        return original(*arguments)

    monkeypatch.setattr(loader_module, "assemble_batch", assemble)
    plan = BatchPlan(1, 2)
    with loader_of(plan, prefetch=True) as loader:
        first = ids_of_steps(loader, 1)
        loader._pending.result()
        failing.set()
        second = ids_of_steps(loader, 1)
        with pytest.raises(RuntimeError, match="disk on fire"):
            loader.next_step()
        assert loader.position.num_packs_taken == 4
        failing.clear()
        third = ids_of_steps(loader, 1)
    assert first + second + third == ids_of_steps(loader_of(plan), 3)


def test_closing_ends_the_thread_and_may_be_repeated():
    before = set(threading.enumerate())
    loader = loader_of(BatchPlan(1, 2), prefetch=True)
    loader.next_step()
    assert any(thread.name.startswith("batch-prefetch") for thread in set(threading.enumerate()) - before)
    loader.close()
    loader.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ValueError, match="closed"):
        loader.next_step()


def test_closing_after_a_failure_in_the_thread_is_clean(monkeypatch):
    loader = loader_of(BatchPlan(1, 2), prefetch=True)
    loader.next_step()
    loader._pending.result()
    monkeypatch.delattr(loader_module, "assemble_batch")
    loader.next_step()
    assert isinstance(loader._pending.exception(), NameError)
    loader.close()


def test_the_next_step_is_built_while_the_caller_works():
    with loader_of(BatchPlan(1, 2), prefetch=True) as loader:
        loader.next_step()
        prefetched = loader._pending.result(timeout=30).batches
        assert loader.next_step() is prefetched


def test_metadata_of_the_next_step_is_prepared_beside_the_current_one():
    prepared = []

    def prepare(sequence):
        prepared.append((sequence, threading.current_thread()))
        return [sequence.positions_T]

    with loader_of(BatchPlan(1, 2), prefetch=True) as loader:
        loader.prepare_with(prepare)
        loader.next_step()
        loader._pending.result()
        assert len(prepared) == 4, "this step's and the next one's"
        assert [thread is threading.main_thread() for _, thread in prepared] == [True, True, False, False]
        handed_out = [batch.sequence for batch in loader.next_step()]
        assert [sequence for sequence, _ in prepared[2:4]] == handed_out


@pytest.mark.parametrize(("device", "expected"), [("cuda:3", ["cuda:3"]), ("cpu", [])])
def test_the_prefetching_thread_begins_on_the_device_of_its_rank(monkeypatch, device, expected):
    chosen = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((str(device), threading.current_thread().name))
    )
    with loader_module._start_worker(torch.device(device)) as worker:
        name = worker.submit(lambda: threading.current_thread().name).result()
    assert chosen == [(device, name) for device in expected]
    assert name.startswith("batch-prefetch")


def test_packing_efficiency_is_that_of_the_current_epoch():
    loader = loader_of(BatchPlan(1, 2))
    plan = stream_of_lengths(LENGTHS, seq_length=32).plan(0)
    assert loader.packing_efficiency == plan.num_tokens / (plan.num_packs * 32)
    assert 0.8 < loader.packing_efficiency <= 1


def test_loading_leaves_the_global_random_states_alone():
    np.random.seed(5)
    torch.manual_seed(5)
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    ids_of_steps(loader_of(BatchPlan(1, 8)), 20)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("prefetch", [False, True])
def test_batches_reach_the_device_intact_while_it_is_busy(prefetch):
    plan = BatchPlan(2, 8)
    expected = ids_of_steps(loader_of(plan), 20)
    stream = stream_of_lengths(LENGTHS, seq_length=32)
    seen = []
    with BatchLoader(stream, plan, device="cuda", prefetch=prefetch) as loader:
        for _ in range(20):
            for batch in loader.next_step():
                torch.cuda._sleep(2_000_000)  # so that freed memory is reused while kernels still wait for it
                seen.append(batch.input_ids_T.clone())
                assert batch.labels_T.device.type == batch.sequence.positions_T.device.type == "cuda"
            del batch
    assert [ids.tolist() for ids in seen] == expected


@pytest.mark.parametrize("prefetch", [False, True])
def test_skipped_steps_are_those_that_would_have_come(prefetch):
    with (
        loader_of(BatchPlan(2, 4), prefetch=prefetch) as walked,
        loader_of(BatchPlan(2, 4), prefetch=prefetch) as jumped,
    ):
        packs_of_steps(walked, 9)
        packs_of_steps(jumped, 2)
        jumped.skip(7)
        assert jumped.state_dict() == walked.state_dict()
        assert ids_of_steps(jumped, 3) == ids_of_steps(walked, 3)
