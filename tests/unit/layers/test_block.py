import pytest
import torch
from torch import nn

from megatron_glue.backends.registry import resolve
from megatron_glue.config.sections import BackendConfig
from megatron_glue.layers.block import build_decoder_block
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support.layer_cases import KERNELS, build_blocks, gradients, layer_build, pack, run_blocks, small_model
from tests.support.tolerances import assert_close


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("swiglu", [True, False])
def test_is_pre_norm_with_two_residual_branches(normalization, swiglu):
    blocks, _ = build_blocks(
        small_model(num_layers=1, normalization=normalization, swiglu=swiglu, add_bias_linear=True)
    )
    block, context = blocks[0], ForwardContext(pack("mixed"))
    x = torch.randn(context.sequence.num_tokens, 32)
    attended = x + block.attention(block.attention_norm(x), context)
    assert_close(block(x, context), attended + block.ffn(block.ffn_norm(attended), context))


def test_f1_documents_of_one_pack_do_not_see_each_other_in_the_whole_stack():
    model = small_model(hidden_dropout=0.1, attention_dropout=0.1, window_size=8, window_attn_skip_freq=2)
    blocks, _ = build_blocks(model)
    sequence = PackedSequence.from_lengths([20, 33, 18], 3)
    outs = []
    for changed in (False, True):
        x = torch.randn(74, 32, generator=torch.Generator().manual_seed(0))
        x[3] += 10.0 * changed
        outs.append(run_blocks(blocks, x, ForwardContext(sequence))[20:71])
    assert torch.equal(*outs)


def test_a_pack_equals_its_documents_one_by_one():
    blocks, _ = build_blocks(small_model())
    lengths = [5, 40, 17]
    x = torch.randn(62, 32)
    packed = run_blocks(blocks, x, ForwardContext(PackedSequence.from_lengths(lengths)))
    alone = [
        run_blocks(blocks, part, ForwardContext(PackedSequence.from_lengths([len(part)]))) for part in x.split(lengths)
    ]
    assert_close(packed, torch.cat(alone))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_f48_recompute_repeats_dropout(dropout):
    blocks, _ = build_blocks(small_model(hidden_dropout=dropout, attention_dropout=dropout / 2))
    sequence = pack("mixed")
    context = ForwardContext(sequence, seed=3, step=9, micro_batch=2)
    results = []
    for recompute in (False, True):
        blocks.zero_grad()
        x = torch.randn(sequence.num_tokens, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = x
        for block in blocks:
            if recompute:
                # preserve_rng_state=False: nothing here may depend on global generators.
                y = torch.utils.checkpoint.checkpoint(block, y, context, use_reentrant=False, preserve_rng_state=False)
                torch.rand(5)
            else:
                y = block(y, context)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in blocks.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_two_dropout_sites_of_a_layer_have_masks_of_their_own():
    block = build_blocks(small_model(num_layers=2, hidden_dropout=0.5))[0]
    context = ForwardContext(pack("one"))
    ones = torch.ones(37, 32)
    masks = [layer(ones, context) for b in block for layer in (b.attention_dropout, b.ffn_dropout)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_f11_padding_with_nan_reaches_no_gradient():
    blocks, _ = build_blocks(small_model())
    sequence = PackedSequence.from_lengths([9, 5], 4)
    x = torch.randn(18, 32, requires_grad=True)
    with torch.no_grad():
        x[14:] = float("nan")
    y = blocks[0].attention(x, ForwardContext(sequence))
    y[:14].sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad[:14]).all()
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("name", ["only padding", "nothing"])
@pytest.mark.parametrize("layout", ["segments", "dense", "flex", "varlen"])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_f26_a_micro_batch_without_valid_tokens(name, layout, normalization):
    blocks, cache = build_blocks(small_model(qk_layernorm=True, add_bias_linear=True, normalization=normalization))
    if layout != "segments":
        # Not all of them can be resolved on a CPU, but with no tokens each of them runs there.
        cache.layout = layout
        for block in blocks:
            block.attention._kernel = KERNELS[layout]
    # gradients() refuses parameters without a gradient.
    for grad in gradients(blocks, pack(name)):
        assert torch.isfinite(grad).all()
    for parameter_name, parameter in blocks.named_parameters():
        if ".attention." in parameter_name and "out_bias" not in parameter_name:
            assert not parameter.grad.any(), parameter_name


def test_the_feed_forward_is_handed_in_and_called_with_the_context():
    class Recorder(nn.Module):
        def forward(self, x, context):
            self.seen = context
            return torch.zeros_like(x)

    recorder = Recorder()
    block = build_decoder_block(small_model(), 0, recorder, layer_build())
    context = ForwardContext(pack("one"))
    block(torch.randn(37, 32), context)
    assert recorder.seen is context


def test_bf16_compute_with_fp32_masters():
    blocks, _ = build_blocks(small_model(qk_layernorm=True, add_bias_linear=True))
    sequence = pack("mixed")
    x = torch.randn(sequence.num_tokens, 32)
    expected = run_blocks(blocks, x, ForwardContext(sequence))
    # The CPU norm computes in fp32; a bf16 run resolves to torch's.
    backends = resolve(BackendConfig(), "cpu", torch.bfloat16, head_dim=8)
    for module in blocks.modules():
        if hasattr(module, "_kernel") and hasattr(module, "_epsilon"):
            module._kernel = backends.rms_norm
    actual = run_blocks(blocks, x.bfloat16(), ForwardContext(sequence))
    actual.float().sum().backward()
    assert actual.dtype == torch.bfloat16
    assert_close(actual.float(), expected, tolerance=2e-2)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in blocks.parameters())


def test_weight_names_are_stable():
    """Checkpoints and initialisation use them."""
    blocks, _ = build_blocks(small_model(num_layers=1, qk_layernorm=True, add_bias_linear=True))
    assert {name: tuple(p.shape) for name, p in blocks[0].named_parameters()} == {
        "attention_norm.weight": (32,),
        "attention.qkv_weight": (2, 4, 8, 32),
        "attention.qkv_bias": (2, 4, 8),
        "attention.out_weight": (32, 32),
        "attention.out_bias": (32,),
        "attention.q_norm.weight": (8,),
        "attention.k_norm.weight": (8,),
        "ffn_norm.weight": (32,),
        "ffn.gate_up_weight": (2, 48, 32),
        "ffn.gate_up_bias": (2, 48),
        "ffn.down_weight": (32, 48),
        "ffn.down_bias": (32,),
    }
