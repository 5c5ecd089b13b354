from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.backends.attention_metadata import build_segments, effective_window
from megatron_glue.types import PackedSequence
from tests.support import oracles
from tests.support.layer_cases import PACKS, build_metadata, pack
from tests.support.operator_watch import OperatorWatch

LAYOUTS = ["segments", "varlen", "dense", "flex"]


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_of_tokens(layout, name):
    sequence = pack(name)
    metadata = build_metadata(layout, sequence)
    assert (metadata.num_tokens, metadata.num_valid_tokens) == (sequence.num_tokens, sequence.num_valid_tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=30), st.integers(0, 9))
def test_segments_hold_every_token_once_and_pad_with_their_own_last_token(lengths, num_pad):
    metadata = build_segments(lengths, num_pad, torch.device("cpu"), 0)
    num_rows = sum(number * length for number, length in metadata.pieces)
    if metadata.gather_R is None:
        assert metadata.pieces == tuple((1, length) for length in lengths)
        return
    assert metadata.row_of_token_V is not None
    gather = metadata.gather_R.tolist()
    assert len(gather) == num_rows
    assert [gather[row] for row in metadata.row_of_token_V.tolist()] == list(range(sum(lengths)))
    segment_of_token = [segment for segment, length in enumerate(lengths) for _ in range(length)]
    row = 0
    for number, length in metadata.pieces:
        for _ in range(number):
            tokens = gather[row : row + length]
            segments = {segment_of_token[token] for token in tokens}
            assert len(segments) == 1
            real = lengths[segments.pop()]
            assert tokens == [tokens[0] + min(offset, real - 1) for offset in range(length)]
            row += length


def test_short_segments_share_batches_and_long_ones_are_not_padded():
    metadata = build_segments([5, 12, 300, 20, 31, 300], 0, torch.device("cpu"), 0)
    assert sorted(metadata.pieces) == [(1, 300), (1, 300), (2, 16), (2, 32)]


@pytest.mark.parametrize("name", PACKS)
def test_varlen_boundaries(name):
    sequence = pack(name)
    metadata = build_metadata("varlen", sequence)
    boundaries = metadata.cu_seqlens.tolist()
    assert metadata.cu_seqlens.dtype == torch.int32
    assert metadata.max_seqlen == max(PACKS[name][0], default=0)
    assert isinstance(metadata.max_seqlen, int)
    # F6: the last boundary is the number of valid tokens, never of something else.
    assert boundaries[-1] == sequence.num_valid_tokens
    assert [b - a for a, b in pairwise(boundaries)] == PACKS[name][0]


@pytest.mark.parametrize("lengths", [[4, 4, 0], [1], [4, 1], [5], [0, 4, 0, 0, 4]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_f3_f9_empty_segments_are_dropped_and_boundaries_increase(layout, lengths):
    sequence = PackedSequence.from_lengths(lengths)
    metadata = build_metadata(layout, sequence)
    assert metadata.num_valid_tokens == sum(lengths)
    if layout == "varlen":
        boundaries = metadata.cu_seqlens.tolist()
        assert all(a < b for a, b in pairwise(boundaries))


@pytest.mark.parametrize("window", [0, 1, 6, 40, 41])
@pytest.mark.parametrize("name", ["many short", "one", "only padding"])
def test_f23_masks_are_the_document_and_the_window(name, window):
    sequence = pack(name)
    expected = oracles.allowed_pairs(sequence, window)
    assert torch.equal(build_metadata("dense", sequence, window).allowed_VV, expected)


def test_f4_a_window_does_not_reach_into_the_document_before():
    sequence = PackedSequence.from_lengths([64, 64])
    allowed = build_metadata("dense", sequence, 16).allowed_VV
    assert not allowed[64, 63]
    assert not allowed[64:, :64].any()
    assert allowed[79, 64:80].all()
    assert not allowed[80, 64]


def test_window_bias_of_segments_is_the_mask_inside_a_segment():
    metadata = build_segments([37, 40, 5], 0, torch.device("cpu"), 6)
    assert metadata.window_bias_LL is not None
    expected = oracles.allowed_pairs(PackedSequence.from_lengths([40]), 6)
    assert torch.equal(metadata.window_bias_LL[:40, :40] == 0, expected)
    assert build_segments([5, 6], 0, torch.device("cpu"), 6).window_bias_LL is None


def test_f7_boundaries_do_not_depend_on_positions():
    whole = PackedSequence.from_lengths([8, 5])
    chunk = PackedSequence.from_lengths([8, 5], position_starts=[5, 0])
    assert chunk.positions_T.tolist()[:8] == list(range(5, 13))
    for layout in ("segments", "varlen"):
        a, b = build_metadata(layout, whole), build_metadata(layout, chunk)
        assert (a.num_valid_tokens, getattr(a, "max_seqlen", 0)) == (b.num_valid_tokens, getattr(b, "max_seqlen", 0))
    assert torch.equal(build_metadata("dense", whole).allowed_VV, build_metadata("dense", chunk).allowed_VV)


@pytest.mark.parametrize("shape", [(3, 1, 13), (1, 13), (26,)])
def test_f6_positions_of_another_shape_are_refused(shape):
    whole = PackedSequence.from_lengths([8, 5])
    with pytest.raises(ValueError, match="13 tokens in one row"):
        PackedSequence((8, 5), 0, (0, 0), whole.segment_ids_T, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("layout", ["segments", "varlen", "dense"])
def test_f21_metadata_lies_on_the_device_of_the_sequence(layout):
    metadata = build_metadata(layout, pack("mixed").to("meta"), 7)
    tensors = [value for value in vars(metadata).values() if isinstance(value, torch.Tensor)]
    assert tensors
    assert all(tensor.device.type == "meta" for tensor in tensors)


@pytest.mark.parametrize("layout", ["segments", "varlen", "dense"])
def test_f25_building_from_host_lengths_reads_no_device_value(layout):
    sequence = pack("mixed")
    with OperatorWatch() as watch:
        build_metadata(layout, sequence, 7)
    assert watch.synchronising == []


def test_windows_that_hide_nothing_count_as_none():
    assert effective_window(5, [3, 5]) == 0
    assert effective_window(4, [3, 5]) == 4
    assert effective_window(0, [3]) == 0
    assert effective_window(4, []) == 0
