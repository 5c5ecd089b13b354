import threading

import pytest
import torch

from megatron_glue.layers.cache_statistics import CacheStatistics
from megatron_glue.layers.long_lived_cache import (
    CacheKey,
    CacheLimits,
    LongLivedCache,
    is_low_on_memory,
    storages_of,
    tensors_of,
)

CPU, META = torch.device("cpu"), torch.device("meta")


class Probe:
    """Memory of devices that runs low when a test says so."""

    def __init__(self):
        self.low = set()

    def __call__(self, device):
        return device in self.low


def new_cache(num_bytes=1000, tier="device", is_low=is_low_on_memory):
    return LongLivedCache(CacheLimits(num_bytes, tier), CacheStatistics(), is_low)


def key(parameters, device=CPU, kind="table"):
    return CacheKey(kind, parameters, device, torch.float32)


def get(cache, parameters, num_bytes=400, device=CPU):
    return cache.get(key(parameters, device), lambda: torch.zeros(num_bytes // 4, device=device))


def counters(cache, kind="table"):
    found = cache._statistics.of(kind)
    return found.hits, found.misses, found.evictions, found.bytes


def test_the_least_recently_used_gives_way_to_keep_within_the_bytes():
    cache = new_cache(1000)
    first, second = get(cache, 1), get(cache, 2)
    assert get(cache, 1) is first
    get(cache, 3)
    assert cache.num_bytes == 800
    assert get(cache, 1) is first, "used more recently than the second"
    assert get(cache, 2) is not second
    assert counters(cache) == (2, 4, 2, 800)


def test_f20_a_thousand_lengths_leave_memory_flat():
    cache = new_cache(2000)
    for length in range(1, 1001):
        get(cache, length, 4 * length)
        assert cache.num_bytes <= 2000
    assert counters(cache)[3] == cache.num_bytes
    assert cache._statistics.of("table").peak_bytes <= 2000


@pytest.mark.parametrize("limit", [0, 399])
def test_what_is_larger_than_the_bound_is_handed_out_and_not_kept(limit):
    cache = new_cache(limit)
    assert get(cache, 1) is not get(cache, 1)
    assert cache.num_bytes == 0
    assert counters(cache) == (0, 2, 0, 0)


def test_f18_every_part_of_the_key_counts():
    cache, kinds = new_cache(10_000), ("a", "b")
    keys = [
        CacheKey(kind, parameters, device, dtype)
        for kind in kinds
        for parameters in ((4, 0), (4, 1), (5, 0))
        for device in (CPU, META)
        for dtype in (torch.float32, torch.bool)
    ]
    values = [cache.get(k, lambda k=k: torch.zeros(4, dtype=k.dtype, device=k.device)) for k in keys]
    assert len({id(value) for value in values}) == len(keys)
    for k, value in zip(keys, values, strict=True):
        assert cache.get(k, lambda: None) is value
        assert (value.device, value.dtype) == (k.device, k.dtype)


def test_a_value_serves_smaller_extents_and_gives_way_to_a_larger_one():
    cache = new_cache(10_000)

    def of_extent(extent):
        return cache.get(key("band"), lambda: torch.zeros(extent), extent)

    small, large = of_extent(4), of_extent(8)
    assert (len(small), len(large)) == (4, 8)
    assert of_extent(4) is of_extent(6) is large
    assert cache.num_bytes == 32, "the smaller one is gone"
    assert counters(cache) == (2, 2, 0, 32)


def test_a_value_too_large_to_keep_leaves_the_smaller_one():
    cache = new_cache(20)
    small, large = (cache.get(key("band"), lambda n=n: torch.zeros(n), n) for n in (4, 8))
    assert len(large) == 8
    assert cache.get(key("band"), lambda: torch.zeros(0), 4) is small


def test_a_device_that_runs_low_loses_what_is_kept_there_and_keeps_nothing_new():
    probe = Probe()
    cache = new_cache(10_000, is_low=probe)
    on_meta, on_cpu = get(cache, 1, device=META), get(cache, 1)
    cache.relieve(META)
    assert get(cache, 1, device=META) is on_meta, "there is room"
    assert cache.home_of(META) == META
    probe.low.add(META)
    assert cache.home_of(META) == CPU
    cache.relieve(CPU)
    assert get(cache, 1, device=META) is on_meta, "not this device"
    cache.relieve(META)
    assert get(cache, 1, device=META) is not get(cache, 1, device=META)
    assert get(cache, 1) is on_cpu
    assert counters(cache)[2:] == (1, 400)
    probe.low.clear()
    assert get(cache, 1, device=META) is get(cache, 1, device=META)


def test_a_new_value_drops_the_others_of_a_device_that_has_run_low():
    probe = Probe()
    cache = new_cache(10_000, is_low=probe)
    get(cache, 1, device=META)
    probe.low.add(META)
    get(cache, 2, device=META)
    assert (cache.num_bytes, counters(cache)[2]) == (0, 1)


def test_a_host_tier_is_home_to_tables_of_every_device():
    assert new_cache(tier="host").home_of(META) == CPU
    assert new_cache().home_of(META) == META


def test_threads_that_want_the_same_value_build_it_once():
    cache, built, found = new_cache(), [], []
    barrier = threading.Barrier(4)

    def build():
        built.append(1)
        return torch.zeros(4)

    def work():
        barrier.wait(30)
        found.extend(cache.get(key(1), build) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len({id(value) for value in found}) == 1


def test_a_value_born_in_evaluation_serves_training():
    cache = new_cache()
    with torch.inference_mode():
        value = get(cache, 1)
    assert not value.is_inference()


def test_memory_is_counted_once_however_many_tensors_view_it():
    base = torch.zeros(10)
    assert sum(storages_of((base, base[:3], base.view(2, 5))).values()) == 40
    cache = new_cache()
    kept = get(cache, 1)
    assert all(map(cache.owns, storages_of(kept[:2])))
    assert not any(map(cache.owns, storages_of(base)))
    assert [len(tensor) for tensor in tensors_of((base, (base[:3],), "text"))] == [10, 3]


def test_a_cpu_never_runs_low():
    assert not is_low_on_memory(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_stream_waits_for_the_one_that_built_a_value():
    device = torch.empty(0, device="cuda").device
    cache, side = new_cache(2**30), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        cache.get(key("slow", device), lambda: torch.full((1 << 20,), 3.0, device=device))
    total = cache.get(key("slow", device), lambda: torch.zeros(1, device=device)).sum()
    assert float(total) == 3.0 * (1 << 20)
