import threading

from megatron_glue.layers.cache_statistics import CacheStatistics, KindStatistics


def test_each_kind_has_its_counters_and_they_are_plain_values():
    statistics = CacheStatistics()
    statistics.miss("mask")
    statistics.hit("mask")
    statistics.hit("mask")
    statistics.miss("rows", built_ahead=True)
    statistics.evict("mask")
    for num_bytes in (100, 50, -120):
        statistics.grow("mask", num_bytes)
    assert statistics.of("mask") == KindStatistics(hits=2, misses=1, evictions=1, bytes=30, peak_bytes=150)
    assert statistics.as_dict() == {
        "mask": {"hits": 2, "misses": 1, "built_ahead": 0, "evictions": 1, "bytes": 30, "peak_bytes": 150},
        "rows": {"hits": 0, "misses": 1, "built_ahead": 1, "evictions": 0, "bytes": 0, "peak_bytes": 0},
    }
    assert statistics.of("nothing") == KindStatistics()


def test_what_one_thread_leaves_out_is_counted_for_the_others_and_bytes_always():
    statistics = CacheStatistics()
    with statistics.uncounted():
        with statistics.uncounted():
            pass
        statistics.hit("mask")
        statistics.miss("mask", built_ahead=True)
        statistics.evict("mask")
        statistics.grow("mask", 7)
        other = threading.Thread(target=statistics.hit, args=("mask",))
        other.start()
        other.join()
    statistics.miss("mask")
    assert statistics.of("mask") == KindStatistics(hits=1, misses=1, bytes=7, peak_bytes=7)


def test_counts_of_many_threads_add_up():
    statistics = CacheStatistics()

    def count():
        for _ in range(500):
            statistics.hit("mask")
            statistics.grow("mask", 2)
            statistics.grow("mask", -2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (statistics.of("mask").hits, statistics.of("mask").bytes) == (2000, 0)
