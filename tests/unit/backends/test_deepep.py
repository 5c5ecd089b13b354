"""When DeepEP can be had, and that the library's calls are those that the code makes."""

import importlib
import inspect
import sys
from importlib.util import find_spec

import pytest
import torch

from megatron_glue.backends.deepep import why_not_deepep
from tests.support import deep_ep_stand_in

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "num_replicas", "reason"),
    [
        ("cpu", torch.bfloat16, 1, "run on CUDA, not on cpu"),
        ("cuda", torch.float32, 1, "bf16, not torch.float32"),
        ("cuda", torch.bfloat16, 2, "experts are split"),
    ],
)
def test_the_reason_is_said(device, dtype, num_replicas, reason):
    assert reason in why_not_deepep(torch.device(device), dtype, num_replicas)


def test_a_missing_library_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "deep_ep cannot be imported" in why_not_deepep(CUDA, torch.bfloat16, 1)


@pytest.mark.skipif(find_spec("deep_ep") is None, reason="needs the library deep_ep")
@pytest.mark.parametrize("name", ["get_dispatch_layout", "dispatch", "combine", "__init__"])
def test_the_stand_in_has_the_librarys_signatures(name):
    """Every parameter that the stand-in takes, in the same order, is one of the library's."""
    library = importlib.import_module("deep_ep").Buffer
    theirs = list(inspect.signature(getattr(library, name)).parameters)
    ours = list(inspect.signature(getattr(deep_ep_stand_in.Buffer, name)).parameters)
    assert set(ours) <= set(theirs)
    assert [parameter for parameter in theirs if parameter in ours] == ours


@pytest.mark.skipif(find_spec("deep_ep") is None, reason="needs the library deep_ep")
def test_the_library_has_the_configurations_that_buffers_are_sized_by():
    library = importlib.import_module("deep_ep").Buffer
    for config in (library.get_dispatch_config(8), library.get_combine_config(8)):
        assert config.get_nvl_buffer_size_hint(8192, 8) > 0
        assert config.get_rdma_buffer_size_hint(8192, 8) >= 0
