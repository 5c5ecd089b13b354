"""NVIDIA apex against torch, through a stand-in on a CPU and the library where it is; and when it can be had."""

import importlib
import inspect
from importlib.util import find_spec

import pytest
import torch

from megatron_glue.backends.apex import (
    layer_norm_apex,
    rms_norm_apex,
    why_not_apex,
    why_not_apex_norm,
    why_not_apex_optimizer,
)
from megatron_glue.backends.norm import layer_norm_torch, rms_norm_torch
from tests.support import libraries
from tests.support.tolerances import assert_close

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ROLES = ("norm", "optimizer")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 8), (0, 8)])
def test_norms_equal_torchs_with_gradients(apex_device, shape, dtype):
    x = (torch.randn(shape, device=apex_device) + 3.0).to(dtype).requires_grad_()
    weight, bias = (torch.randn(shape[-1], device=apex_device).to(dtype).requires_grad_() for _ in range(2))
    for actual, expected, inputs in (
        (rms_norm_apex(x, weight, 1e-5), rms_norm_torch(x, weight, 1e-5), (x, weight)),
        (layer_norm_apex(x, weight, bias, 1e-5), layer_norm_torch(x, weight, bias, 1e-5), (x, weight, bias)),
    ):
        assert_close(actual, expected)
        probe = torch.randn_like(expected)
        grads = (torch.autograd.grad(y, inputs, probe) for y in (actual, expected))
        for a, e in zip(*grads, strict=True):
            assert_close(a, e)


@pytest.mark.parametrize(
    ("reason_of", "reason"),
    [
        (lambda: why_not_apex_norm(CPU, torch.float32), "run on CUDA, not on cpu"),
        (lambda: why_not_apex_norm(CUDA, torch.float64), "not in torch.float64"),
        (lambda: why_not_apex_optimizer(CPU), "run on CUDA, not on cpu"),
    ],
)
def test_the_reason_is_said(reason_of, reason):
    assert reason in reason_of()


@pytest.fixture
def packages(tmp_path):
    """Write files below a folder that is searched first."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    with libraries.found_in(tmp_path):
        yield write


@pytest.mark.parametrize("role", ROLES)
def test_absent_it_is_refused(role):
    with libraries.hidden():
        reason = why_not_apex(role)
    assert "is not installed (from source, https://github.com/NVIDIA/apex; not the package apex of PyPI)" in reason


@pytest.mark.parametrize("text", ["", "import pyramid_of_another_project"])
@pytest.mark.parametrize("role", ROLES)
def test_the_package_of_that_name_on_pypi_is_recognised_without_importing_it(packages, role, text):
    packages({"apex/__init__.py": text, "apex/views.py": ""})
    assert "is not NVIDIA's but another one of that name; uninstall it" in why_not_apex(role)


@pytest.mark.parametrize("role", ROLES)
def test_without_its_cuda_extensions_it_is_refused(packages, role):
    packages({f"apex/{folder}__init__.py": "" for folder in ("", "normalization/", "optimizers/")})
    reason = why_not_apex(role)
    assert "apex cannot be used: ModuleNotFoundError: No module named" in reason
    assert "with its CUDA extensions" in reason


def test_an_old_one_is_refused(packages):
    packages(
        {
            "amp_C.py": "",
            "fused_layer_norm_cuda.py": "",
            "apex/__init__.py": "",
            "apex/normalization/__init__.py": "",
            "apex/normalization/fused_layer_norm.py": "def fused_layer_norm_affine(): ...",
            "apex/optimizers/__init__.py": "class FusedAdam:\n    def __init__(self, params, adam_w_mode=True): ...",
        }
    )
    assert why_not_apex("norm") == "this apex is too old: it lacks fused_rms_norm_affine"
    assert why_not_apex("optimizer") == "this apex is too old: it lacks FusedAdam(capturable=)"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("role", ROLES)
def test_with_the_stand_in_nothing_stands_against_it(role):
    assert why_not_apex(role) == ""


@pytest.mark.apex
@pytest.mark.skipif(find_spec("apex") is None or why_not_apex("norm") != "", reason="needs NVIDIA apex")
@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("apex.normalization.fused_layer_norm", "fused_rms_norm_affine"),
        ("apex.normalization.fused_layer_norm", "fused_layer_norm_affine"),
        ("apex.optimizers", "FusedAdam.__init__"),
        ("apex.optimizers", "FusedAdam.step"),
    ],
)
def test_the_stand_in_has_the_librarys_signatures(module, path):
    def parameters():
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return list(inspect.signature(found).parameters)

    theirs = parameters()
    with libraries.found_in(libraries.STAND_INS):
        ours = parameters()
    assert theirs == ours
