"""Optional libraries for tests of their backends: stand-ins on a CPU, and the real ones on a GPU where installed."""

from importlib.util import find_spec

import pytest
import torch

from tests.support import libraries


@pytest.fixture
def stand_ins():
    """Let imports of Transformer Engine and apex find their stand-ins."""
    with libraries.found_in(libraries.STAND_INS):
        yield


def _device_of(request, name):
    if request.param == "stand-in":
        request.getfixturevalue("stand_ins")
        return torch.device("cpu")
    if find_spec(name) is None or not torch.cuda.is_available():
        pytest.skip(f"needs {name} and a CUDA device")
    return torch.device("cuda")


@pytest.fixture(params=["stand-in", pytest.param("library", marks=[pytest.mark.te, pytest.mark.gpu])])
def te_device(request):
    """Where to compute with Transformer Engine."""
    return _device_of(request, "transformer_engine")


@pytest.fixture(params=["stand-in", pytest.param("library", marks=[pytest.mark.apex, pytest.mark.gpu])])
def apex_device(request):
    """Where to compute with apex."""
    return _device_of(request, "apex")
