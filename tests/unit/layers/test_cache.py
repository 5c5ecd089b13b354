import gc
import threading
from dataclasses import replace

import pytest
import torch

from megatron_glue.backends.attention_masks import CausalBand, build_band
from megatron_glue.layers.cache import BAND, CacheManager
from megatron_glue.layers.long_lived_cache import CacheKey, CacheLimits
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import PackedSequence
from tests.support.layer_cases import build_blocks, gradients, pack, small_model

CPU = torch.device("cpu")
KEY = CacheKey("thing", 1, CPU)


def band(num_queries, window=3, dtype=torch.float32, num_keys=None, distance=0):
    return CausalBand(num_queries, num_keys or num_queries, distance, window, dtype, CPU)


def counters(manager, kind):
    found = manager.statistics.of(kind)
    return found.hits, found.misses


def test_what_belongs_to_a_micro_batch_is_built_once_and_its_memory_is_counted_until_it_dies():
    manager, sequence = CacheManager(True), pack("mixed")
    first = manager.of_batch(sequence, KEY, lambda: torch.zeros(10))
    assert manager.of_batch(sequence, KEY, lambda: torch.zeros(10)) is first
    assert manager.of_batch(pack("mixed"), KEY, lambda: torch.zeros(5)) is not first
    gc.collect()
    assert counters(manager, "thing") == (1, 2)
    assert (manager.statistics.of("thing").bytes, manager.statistics.of("thing").peak_bytes) == (40, 60)
    sequence.cache_entries.clear()
    assert manager.statistics.of("thing").bytes == 0


def test_off_builds_in_every_call_and_keeps_nothing():
    manager, sequence = CacheManager(False), pack("mixed")
    assert manager.of_batch(sequence, KEY, lambda: torch.zeros(1)) is not manager.of_batch(
        sequence, KEY, lambda: torch.zeros(1)
    )
    assert manager.prepare(sequence, KEY, lambda: torch.zeros(1)) == []
    assert torch.equal(manager.band(band(5)), build_band(band(5)))
    assert manager.band(band(5)) is not manager.band(band(5))
    assert not sequence.cache_entries
    assert manager.long_lived.num_bytes == 0


def test_a_prepared_value_is_counted_when_somebody_asks_for_it():
    manager, sequence = CacheManager(True), pack("mixed")
    made = manager.prepare(sequence, KEY, lambda: (torch.zeros(2), torch.ones(3)))
    assert [len(tensor) for tensor in made] == [2, 3]
    assert manager.prepare(sequence, KEY, lambda: torch.zeros(2)) == []
    assert counters(manager, "thing") == (0, 0)
    assert manager.of_batch(sequence, KEY, lambda: None)[0] is made[0]
    assert counters(manager, "thing") == (0, 1)
    assert manager.statistics.of("thing").built_ahead == 1


def test_memory_that_others_own_is_not_counted_again():
    manager, sequence = CacheManager(True), pack("mixed")
    template = manager.band(band(8))
    manager.of_batch(sequence, KEY, lambda: (template[:4, :4], sequence.positions_T[:3], torch.zeros(1)))
    assert manager.statistics.of("thing").bytes == 4


def test_f16_a_changed_layout_starts_without_entries():
    manager, sequence = CacheManager(True), PackedSequence.from_lengths([3, 5])
    manager.of_batch(sequence, KEY, lambda: sequence.lengths)
    other = replace(sequence, lengths=(5, 3))
    assert manager.of_batch(other, KEY, lambda: other.lengths) == (5, 3)


@pytest.mark.parametrize("window", [0, 3, 200])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_shared_bands_hold_the_values_of_their_own(dtype, window):
    manager = CacheManager(True)
    for wanted in (
        band(5, window, dtype),
        band(300, window, dtype),
        band(140, window, dtype),
        band(4, window, dtype, num_keys=9, distance=5),
        band(0, window, dtype),
    ):
        assert torch.equal(manager.band(wanted), build_band(wanted))


def test_micro_batches_of_any_length_share_one_window_mask():
    cache = PackedMetadataCache("segments", True, HostReader())
    for lengths in ([300], [40, 260], [150, 7], [299, 1]):
        cache.for_sequence(PackedSequence.from_lengths(lengths), 20)
    assert counters(cache.manager, BAND) == (3, 1)
    assert cache.manager.long_lived.num_bytes == 4 * 384**2
    dense = PackedMetadataCache("dense", True, HostReader())
    for length in (120, 100, 5):
        dense.for_sequence(PackedSequence.from_lengths([length, 8]))
    assert counters(dense.manager, BAND) == (2, 1)


@pytest.mark.parametrize(("layout", "context_layout"), [("segments", ""), ("dense", ""), ("segments", "gather")])
def test_f20_a_thousand_distinct_lengths_leave_memory_flat(layout, context_layout):
    limits = CacheLimits(num_bytes=2**18)
    cache = PackedMetadataCache(layout, True, HostReader(), context_layout, limits)
    for length in range(1, 1001):
        sequence = PackedSequence.from_lengths([length % 250 + 1, 3], 8 + -length % 4)
        if context_layout:
            whole = PackedSequence.from_lengths([length % 250 + 1, 3], 512 - length % 250 - 4)
            sequence = whole.shard(length % 2, 2, 4)
        cache.for_sequence(sequence, 7)
        assert cache.manager.long_lived.num_bytes <= limits.num_bytes
    del sequence
    gc.collect()
    statistics = cache.manager.statistics
    assert statistics.of("attention_metadata").misses == 1000
    assert statistics.of("attention_metadata").bytes == 0, "gone with their micro-batches"
    assert statistics.of(BAND).bytes == cache.manager.long_lived.num_bytes


def test_f23_nobody_writes_to_a_shared_mask():
    model = small_model(window_size=6, window_attn_skip_freq=2, num_layers=4)
    for layout in ("segments", "dense"):
        blocks, cache = build_blocks(model, layout=layout)
        for name in ("mixed", "many short", "mixed"):
            gradients(blocks, pack(name))
        for kept_key, kept in cache.manager.long_lived._kept.items():
            if kept_key.kind == BAND:
                size = kept.extent
                whole = CausalBand(size, size, 0, kept_key.parameters, kept_key.dtype, CPU)
                assert torch.equal(kept.value, build_band(whole))


def test_low_memory_changes_no_bit_and_leaves_nothing_behind():
    model = small_model(window_size=6)
    expected = gradients(build_blocks(model)[0], pack("mixed"))
    blocks, cache = build_blocks(model)
    gradients(blocks, pack("many short"))
    assert cache.manager.long_lived.num_bytes > 0
    cache.manager.long_lived._is_low = lambda device: True
    assert all(torch.equal(a, b) for a, b in zip(gradients(blocks, pack("mixed")), expected, strict=True))
    assert cache.manager.long_lived.num_bytes == 0
    assert cache.manager.statistics.of(BAND).evictions == 1


def test_one_thread_prepares_while_another_trains():
    model = small_model(window_size=6, window_attn_skip_freq=2)
    blocks, cache = build_blocks(model)
    expected = gradients(blocks, pack("mixed"))
    packs = [pack("mixed") for _ in range(12)]
    failures = []

    def prepare():
        try:
            for sequence in packs:
                cache.prepare(sequence)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    while thread.is_alive():
        assert all(torch.equal(a, b) for a, b in zip(gradients(blocks, pack("mixed")), expected, strict=True))
    thread.join()
    assert not failures
    for sequence in packs:
        assert all(torch.equal(a, b) for a, b in zip(gradients(blocks, sequence), expected, strict=True))
    assert cache.built_ahead == len(packs)
