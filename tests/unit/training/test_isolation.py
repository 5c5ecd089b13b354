"""--prove-isolation on one process: every attention kernel, with and without a window, and leaks that it must find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_glue.backends import registry
from megatron_glue.backends.attention_metadata import METADATA_BUILDERS, build_dense, build_segments
from megatron_glue.moe.router import Router
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training import isolation
from megatron_glue.training.app import main
from megatron_glue.training.isolation import IsolationError, IsolationReport, prove_isolation
from megatron_glue.training.presets import GPT_DEFAULTS
from tests.support.cases import small_config

CPU = torch.device("cpu")
WINDOWS = pytest.mark.parametrize("window", [0, 16])
BACKENDS = pytest.mark.parametrize("backend", ["segments", "dense"])
DENSE_MODEL = {"num_experts": 0}


def prove(device: torch.device = CPU, has_gradients: bool = True, **sections: Any) -> IsolationReport:
    config = small_config("unused.jsonl", **sections)
    return prove_isolation(config, ParallelMesh(), device, has_gradients=has_gradients)


@pytest.mark.parametrize("is_cached", [False, True])
@WINDOWS
@BACKENDS
def test_a_dense_model_keeps_every_bit(backend: str, window: int, is_cached: bool) -> None:
    report = prove(
        backend={"attention_backend": backend},
        model={"window_size": window},
        moe=DENSE_MODEL,
        training={"accelerator": {"enable_metadata_cache": is_cached}},
    )
    assert (report.output_difference, report.gradient_difference, report.limit) == (0.0, 0.0, 0.0)
    assert (report.backend, report.windows, report.cp_size) == (backend, (window,), 1)
    assert report.num_changed == report.num_documents == 7
    assert report.describe() == (
        f"attention {backend}, window {window or 'none'}, cp 1: changed 7 of 7 documents one by one; the others' "
        "outputs, gradients stayed (largest difference 0, bit-equal)"
    )


@WINDOWS
@BACKENDS
def test_a_model_with_experts_keeps_its_routing(backend: str, window: int) -> None:
    report = prove(backend={"attention_backend": backend}, model={"window_size": window})
    assert report.limit == 1e-6
    assert max(report.output_difference, report.gradient_difference) <= 1e-6
    assert (report.num_rerouted, report.num_changed) == (0, 7)
    assert "outputs, gradients, routing stayed" in report.describe()


@WINDOWS
def test_flex_attention_keeps_every_bit_of_the_outputs(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tuple(
        replace(entry, why_not=lambda _: "") if entry.name == "flex" else entry for entry in registry._ATTENTION
    )
    monkeypatch.setattr(registry, "_ATTENTION", entries)
    report = prove(
        has_gradients=False,
        backend={"attention_backend": "flex"},
        model={"window_size": window},
        moe=DENSE_MODEL,
    )
    assert (report.output_difference, report.limit, report.has_gradients) == (0.0, 0.0, False)
    assert "the others' outputs stayed" in report.describe()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel runs on CUDA only")
@pytest.mark.parametrize("backend", ["varlen", "flex", "dense"])
@WINDOWS
def test_kernels_of_a_gpu(backend: str, window: int) -> None:
    report = prove(
        torch.device("cuda"),
        backend={"attention_backend": backend},
        model={"window_size": window, "hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 1},
        moe=DENSE_MODEL,
        training={"device": "cuda", "precision": "bf16"},
    )
    assert report.output_difference == 0.0
    assert report.num_changed == 7


@pytest.mark.parametrize(
    "model",
    [
        {"window_size": 500, "window_attn_skip_freq": 2, "attention_dropout": 0.2, "hidden_dropout": 0.1},
        {"position_embedding_type": "sinusoidal", "qk_layernorm": True, "window_size": 16, "window_attn_skip_freq": 1},
        {"position_embedding_type": "learned", "add_bias_linear": True, "swiglu": False, "normalization": "LayerNorm"},
    ],
)
def test_the_stand_in_has_the_attention_of_the_run(model: dict[str, Any]) -> None:
    report = prove(model=model, moe=DENSE_MODEL)
    assert report.limit == 0.0
    assert report.windows == ((0, 96) if "attention_dropout" in model else (0,))


def leaky_dense(lengths: list[int], *arguments: Any) -> Any:
    """The first token of each document but the first sees the last one of the document before."""
    metadata = build_dense(lengths, *arguments)
    starts = torch.tensor(lengths).cumsum(0)[:-1]
    metadata.allowed_VV[starts, starts - 1] = True
    return metadata


def leaky_segments(lengths: list[int], *arguments: Any) -> Any:
    """Two documents are taken for one."""
    return build_segments([lengths[0] + lengths[1], *lengths[2:]], *arguments)


def stale_dense(lengths: list[int], num_pad: int, device: torch.device, window: int, *_: Any) -> Any:
    """A mask that somebody has overwritten with the window alone."""
    metadata = build_dense(lengths, num_pad, device, window)
    rows = torch.arange(metadata.num_valid_tokens)
    metadata.allowed_VV.copy_((rows[:, None] >= rows) & (rows[:, None] - rows < window))
    return metadata


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(
    ("backend", "leak", "window"),
    [("dense", leaky_dense, 0), ("dense", stale_dense, 16), ("segments", leaky_segments, 0)],
)
def test_a_leak_is_found(backend: str, leak: Any, window: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METADATA_BUILDERS, backend, leak)
    with pytest.raises(IsolationError, match="--prove-isolation: documents of a pack are not isolated") as caught:
        prove(
            backend={"attention_backend": backend},
            model={"window_size": window},
            moe={"num_experts": experts},
            training={"accelerator": {"enable_metadata_cache": True}},
        )
    assert "outputs differ by 0," not in str(caught.value)
    assert "gradients by 0 " not in str(caught.value)


class _Leak(torch.autograd.Function):
    """Forward changes nothing; backward lets the gradient of each row reach the row before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + grads[0].roll(-1, 0)


def test_a_leak_of_gradients_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = registry.segments_attention

    def leaking(q: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        return _Leak.apply(kernel(q, *arguments, **settings))

    entries = tuple(
        replace(entry, load=lambda *_: leaking) if entry.name == "segments" else entry for entry in registry._ATTENTION
    )
    monkeypatch.setattr(registry, "_ATTENTION", entries)
    with pytest.raises(IsolationError, match="outputs differ by 0, gradients by 0\\."):
        prove(moe=DENSE_MODEL)


def test_a_router_that_looks_at_other_documents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Router._choose
    monkeypatch.setattr(Router, "_choose", lambda self, scores_TE: choose(self, scores_TE - scores_TE.mean(dim=0)))
    with pytest.raises(IsolationError, match=r"[1-9]\d* tokens went to other experts"):
        prove()


def test_a_value_that_is_no_number_is_no_proof() -> None:
    values = torch.tensor([[1.0], [float("nan")]])
    for is_compared in ([True, True], [True, False]):
        assert isolation._largest(values, values, torch.tensor(is_compared)) == float("inf")
    assert isolation._largest(values[:1], values[:1], torch.tensor([True])) == 0.0


def test_a_change_that_changes_nothing_is_no_proof() -> None:
    report = IsolationReport("dense", (0,), 1, 7, 6, False, True, 0.0, 0.0, 0, 0.0)
    assert not report.holds
    assert "changed 6 of 7" in report.describe()


def test_the_entry_point_stops_before_it_writes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METADATA_BUILDERS, "dense", leaky_dense)
    monkeypatch.chdir(tmp_path)
    code = main(GPT_DEFAULTS, ["--prove-isolation", "--attention-backend", "dense", "--device", "cpu", "--save", "run"])
    assert code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: --prove-isolation: documents of a pack are not isolated: attention dense, window none"
    )
    assert list(tmp_path.iterdir()) == []
