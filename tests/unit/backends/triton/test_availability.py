import importlib.util

import pytest
import torch

from megatron_glue.backends.registry import resolve
from megatron_glue.backends.triton import availability
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import BackendConfig
from tests.support.triton_kernels import kernel_device

ROLES = ("grouping", "permutation", "router")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def interpreted(monkeypatch):
    def set_to(value):
        monkeypatch.setattr(availability, "is_interpreted", lambda: value)

    return set_to


@pytest.fixture
def cuda(monkeypatch, interpreted):
    """Pretend that there is a GPU and a compiler; each role's trial run says what the dict holds."""
    interpreted(False)
    said = dict.fromkeys(ROLES, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(availability, "_run_trial", lambda role, device: said[role])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return said


def resolve_on(device, **backends):
    return resolve(BackendConfig(**backends), device, torch.float32, head_dim=64)


def names_of(backends):
    return {role: name for role, name, _ in backends.choices if role in ROLES}


def test_auto_on_a_cpu_leaves_them_alone_even_when_interpreted(interpreted):
    interpreted(True)
    backends = resolve_on("cpu")
    assert names_of(backends) == {"grouping": "numpy", "permutation": "torch", "router": "torch"}
    assert "not triton: its kernels are for CUDA, not for cpu" in backends.describe()


@pytest.mark.parametrize("role", ROLES)
def test_a_name_on_a_cpu_is_an_error_unless_interpreted(role, interpreted):
    kernel_device()
    interpreted(False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1") as caught:
        resolve_on("cpu", **{f"{role}_backend": "triton"})
    assert caught.value.field == f"--{role}-backend"
    interpreted(True)
    assert names_of(resolve_on("cpu", **{f"{role}_backend": "triton"}))[role] == "triton"


def test_auto_on_a_gpu_takes_them_where_the_trial_passes(cuda):
    pytest.importorskip("triton")
    assert names_of(resolve_on("cuda")) == dict.fromkeys(ROLES, "triton")
    cuda["router"] = "a trial run failed: RuntimeError: no C compiler"
    backends = resolve_on("cuda")
    assert names_of(backends) == {"grouping": "triton", "permutation": "triton", "router": "torch"}
    assert "router torch (not triton: a trial run failed: RuntimeError: no C compiler)" in backends.describe()
    with pytest.raises(ConfigError, match="no C compiler"):
        resolve_on("cuda", router_backend="triton")


@pytest.mark.usefixtures("cuda")
def test_auto_on_a_gpu_does_not_take_the_interpreter(interpreted):
    interpreted(True)
    assert "not triton: Triton's interpreter is on" in resolve_on("cuda").describe()


def test_reasons(monkeypatch):
    kernel_device()
    if not torch.cuda.is_available():
        assert "no CUDA device" in availability.why_not_triton("grouping", CUDA)
    assert "not on xpu" in availability.why_not_triton("grouping", torch.device("xpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in availability.why_not_triton("grouping", CPU)


@pytest.mark.parametrize("role", ROLES)
def test_trial_runs_pass_and_what_they_raise_is_the_reason(role, monkeypatch):
    device = kernel_device()
    from megatron_glue.backends.triton import trial

    assert trial.TRIALS[role](device) == ""

    def fail(device):
        raise RuntimeError("no C compiler\nlong log")

    monkeypatch.setitem(trial.TRIALS, role, fail)
    reason = availability._run_trial.__wrapped__(role, str(device))
    assert reason == "a trial run failed: RuntimeError: no C compiler"


def test_trials_notice_wrong_values(monkeypatch):
    device = kernel_device()
    from megatron_glue.backends.triton import trial

    right = trial.group_pairs
    monkeypatch.setattr(trial, "group_pairs", lambda ids, *sizes: right(ids.flip(0), *sizes))
    assert "order_N" in trial.try_grouping(device)
    monkeypatch.setattr(trial.triton_permute, "unpermute_rows", lambda y, groups, w: w.sum(1, keepdim=True) * y[:40])
    assert "other values" in trial.try_permutation(device)
    route = trial.route
    monkeypatch.setattr(trial, "route", lambda logits, *rest: route(-logits, *rest))
    assert "other values" in trial.try_router(device)
