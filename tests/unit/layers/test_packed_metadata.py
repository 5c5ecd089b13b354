import gc
import threading
import weakref

import pytest
import torch

from megatron_glue.layers.packed_metadata import PackedMetadataCache, read_lengths
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support.layer_cases import PACKS, build_blocks, gradients, pack, run_blocks, small_model
from tests.support.operator_watch import OperatorWatch

LAYOUTS = ["segments", "varlen", "dense", "flex"]
TRAINABLE = ["segments", "dense"]


def new_cache(layout="segments", enabled=True):
    return PackedMetadataCache(layout, enabled, HostReader())


def assert_same_values(a, b):
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other), name
        elif name == "block_mask" and value is not None:
            assert torch.equal(value.to_dense(), other.to_dense())
        else:
            assert value == other, name


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_and_off_build_the_same_values(layout, name, window):
    on, off = (new_cache(layout, enabled).for_sequence(pack(name), window) for enabled in (True, False))
    assert type(on) is type(off)
    assert_same_values(on, off)


@pytest.mark.parametrize("name", PACKS)
def test_lengths_are_recovered_from_the_device_tensor(name):
    reader = HostReader()
    lengths, num_pad_tokens = read_lengths(pack(name).segment_ids_T, reader)
    assert (lengths, num_pad_tokens) == PACKS[name]
    assert reader.count == (0 if name == "nothing" else 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_builds_once_and_reads_nothing(layout):
    cache, sequence = new_cache(layout), pack("mixed")
    first = cache.for_sequence(sequence)
    assert all(cache.for_sequence(sequence) is first for _ in range(4))
    assert (cache.builds, cache.reuses, cache.host_reader.count) == (1, 4, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_off_builds_and_reads_in_every_call(layout):
    cache, sequence = new_cache(layout, enabled=False), pack("mixed")
    for _ in range(4):
        cache.for_sequence(sequence)
    assert (cache.builds, cache.reuses, cache.host_reader.count) == (4, 0, 8)
    assert not sequence.cache_entries


@pytest.mark.parametrize("layout", TRAINABLE)
def test_a_model_builds_once_per_layout_on_and_once_per_layer_off(layout):
    model = small_model(window_size=6, window_attn_skip_freq=3, num_layers=6)
    sequence = pack("mixed")
    counts = {}
    for enabled in (True, False):
        blocks, cache = build_blocks(model, layout=layout, enabled=enabled)
        gradients(blocks, sequence)
        counts[enabled] = (cache.builds, cache.reuses, cache.host_reader.count)
    # Two layouts: the window of layers 0, 1, 3 and 4, and none in layers 2 and 5.
    assert counts == {True: (2, 4, 0), False: (6, 0, 12)}


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("name", ["mixed", "many short", "two long", "one"])
@pytest.mark.parametrize("layout", TRAINABLE)
def test_on_and_off_give_the_same_bits(layout, name, window):
    model = small_model(window_size=window, window_attn_skip_freq=2, attention_dropout=0.2, hidden_dropout=0.1)
    results = [gradients(build_blocks(model, layout=layout, enabled=on)[0], pack(name)) for on in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layout", TRAINABLE)
def test_f25_a_forward_and_backward_reads_no_device_value(layout):
    blocks, cache = build_blocks(small_model(hidden_dropout=0.1, window_size=6), layout=layout)
    with OperatorWatch() as watch:
        gradients(blocks, pack("mixed"))
    assert watch.synchronising == []
    assert cache.host_reader.count == 0


def test_off_does_wait_for_the_device():
    """The watch of the test above sees it when it happens."""
    blocks, _ = build_blocks(small_model(), enabled=False)
    with OperatorWatch() as watch:
        gradients(blocks, pack("mixed"))
    assert len(watch.synchronising) >= 3


def test_micro_batches_in_flight_do_not_evict_each_other():
    blocks, cache = build_blocks(small_model())
    sequences = [pack("mixed"), pack("many short"), pack("two long")]
    outs = []
    for sequence in sequences:
        x = torch.randn(sequence.num_tokens, 32, requires_grad=True)
        outs.append(run_blocks(blocks, x, ForwardContext(sequence)))
    for out in reversed(outs):
        out.sum().backward()
    for sequence in sequences:
        cache.for_sequence(sequence)
    assert cache.builds == 3
    assert cache.reuses == 3 * 2 + 3


def test_recompute_finds_what_forward_built():
    blocks, cache = build_blocks(small_model())
    sequence = pack("mixed")
    plain = gradients(blocks, sequence)
    x = torch.randn(sequence.num_tokens, 32, generator=torch.Generator().manual_seed(11)).requires_grad_()
    y = x
    for block in blocks:
        y = torch.utils.checkpoint.checkpoint(block, y, ForwardContext(sequence), use_reentrant=False)
    generator = torch.Generator().manual_seed(11)
    torch.randn(x.shape, generator=generator)
    blocks.zero_grad()
    y.backward(torch.randn(y.shape, generator=generator))
    assert x.grad is not None
    assert torch.equal(x.grad, plain[1])
    assert cache.builds == 1
    assert cache.reuses == 2 + 3 + 3


def test_f18_changing_lengths_and_evaluation_in_between():
    blocks, cache = build_blocks(small_model())
    train, other = PackedSequence.from_lengths([100, 28]), PackedSequence.from_lengths([30, 34])
    first = gradients(blocks, train)
    blocks.eval()
    with torch.no_grad():
        run_blocks(blocks, torch.randn(64, 32), ForwardContext(other))
    with torch.inference_mode():
        run_blocks(blocks, torch.randn(64, 32), ForwardContext(PackedSequence.from_lengths([64])))
    blocks.train()
    assert all(torch.equal(a, b) for a, b in zip(gradients(blocks, train), first, strict=True))
    assert cache.builds == 3


def test_an_entry_born_in_evaluation_serves_training():
    blocks, _ = build_blocks(small_model(window_size=5))
    sequence = pack("mixed")
    with torch.inference_mode():
        run_blocks(blocks, torch.randn(sequence.num_tokens, 32), ForwardContext(sequence))
    gradients(blocks, sequence)


def test_f18_the_key_holds_what_the_value_depends_on():
    sequence = pack("mixed")
    cache = new_cache("dense")
    masks = {window: cache.for_sequence(sequence, window) for window in (0, 3, 7)}
    assert cache.builds == 3
    assert all(cache.for_sequence(sequence, window) is mask for window, mask in masks.items())
    # A window as long as the longest segment hides nothing and shares the entry.
    assert cache.for_sequence(sequence, 150) is masks[0]
    # Another layout's cache on the same sequence does not collide.
    assert type(new_cache("segments").for_sequence(sequence)) is not type(masks[0])
    # The window of the varlen kernel is an argument, so all layers share one entry.
    varlen = new_cache("varlen")
    assert varlen.for_sequence(sequence, 3) is varlen.for_sequence(sequence, 0)


def test_f16_changing_the_lengths_one_gave_changes_nothing():
    lengths = [3, 5]
    sequence = PackedSequence.from_lengths(lengths)
    cache = new_cache("varlen")
    before = cache.for_sequence(sequence).cu_seqlens.tolist()
    lengths[:] = [5, 3]
    assert cache.for_sequence(sequence).cu_seqlens.tolist() == before == [0, 3, 8]
    with pytest.raises(AttributeError):
        sequence.lengths = (5, 3)  # pyright: ignore[reportAttributeAccessIssue]
    assert cache.for_sequence(PackedSequence.from_lengths(lengths)).cu_seqlens.tolist() == [0, 5, 8]


def test_f20_entries_die_with_their_sequence():
    cache = new_cache("dense")
    references = []
    for length in range(2, 200):
        references.append(weakref.ref(cache.for_sequence(PackedSequence.from_lengths([length, 3])).allowed_VV))
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 1


def test_f21_one_pack_on_two_devices():
    cache = new_cache("dense")
    on_cpu = pack("mixed")
    on_meta = on_cpu.to("meta")
    masks = [cache.for_sequence(sequence).allowed_VV for sequence in (on_cpu, on_meta, on_cpu, on_meta)]
    assert [mask.device.type for mask in masks] == ["cpu", "meta", "cpu", "meta"]
    assert (cache.builds, cache.reuses) == (2, 2)


def test_f23_layers_with_and_without_window_do_not_change_each_others_mask():
    cache, sequence = new_cache("dense"), pack("many short")
    full = cache.for_sequence(sequence, 0).allowed_VV.clone()
    windowed = cache.for_sequence(sequence, 4).allowed_VV.clone()
    assert torch.equal(cache.for_sequence(sequence, 0).allowed_VV, full)
    assert torch.equal(cache.for_sequence(sequence, 4).allowed_VV, windowed)
    assert (windowed & ~full).sum() == 0
    assert (full & ~windowed).sum() > 0


def test_threads_with_their_own_packs():
    cache = new_cache()
    results = {}

    def work(length):
        sequence = PackedSequence.from_lengths([length, length])
        results[length] = [cache.for_sequence(sequence) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(length,)) for length in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({id(entry) for entry in entries}) == 1 for entries in results.values())
    assert all(entries[0].num_tokens == 2 * length for length, entries in results.items())


@pytest.mark.parametrize("layout", ["segments", "varlen"])
def test_what_is_prepared_in_another_thread_is_found_and_counted_once_asked_for(layout):
    cache, sequence = new_cache(layout), pack("mixed")
    cache.expect(0)
    made = []
    thread = threading.Thread(target=lambda: made.extend(cache.prepare(sequence)))
    thread.start()
    thread.join()
    assert made, "a GPU keeps the memory of these tensors"
    assert (cache.builds, cache.reuses, cache.built_ahead) == (0, 0, 0), "counters belong to the training thread"
    with torch.inference_mode():
        first = cache.for_sequence(sequence)
    assert_same_values(first, new_cache(layout).for_sequence(pack("mixed")))
    assert {id(tensor) for tensor in made} == {id(v) for v in vars(first).values() if isinstance(v, torch.Tensor)}
    assert cache.for_sequence(sequence) is first
    assert (cache.builds, cache.reuses, cache.built_ahead) == (1, 1, 1)
    assert cache.prepare(sequence) == [], "it is there"


def test_windows_that_hide_nothing_are_prepared_once_and_masks_never():
    cache, sequence = new_cache("segments"), pack("mixed")
    longest = max(PACKS["mixed"][0])
    for window in (0, 7, longest, longest + 5):
        cache.expect(window)
    cache.prepare(sequence)
    assert len(sequence.cache_entries) == 1
    for window in (0, 7, longest):
        cache.for_sequence(sequence, window)
    assert (cache.builds, cache.built_ahead) == (2, 1)


@pytest.mark.parametrize(("layout", "enabled"), [("dense", True), ("flex", True), ("segments", False)])
def test_nothing_is_prepared_that_is_quadratic_or_that_nobody_would_find(layout, enabled):
    cache, sequence = new_cache(layout, enabled), pack("mixed")
    cache.expect(0)
    assert cache.prepare(sequence) == []
    assert not sequence.cache_entries


def test_layers_say_which_windows_they_will_ask_for():
    model = small_model(window_size=6, window_attn_skip_freq=2, num_layers=2)
    blocks, cache = build_blocks(model, layout="segments")
    sequence = pack("mixed")
    cache.prepare(sequence)
    gradients(blocks, sequence)
    # The window's metadata holds a mask and is built by the layer.
    assert (cache.builds, cache.built_ahead, cache.reuses) == (2, 1, 0)


def context_cache(context_layout, layout="segments", enabled=True):
    return PackedMetadataCache(layout, enabled, HostReader(), context_layout)


def shard_of_mixed(rank=0, size=2):
    lengths = PACKS["mixed"][0]
    return PackedSequence.from_lengths(lengths, 320 - sum(lengths)).shard(rank, size, 8)


def flattened(metadata):
    """Every value of context metadata, tensors as lists."""
    if isinstance(metadata, torch.Tensor):
        return metadata.tolist()
    if isinstance(metadata, tuple):
        return [flattened(value) for value in metadata]
    return (
        {name: flattened(value) for name, value in vars(metadata).items()}
        if hasattr(metadata, "__dict__")
        else metadata
    )


CONTEXTS = pytest.mark.parametrize("context_layout", ["gather", "ring"])


@CONTEXTS
@pytest.mark.parametrize("layout", ["segments", "varlen"])
@pytest.mark.parametrize("window", [0, 7])
def test_a_shard_is_planned_once_on_and_per_call_off_with_the_same_values_and_no_read(window, layout, context_layout):
    part = shard_of_mixed()
    on, off = (context_cache(context_layout, layout, enabled) for enabled in (True, False))
    with OperatorWatch() as watch:
        found = [on.for_sequence(part, window) for _ in range(3)]
        built = [off.for_sequence(part, window) for _ in range(3)]
    assert watch.synchronising == []
    assert all(entry is found[0] for entry in found)
    assert flattened(found[0]) == flattened(built[0])
    assert (on.builds, on.reuses, on.host_reader.count) == (1, 2, 0)
    assert (off.builds, off.reuses, off.host_reader.count) == (3, 0, 0)


@CONTEXTS
def test_f18_the_key_of_a_shard_holds_what_its_plan_depends_on(context_layout):
    part, cache = shard_of_mixed(), context_cache(context_layout)
    plans = {window: cache.for_sequence(part, window) for window in (0, 3, 7)}
    assert cache.builds == 3
    # A window as long as the longest WHOLE segment hides nothing, and a shorter one does, whatever this rank holds.
    assert cache.for_sequence(part, 150) is plans[0]
    assert cache.for_sequence(part, 100) is not plans[0]
    for other in (
        context_cache("ring" if context_layout == "gather" else "gather"),
        context_cache(context_layout, "varlen"),
    ):
        assert other.for_sequence(part) is not plans[0]
    assert {key.parameters[-1] for key in part.cache_entries if key.kind == "attention_metadata"} == {(0, 2, 8)}
    assert {key.parameters for key in part.cache_entries if key.kind == "context_index_maps"} == {(2, 8)}


def test_f18_ranks_have_plans_of_their_own():
    cache = context_cache("gather")
    plans = [cache.for_sequence(shard_of_mixed(rank, size)) for rank, size in ((0, 2), (1, 2), (0, 4))]
    assert cache.builds == 3
    assert [plan.num_valid_tokens for plan in plans] == [130, 135, 63]


def test_a_whole_micro_batch_takes_the_layout_of_one_rank():
    cache, sequence = context_cache("ring"), pack("mixed")
    assert type(cache.for_sequence(sequence)) is type(new_cache().for_sequence(sequence))


def test_a_shard_in_a_model_that_was_not_built_for_it_is_a_mistake():
    with pytest.raises(AssertionError, match="not built for split sequences"):
        new_cache().for_sequence(shard_of_mixed())
    with pytest.raises(ValueError, match="context_layout='p2p'"):
        context_cache("p2p")


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match="layout='ragged'"):
        new_cache("ragged")


# A late piece meets more keys than it has queries: without cumulative lengths that takes a band.
@pytest.mark.parametrize(
    ("context_layout", "layout", "windows_ahead"),
    [("ring", "segments", 1), ("ring", "varlen", 1), ("gather", "varlen", 2), ("gather", "segments", 0)],
)
def test_a_shard_is_planned_ahead_where_its_plan_holds_no_mask(context_layout, layout, windows_ahead):
    cache, part = context_cache(context_layout, layout), shard_of_mixed()
    cache.expect(0)
    cache.expect(7)
    made = cache.prepare(part)
    assert all(tensor.dtype in (torch.int64, torch.int32) for tensor in made), "indices and lengths, no bias"
    for window in (0, 7):
        found = cache.for_sequence(part, window)
        assert flattened(found) == flattened(
            context_cache(context_layout, layout).for_sequence(shard_of_mixed(), window)
        )
        if window < 7 * windows_ahead:
            assert {id(tensor) for tensor in found.key_tokens} <= {id(tensor) for tensor in made}
    assert (cache.builds, cache.built_ahead, cache.reuses) == (2, windows_ahead, 0)
