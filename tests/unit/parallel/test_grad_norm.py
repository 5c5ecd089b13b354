"""Norm and clipping in one process. Several ranks: tests/distributed/parallel/test_data_parallel.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_glue.parallel.grad_norm import clip_gradients, global_grad_norm, num_replicas, scaled_loss
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec

MESH = ParallelMesh()


def make_params(*gradients: list[float] | None) -> list[nn.Parameter]:
    params = []
    for values in gradients:
        param = nn.Parameter(torch.zeros(len(values or [0.0])))
        param.grad = None if values is None else torch.tensor(values)
        params.append(param)
    return params


class NoHostRead(TorchDispatchMode):
    """Fails on any read of a tensor's value by the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a device value was read on the host"
        return func(*args, **(kwargs or {}))


def test_norm_of_all_gradients() -> None:
    assert global_grad_norm(make_params([3.0, 0.0], None, [4.0]), MESH).item() == 5.0
    assert global_grad_norm([], MESH).item() == 0.0


def test_clipping_scales_down_and_never_up() -> None:
    params = make_params([3.0], [4.0])
    assert clip_gradients(params, 1.0, MESH).item() == 5.0
    torch.testing.assert_close(global_grad_norm(params, MESH), torch.tensor(1.0))
    clip_gradients(params, 100.0, MESH)
    torch.testing.assert_close(global_grad_norm(params, MESH), torch.tensor(1.0))


def test_zero_means_measure_only() -> None:
    params = make_params([3.0], [4.0])
    assert clip_gradients(params, 0.0, MESH).item() == 5.0
    assert params[1].grad is not None
    assert params[1].grad.item() == 4.0


def test_zero_gradients_stay_zero() -> None:
    params = make_params([0.0])
    clip_gradients(params, 1.0, MESH)
    assert params[0].grad is not None
    assert params[0].grad.item() == 0.0


def test_f113_nan_shows_in_the_norm() -> None:
    assert torch.isnan(clip_gradients(make_params([float("nan")], [1.0]), 1.0, MESH))


def test_f25_norm_and_clipping_read_nothing_on_the_host() -> None:
    params = make_params([3.0], [4.0])
    with NoHostRead():
        clip_gradients(params, 1.0, MESH)


def test_replicas_follow_from_the_layout() -> None:
    mesh = ParallelMesh(world_size=8, sizes={"stage": 8, "dp": 8, "ep": 4, "edp": 2})
    dense, expert = make_params([1.0], [1.0])
    set_shard_spec(expert, ShardSpec("experts", (4,), (("ep", 0),)))
    assert num_replicas(dense, mesh) == 8
    assert num_replicas(expert, mesh) == 2


@pytest.mark.parametrize("value", [3.7, -1e-30, torch.inf, -torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_spoils_every_gradient_and_a_finite_one_keeps_its_bits(value: float) -> None:
    x, scale = torch.tensor(value, requires_grad=True), 1.0 / 1537
    loss = scaled_loss(x, scale)
    loss.backward()
    assert x.grad is not None
    if torch.isfinite(x):
        assert torch.equal(loss, x * scale)
        assert torch.equal(x.grad, torch.tensor(scale))
    else:
        assert torch.isnan(x.grad)
