"""Inputs survive the disk, leave memory, overlap with compute, and failures reach the training thread."""

from __future__ import annotations

import errno
import itertools
import time
import weakref

import numpy as np
import pytest
import torch

from megatron_glue.activation import disk_tier
from megatron_glue.activation.disk_tier import MAX_PENDING_WRITES, STAGING_BYTES, DiskTier
from megatron_glue.activation.offload_file import OffloadFile
from tests.support.activation_blocks import SlowTier, no_new_threads


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(tmp_path)
    yield tier
    tier.close()


def load(tier, stored):
    buffer = tier.allocate(stored.num_bytes)
    buffer.fill_(0xFF)
    transfer = tier.load(stored, buffer, tier.mark())
    tier.wait(transfer.done, buffer)
    return stored.view(buffer)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(7, 5),
        torch.randn(3, 4).to(torch.bfloat16),
        torch.randn(33).double(),
        torch.arange(10).view(2, 5).t(),
        torch.randn(0, 8),
        torch.tensor(2.5),
        torch.randn(STAGING_BYTES // 4 + 1025),
        torch.randn(6, 4, requires_grad=True),
    ],
    ids=["fp32", "bf16", "fp64", "strided-int64", "empty", "scalar", "several-pieces", "leaf"],
)
def test_comes_back_bit_for_bit(tier, x):
    back = load(tier, tier.store(x))
    assert back.dtype == x.dtype
    assert torch.equal(back, x)
    assert back.is_contiguous()


def test_input_is_free_once_written_and_few_are_held_before(tmp_path):
    tier = SlowTier(tmp_path, write_s=0.05)
    alive = []
    for _ in range(5):
        array = np.zeros(1024, dtype=np.float32)
        x = torch.from_numpy(array)
        alive.append(weakref.ref(array))
        tier.store(x)
        del x, array
        assert sum(ref() is not None for ref in alive) <= MAX_PENDING_WRITES
    tier.settle()
    assert [ref() for ref in alive] == [None] * 5
    tier.close()


def test_f38_reload_waits_for_its_own_write(tmp_path):
    tier = SlowTier(tmp_path, write_s=0.1)
    x = torch.randn(1000)
    start = time.perf_counter()
    stored = tier.store(x.clone())
    buffer = tier.allocate(stored.num_bytes)
    transfer = tier.load(stored, buffer, tier.mark())
    assert time.perf_counter() - start < 0.1, "neither call waits"
    tier.wait(transfer.done, buffer)
    assert torch.equal(stored.view(buffer), x)
    assert tier.elapsed_ms(stored.transfer.done, transfer.started) >= 0.0
    assert tier.elapsed_ms(transfer.started, transfer.done) < 100.0, "copy time excludes the wait for the write"
    tier.close()


def test_places_are_reused(tier):
    sizes = set()
    for _ in range(3):
        stored = [tier.store(torch.randn(5000)) for _ in range(4)]
        loaded = [load(tier, item) for item in stored]
        assert all(torch.isfinite(x).all() for x in loaded)
        for item in stored:
            tier.discard(item, None)
        sizes.add(tier.held_bytes)
    assert sizes == {4 * 5 * 4096}
    assert tier.requested_bytes == 4 * 20_000


def test_a_discard_right_after_the_store_leaves_later_inputs_intact(tmp_path):
    tier = SlowTier(tmp_path, write_s=0.02)
    tier.discard(tier.store(torch.zeros(5)), None)
    x = torch.randn(5)
    assert torch.equal(load(tier, tier.store(x)), x)
    tier.close()


def test_failed_write_surfaces_in_the_next_store_and_in_the_load(tier, monkeypatch):
    def fail(self, source, offset):
        raise self._explain(OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(OffloadFile, "write", fail)
    stored = tier.store(torch.randn(10))
    buffer = tier.allocate(stored.num_bytes)
    transfer = tier.load(stored, buffer, tier.mark())
    with pytest.raises(OSError, match=r"No space left on device.*make room") as caught:
        tier.wait(transfer.done, buffer)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        tier.store(torch.randn(10))
    monkeypatch.undo()
    tier.settle()
    x = torch.randn(10)
    assert torch.equal(load(tier, tier.store(x)), x), "after a reset the tier works again"


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_ram_disk_is_warned_about(tmp_path, monkeypatch, caplog, is_in_memory):
    monkeypatch.setattr(disk_tier, "lies_in_memory", lambda folder: is_in_memory)
    DiskTier(tmp_path).close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == is_in_memory
    assert all(str(tmp_path) in line and "nothing is freed" in line and "\n" not in line for line in lines)


def test_describe_names_folder_and_kind_of_io(tier, tmp_path):
    assert str(tmp_path) in tier.describe()
    assert ("direct I/O" if tier._file.direct else "buffered I/O") in tier.describe()


def test_close_ends_threads(tmp_path):
    with no_new_threads():
        tier = DiskTier(tmp_path)
        tier.store(torch.randn(10))
        tier.close()


def test_a_copy_lasts_as_long_as_the_bound_on_its_rate_asks(tmp_path):
    tier = DiskTier(tmp_path, max_bytes_per_s=40960.0)
    x = torch.randn(1024)
    stored = tier.store(x)
    buffer = tier.allocate(stored.num_bytes)
    transfer = tier.load(stored, buffer, tier.mark())
    tier.wait(transfer.done, buffer)
    assert torch.equal(stored.view(buffer), x)
    for copy in (stored.transfer, transfer):
        assert tier.elapsed_ms(copy.started, copy.done) >= 100.0
    assert "at most 0.0390625 MiB/s each way" in tier.describe()
    tier.close()


def test_with_one_copy_in_flight_reads_and_writes_take_turns(tmp_path):
    with no_new_threads():
        tier = DiskTier(tmp_path, max_inflight=1, max_bytes_per_s=409600.0)
        copies = []
        for _ in range(3):
            stored = tier.store(torch.randn(1024))
            copies += [stored.transfer, tier.load(stored, tier.allocate(stored.num_bytes), tier.mark())]
        for earlier, later in itertools.pairwise(copies):
            assert tier.elapsed_ms(earlier.done, later.started) >= 0.0
        assert "one copy at a time" in tier.describe()
        tier.close()
