"""Transformer Engine against torch, through a stand-in on a CPU and the library where it is; and when it can be had."""

import importlib
import inspect
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from megatron_glue.backends.attention_dense import dense_attention
from megatron_glue.backends.norm import layer_norm_torch, rms_norm_torch
from megatron_glue.backends.transformer_engine import (
    TransformerEngineAttention,
    TransformerEngineMatMul,
    layer_norm_te,
    rms_norm_te,
    why_not_importable,
    why_not_te_attention,
    why_not_te_matmul,
    why_not_te_norm,
    why_not_te_optimizer,
)
from megatron_glue.layers.build import LayerBuild
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.matmul import TORCH_MATMUL, linear
from megatron_glue.parallel.mesh import ParallelMesh
from tests.support import libraries
from tests.support.layer_cases import (
    PACKS,
    build_blocks,
    build_metadata,
    gradients,
    layer_build,
    pack,
    random_qkv,
    small_model,
)
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SCALE = 8**-0.5


def compare(actual, expected, inputs):
    """Values and gradients of all inputs."""
    assert_close(actual, expected)
    probe = torch.randn_like(expected)
    grads = (
        torch.autograd.grad(y, inputs, probe, allow_unused=True, materialize_grads=True) for y in (actual, expected)
    )
    for index, (a, e) in enumerate(zip(*grads, strict=True)):
        assert_close(a, e, what=f"gradient {index}")


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("name", PACKS)
def test_attention_equals_dense_with_gradients(te_device, name, window):
    sequence = pack(name).to(te_device)
    dtype = torch.float32 if te_device == CPU else torch.bfloat16
    qkv = [x.detach().to(te_device, dtype).requires_grad_() for x in random_qkv(sequence.num_tokens)]
    attend = TransformerEngineAttention()
    for _ in range(2):
        actual = attend(*qkv, build_metadata("te", sequence), window=window, scale=SCALE, dropout=None)
    expected = dense_attention(
        *qkv, build_metadata("dense", sequence, window), window=window, scale=SCALE, dropout=None
    )
    compare(actual, expected, qkv)


@pytest.mark.usefixtures("stand_ins")
def test_attention_makes_one_module_for_all_layers_of_a_kind():
    attend, sequence = TransformerEngineAttention(), pack("mixed")
    for window in (0, 0, 7, 7):
        qkv = random_qkv(sequence.num_tokens)
        attend(*qkv, build_metadata("te", sequence), window=window, scale=SCALE, dropout=None)
    assert len(attend._modules) == 2


def test_f11_padding_reaches_nothing_and_gets_zeros(te_device):
    sequence = pack("mixed").to(te_device)
    valid, dtype = sequence.num_valid_tokens, torch.float32 if te_device == CPU else torch.bfloat16
    qkv = [x.detach().to(te_device, dtype) for x in random_qkv(sequence.num_tokens)]
    for x in qkv:
        x[valid:] = float("nan")
        x.requires_grad_()
    metadata = build_metadata("te", sequence)
    out = TransformerEngineAttention()(*qkv, metadata, window=0, scale=SCALE, dropout=None)
    assert not out[valid:].any()
    grads = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert all(torch.isfinite(grad).all() and not grad[valid:].any() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 8), (0, 8)])
def test_norms_equal_torchs_with_gradients(te_device, shape, dtype):
    x = (torch.randn(shape, device=te_device) + 3.0).to(dtype).requires_grad_()
    weight, bias = (torch.randn(shape[-1], device=te_device).to(dtype).requires_grad_() for _ in range(2))
    compare(rms_norm_te(x, weight, 1e-5), rms_norm_torch(x, weight, 1e-5), (x, weight))
    compare(layer_norm_te(x, weight, bias, 1e-5), layer_norm_torch(x, weight, bias, 1e-5), (x, weight, bias))


def test_norms_of_strided_rows_and_expanded_gradients(te_device):
    x = torch.randn(8, 6, device=te_device).t().requires_grad_()
    weight, bias = (torch.randn(8, device=te_device, requires_grad=True) for _ in range(2))
    for actual, expected in (
        (rms_norm_te(x, weight, 1e-5), rms_norm_torch(x, weight, 1e-5)),
        (layer_norm_te(x, weight, bias, 1e-5), layer_norm_torch(x, weight, bias, 1e-5)),
    ):
        assert_close(torch.autograd.grad(actual.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


def small_integers(*shape, device):
    """Integers whose products and sums bf16 holds exactly."""
    return torch.randint(-2, 3, shape, device=device).to(torch.bfloat16)


@pytest.mark.parametrize("is_strided", [False, True])
def test_products_are_those_of_torch(te_device, is_strided):
    def operand(rows, columns):
        x = small_integers(columns, rows, device=te_device)
        return x.t() if is_strided else x.t().contiguous()

    matmul, bias = TransformerEngineMatMul(), small_integers(24, device=te_device)
    a_MK, b_NK, b_KN, a_KM = operand(16, 8), operand(24, 8), operand(8, 24), operand(8, 16)
    assert torch.equal(matmul.nt(a_MK, b_NK, bias), TORCH_MATMUL.nt(a_MK, b_NK, bias))
    assert torch.equal(matmul.nt(a_MK, b_NK), TORCH_MATMUL.nt(a_MK, b_NK))
    assert torch.equal(matmul.nn(a_MK, b_KN), TORCH_MATMUL.nn(a_MK, b_KN))
    assert torch.equal(matmul.tn(a_KM, b_KN), TORCH_MATMUL.tn(a_KM, b_KN))
    for dtype in (torch.float32, torch.bfloat16):
        sums = [torch.ones(16, 24, dtype=dtype, device=te_device) for _ in range(2)]
        matmul.add_tn_(sums[0], a_KM, b_KN)
        TORCH_MATMUL.add_tn_(sums[1], a_KM, b_KN)
        assert torch.equal(*sums)
        assert sums[0].any()


def test_products_that_the_library_would_get_wrong_are_torchs(te_device):
    """fp32 would be rounded to TF32; nothing to multiply, and sums with strides, it does not take."""
    matmul = TransformerEngineMatMul()
    a, b = torch.randn(4, 3, device=te_device), torch.randn(5, 3, device=te_device)
    assert torch.equal(matmul.nt(a, b), TORCH_MATMUL.nt(a, b))
    empty = small_integers(0, 3, device=te_device)
    assert matmul.tn(empty, small_integers(0, 4, device=te_device)).shape == (3, 4)
    total = torch.ones(4, 3, dtype=torch.float32, device=te_device).t()
    a, b = small_integers(6, 3, device=te_device), small_integers(6, 4, device=te_device)
    matmul.add_tn_(total, a, b)
    assert torch.equal(total, 1 + (a.t() @ b).float())


def test_a_linear_map_has_torchs_gradients(te_device):
    x, weight, bias = (small_integers(*shape, device=te_device) for shape in ((6, 8), (4, 8), (4,)))
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    compare(linear(*inputs, TransformerEngineMatMul()), linear(*inputs, TORCH_MATMUL), inputs)


@pytest.mark.usefixtures("stand_ins")
def test_blocks_have_the_gradients_of_the_default_kernels():
    for kind in ("RMSNorm", "LayerNorm"):
        model = small_model(window_size=9, qk_layernorm=True, normalization=kind)
        plain = layer_build(model)
        backends = replace(
            plain.backends,
            attention=TransformerEngineAttention(),
            attention_layout="te",
            rms_norm=rms_norm_te,
            layer_norm=layer_norm_te,
            matmul=TransformerEngineMatMul(),
        )
        ours = LayerBuild(backends, PackedMetadataCache("te", True, HostReader()), 7, ParallelMesh())
        results = [gradients(build_blocks(model, build)[0], pack("mixed")) for build in (plain, ours)]
        for index, (expected, actual) in enumerate(zip(*results, strict=True)):
            assert_close(actual, expected, what=f"{kind} {index}")


def test_metadata_is_built_once_and_ahead():
    cache, sequence = PackedMetadataCache("te", True, HostReader()), pack("mixed")
    cache.expect(0)
    cache.expect(7)
    with OperatorWatch() as watch:
        assert cache.prepare(sequence)
        assert cache.for_sequence(sequence, 7) is cache.for_sequence(sequence)
    assert watch.synchronising == []
    assert cache.builds == 1


@pytest.mark.parametrize(
    ("reason_of", "reason"),
    [
        (lambda: why_not_te_attention(CPU, torch.bfloat16, 64, 0.0), "run on CUDA, not on cpu"),
        (lambda: why_not_te_attention(CUDA, torch.float32, 64, 0.0), "bf16 or fp16, not in torch.float32"),
        (lambda: why_not_te_attention(CUDA, torch.bfloat16, 60, 0.0), "a multiple of 8 up to 256, not of 60"),
        (lambda: why_not_te_attention(CUDA, torch.bfloat16, 64, 0.1), "does not depend on positions alone"),
        (lambda: why_not_te_norm(CPU, torch.bfloat16), "run on CUDA, not on cpu"),
        (lambda: why_not_te_norm(CUDA, torch.float64), "not in torch.float64"),
        (lambda: why_not_te_matmul(CPU, torch.bfloat16), "run on CUDA, not on cpu"),
        (lambda: why_not_te_matmul(CUDA, torch.float32), "fp32 in TF32"),
        (lambda: why_not_te_optimizer(CPU), "run on CUDA, not on cpu"),
    ],
)
def test_the_reason_is_said(reason_of, reason):
    assert reason in reason_of()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        # As the package on PyPI behaves where the wheel for this CUDA is missing.
        (
            {"__init__": "raise RuntimeError('no shared object file\\nmore')"},
            "Transformer Engine cannot be imported: RuntimeError: no shared object file",
        ),
        (
            {"__init__": "__version__ = '2.11.0'", "pytorch": "import transformer_engine_of_another_cuda"},
            "Transformer Engine cannot be imported: ModuleNotFoundError: "
            "No module named 'transformer_engine_of_another_cuda'",
        ),
        (
            {"__init__": "__version__ = '2.9.0'", "pytorch": ""},
            "Transformer Engine 2.9.0 is too old: it must be 2.10 or newer",
        ),
        ({"__init__": "__version__ = '10.0.dev0+local'", "pytorch": ""}, ""),
    ],
)
def test_broken_or_old_it_is_refused_with_the_reason(tmp_path, files, reason):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine_torch.py").write_text("")
    for name, text in files.items():
        (tmp_path / "transformer_engine" / f"{name}.py").write_text(text)
    with libraries.found_in(tmp_path):
        assert why_not_importable() == reason


def test_absent_it_is_refused_with_the_command_to_install_it():
    with libraries.hidden():
        reason = why_not_importable()
    assert "is not installed (pip install --no-build-isolation 'transformer-engine[pytorch]'" in reason


@pytest.mark.usefixtures("stand_ins")
def test_with_the_stand_in_nothing_stands_against_it():
    assert why_not_te_attention(CUDA, torch.bfloat16, 64, 0.0) == ""
    assert why_not_te_norm(CUDA, torch.float32) == ""
    assert why_not_te_matmul(CUDA, torch.bfloat16) == ""
    assert why_not_te_optimizer(CUDA) == ""


@pytest.mark.te
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")
class TestSignatures:
    """Every parameter that the stand-in takes, in the same order, is one of the library's."""

    @pytest.mark.parametrize(
        ("module", "path"),
        [
            ("transformer_engine.pytorch", "DotProductAttention.__init__"),
            ("transformer_engine.pytorch", "DotProductAttention.forward"),
            ("transformer_engine.pytorch.cpp_extensions", "general_gemm"),
            ("transformer_engine.pytorch.optimizers", "FusedAdam.__init__"),
            ("transformer_engine.pytorch.optimizers", "FusedAdam.step"),
        ],
    )
    def test_of_python_functions(self, module, path):
        def parameters():
            found = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            return list(inspect.signature(found).parameters)

        theirs = parameters()
        with libraries.found_in(libraries.STAND_INS):
            ours = parameters()
        assert set(ours) <= set(theirs)
        assert [name for name in theirs if name in ours] == ours

    @pytest.mark.parametrize(
        ("function", "names"),
        [
            ("rmsnorm_fwd", "input weight eps ln_out quantizer otype sm_margin zero_centered_gamma"),
            ("layernorm_fwd", "input weight bias eps ln_out quantizer otype sm_margin zero_centered_gamma"),
        ],
    )
    def test_of_compiled_functions(self, function, names):
        """Their docstrings begin with the signature; backward functions have no names in it."""
        importlib.import_module("transformer_engine.pytorch")
        text = getattr(importlib.import_module("transformer_engine_torch"), function).__doc__
        places = [text.find(f"{name}:") for name in names.split()]
        assert -1 not in places
        assert places == sorted(places)
