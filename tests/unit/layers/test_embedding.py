import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.layers.embedding import build_output_head, build_token_embedding, padded_vocab_size
from megatron_glue.ops.rope import sinusoidal_table
from megatron_glue.parallel.shard_spec import get_shard_spec
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support.layer_cases import layer_build, pack, small_model
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

IDS = torch.randint(0, 100, (37,))
POSITIONS = pack("one").positions_T
CONTEXT = ForwardContext(pack("one"))


def test_vocabulary_is_padded():
    assert [padded_vocab_size(n, 128) for n in (1, 128, 129, 300)] == [128, 128, 256, 384]
    assert tuple(build_token_embedding(small_model(), 259, layer_build()).weight.shape) == (384, 32)


@pytest.mark.parametrize("kind", ["rope", "none"])
def test_without_absolute_positions_it_is_a_lookup(kind):
    embedding = build_token_embedding(small_model(position_embedding_type=kind), 100, layer_build())
    assert torch.equal(embedding(IDS, CONTEXT, torch.float32), embedding.weight[IDS])
    assert len(list(embedding.parameters())) == 1


def test_learned_positions():
    embedding = build_token_embedding(small_model(position_embedding_type="learned"), 100, layer_build())
    late = ForwardContext(PackedSequence.from_lengths([37], position_starts=[3]))
    x = embedding(IDS, late, torch.float32)
    assert_close(x, embedding.weight[IDS] + embedding.position_weight[POSITIONS + 3])
    x.sum().backward()
    assert embedding.position_weight.grad is not None
    assert not embedding.position_weight.grad[:3].any()


def test_sinusoidal_positions_from_a_table_that_is_built_once():
    embedding = build_token_embedding(small_model(position_embedding_type="sinusoidal"), 100, layer_build())
    embedding(IDS, CONTEXT, torch.float32)
    with OperatorWatch() as watch:
        x = embedding(IDS, CONTEXT, torch.float32)
    assert not {"aten::sin", "aten::cos"} & set(watch.calls)
    assert_close(x, embedding.weight[IDS] * 32**0.5 + sinusoidal_table(256, 32)[POSITIONS])
    assert list(embedding.state_dict()) == ["weight"]


@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
def test_a_table_of_unknown_length_is_named(kind):
    model = small_model(position_embedding_type=kind, max_position_embeddings=None)
    with pytest.raises(ConfigError, match="--max-position-embeddings"):
        build_token_embedding(model, 100, layer_build())


def test_compute_dtype_and_fp32_gradient():
    embedding = build_token_embedding(small_model(), 100, layer_build())
    x = embedding(IDS, CONTEXT, torch.bfloat16)
    assert x.dtype == torch.bfloat16
    x.float().sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.dtype == torch.float32


def test_output_head_is_tied_or_its_own():
    assert build_output_head(small_model(), 100, layer_build()) is None
    model = small_model(untie_embeddings_and_output_weights=True)
    head = build_output_head(model, 100, layer_build())
    assert head is not None
    assert tuple(head.weight.shape) == (128, 32)
    assert not torch.equal(head.weight, build_token_embedding(model, 100, layer_build()).weight)


def test_a_tied_head_apart_from_its_embedding_is_a_copy_with_its_name():
    model = small_model(untie_embeddings_and_output_weights=False)
    assert build_output_head(model, 100, layer_build()) is None
    head = build_output_head(model, 100, layer_build(), has_embedding=False)
    assert head is not None
    assert torch.equal(head.weight, build_token_embedding(model, 100, layer_build()).weight)
    spec = get_shard_spec(head.weight)
    assert spec is not None
    assert spec.global_name == "embedding.weight"
    own = build_output_head(
        small_model(untie_embeddings_and_output_weights=True), 100, layer_build(), has_embedding=False
    )
    assert own is not None
    assert not torch.equal(own.weight, head.weight)
