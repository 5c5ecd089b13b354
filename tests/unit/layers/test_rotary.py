import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_glue.config.errors import ConfigError
from megatron_glue.layers.cache_statistics import CacheStatistics
from megatron_glue.layers.long_lived_cache import CacheLimits, LongLivedCache
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.layers.rotary import RotaryConfig, SinusoidalConfig, position_rows, rotary_rows
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.rope import rope_table
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support.layer_cases import build_blocks, gradients, pack, run_blocks, small_model
from tests.support.operator_watch import OperatorWatch


def new_tables(tier="device", num_bytes=2**20, **kinds):
    return LongLivedCache(CacheLimits(num_bytes, tier), CacheStatistics(), **kinds)


def test_settings_come_from_the_model():
    assert RotaryConfig.of_model(small_model(rotary_base=500.0)) == RotaryConfig(256, 8, 500.0)
    assert RotaryConfig.of_model(small_model(rotary_percent=0.4)) == RotaryConfig(256, 2, 10000.0)
    assert RotaryConfig.of_model(small_model(position_embedding_type="none")) is None


def test_contradictions_are_named():
    with pytest.raises(ConfigError, match=r"--rotary-percent=0\.1"):
        RotaryConfig.of_model(small_model(rotary_percent=0.1))
    with pytest.raises(ConfigError, match="--max-position-embeddings=None"):
        RotaryConfig.of_model(small_model(max_position_embeddings=None))


def test_rows_are_those_of_the_positions():
    sequence = PackedSequence.from_lengths([3, 2], 1, position_starts=[0, 7])
    cos, sin = rotary_rows(RotaryConfig(16, 4, 100.0), sequence, new_tables())
    table_cos, table_sin = rope_table(16, 4, 100.0, "cpu")
    assert torch.equal(cos, table_cos[[0, 1, 2, 7, 8, 0]])
    assert torch.equal(sin, table_sin[[0, 1, 2, 7, 8, 0]])


def test_a_shard_looks_its_own_positions_up_and_all_ranks_refuse_those_beyond_the_tables():
    whole = PackedSequence.from_lengths([3, 9], 4, position_starts=[0, 7])
    config, tables = RotaryConfig(16, 4, 100.0), new_tables()
    for rank in range(2):
        part = whole.shard(rank, 2, 4)
        cos, sin = rotary_rows(config, part, tables)
        assert torch.equal(cos, rotary_rows(config, whole, tables)[0][part.token_ids_T])
        assert torch.equal(sin, rotary_rows(config, whole, tables)[1][part.token_ids_T])
        with pytest.raises(ValueError, match="position 15: --max-position-embeddings=15"):
            rotary_rows(RotaryConfig(15, 4, 100.0), part, tables)


def test_tables_are_built_once_and_never_per_step():
    blocks, _ = build_blocks(small_model(rotary_base=777.0))
    gradients(blocks, pack("mixed"))
    with OperatorWatch() as watch:
        gradients(blocks, pack("many short"))
    assert not {"aten::sin", "aten::cos"} & set(watch.calls)


def test_f21_tables_follow_the_device():
    config, tables = RotaryConfig(16, 4, 100.0), new_tables()
    sequence = PackedSequence.from_lengths([3])
    assert rotary_rows(config, sequence, tables)[0].device.type == "cpu"
    assert rotary_rows(config, sequence.to("meta"), tables)[0].device.type == "meta"
    assert rotary_rows(config, sequence, tables)[0].device.type == "cpu"


def rows_looked_up(*, enabled: bool, recompute: bool = False) -> int:
    """Tables gathered from in one pass over three layers."""
    blocks, cache = build_blocks(small_model(window_size=6, window_attn_skip_freq=3), enabled=enabled)
    sequence = pack("one")
    gradients(blocks, PackedSequence.from_lengths([3]))
    x = torch.randn(sequence.num_tokens, 32, requires_grad=True)
    builds, reuses = cache.builds, cache.reuses
    with OperatorWatch() as watch:
        y = x
        for block in blocks:
            context = ForwardContext(sequence)
            y = checkpoint(block, y, context, use_reentrant=False) if recompute else block(y, context)
        y.sum().backward()
    if enabled:
        # Two windows; angles are not counted among the metadata of attention.
        assert (cache.builds - builds, cache.reuses - reuses) == (2, 4 if recompute else 1)
    return watch.calls.count("aten::index_select")


def test_layers_share_the_rows_of_a_micro_batch():
    assert rows_looked_up(enabled=True) == 2
    assert rows_looked_up(enabled=True, recompute=True) == 2
    assert rows_looked_up(enabled=False) == 6
    assert rows_looked_up(enabled=False, recompute=True) == 12


def test_rows_of_other_tables_are_other_entries():
    sequence, cache = PackedSequence.from_lengths([5]), PackedMetadataCache("dense", True, HostReader())

    def rows(base):
        config, tables = RotaryConfig(16, 4, base), cache.manager.long_lived
        return cache.share(sequence, "rope_rows", config, lambda sequence: rotary_rows(config, sequence, tables))

    first, second = rows(10.0), rows(1000.0)
    assert not torch.equal(first[0], second[0])
    assert rows(10.0) is first
    assert (cache.builds, cache.reuses) == (0, 0)


def test_rows_born_in_evaluation_serve_training():
    blocks, _ = build_blocks(small_model())
    sequence = pack("mixed")
    with torch.inference_mode():
        run_blocks(blocks, torch.randn(sequence.num_tokens, 32), ForwardContext(sequence))
    gradients(blocks, sequence)


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_shared_rows_change_no_bit(qk_layernorm):
    model = small_model(rotary_percent=0.5, qk_layernorm=qk_layernorm)
    sequences = [PackedSequence.from_lengths([9, 30, 4], 3, position_starts=[0, 17, 5]) for _ in range(2)]
    on, off = (
        gradients(build_blocks(model, enabled=enabled)[0], sequence)
        for enabled, sequence in zip((True, False), sequences, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))


@pytest.mark.parametrize("limit", [2**20, 0])
@pytest.mark.parametrize("tables", [RotaryConfig(64, 8, 500.0), SinusoidalConfig(64, 12)])
def test_rows_are_the_same_bits_from_the_host_and_when_nothing_is_kept(tables, limit):
    sequence = PackedSequence.from_lengths([9, 30], 3, position_starts=[0, 17])
    expected = position_rows(tables, sequence, new_tables())
    assert all(
        torch.equal(a, b)
        for a, b in zip(position_rows(tables, sequence, new_tables("host", limit)), expected, strict=True)
    )
    (part, *_), (whole, *_) = position_rows(tables, sequence, new_tables(), slice(5, 20)), expected
    assert torch.equal(part, whole[5:20])


class MetaHost(LongLivedCache):
    """A host whose memory is not the device's: what crosses over shows."""

    def home_of(self, device):
        return torch.device("meta") if super().home_of(device) != device or self.limits.tier == "host" else device


def test_of_a_table_on_the_host_only_what_a_micro_batch_needs_comes_over(monkeypatch):
    copied = []
    to = torch.Tensor.to

    def recorded(tensor, *args, **kwargs):
        if kwargs.get("non_blocking"):
            copied.append(tuple(tensor.shape))
            return torch.zeros(tensor.shape)
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    tables, config = MetaHost(CacheLimits(2**20, "host"), CacheStatistics()), RotaryConfig(64, 8, 500.0)
    position_rows(config, PackedSequence.from_lengths([9, 5], 2, position_starts=[0, 20]), tables)
    position_rows(config, PackedSequence.from_lengths([], 4), tables)
    assert copied == [(25, 4)] * 2 + [(1, 4)] * 2


def test_rows_of_a_host_table_are_prepared_with_the_batch_and_rows_of_a_device_table_are_not():
    config = RotaryConfig(256, 8, 10000.0)
    for tier in ("device", "host"):
        cache = PackedMetadataCache("segments", True, HostReader(), limits=CacheLimits(2**20, tier))
        tables = cache.manager.long_lived

        def rows(sequence, tables=tables):
            return rotary_rows(config, sequence, tables)

        cache.expect_rows("rope_rows", config, rows)
        sequence = pack("mixed")
        made = cache.prepare(sequence)
        assert len(made) == (2 if tier == "host" else 0)
        found = cache.share(sequence, "rope_rows", config, rows)
        assert not made or found[0] is made[0]
        assert cache.manager.statistics.of("rope_rows").built_ahead == (1 if tier == "host" else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_of_a_host_table_reach_a_gpu_without_making_the_host_wait():
    config, tables = RotaryConfig(64, 8, 500.0), new_tables("host")
    sequence = PackedSequence.from_lengths([9, 30], 3, position_starts=[0, 17])
    expected = rotary_rows(config, sequence, new_tables())
    on_gpu = sequence.to("cuda")
    rotary_rows(config, on_gpu, tables)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = rotary_rows(config, on_gpu, tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
