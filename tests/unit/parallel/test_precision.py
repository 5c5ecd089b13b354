"""The one place where a layer reads its weight: casts, their cache, and what must refresh it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.precision import Precision, local, set_unrounded, track_updates


def make_weight(rows: int = 4) -> nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(rows, 3, generator=generator))


def test_same_dtype_is_the_weight_itself() -> None:
    weight = make_weight()
    assert local(weight, torch.float32) is weight


def test_copy_is_cast_once_and_shared_by_uses() -> None:
    weight = make_weight()
    first, second = local(weight, torch.bfloat16), local(weight, torch.bfloat16)
    assert first.data_ptr() == second.data_ptr()
    assert first is not second
    torch.testing.assert_close(first, weight.detach().bfloat16(), rtol=0, atol=0)


def test_gradient_reaches_the_master_in_fp32_and_accumulates_there() -> None:
    weight = make_weight()
    for scale in (1.0, 2**-9):
        (local(weight, torch.bfloat16) * scale).float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    # 1 + 2^-9 does not fit into bf16.
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 1 + 2**-9), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["fused", "foreach", "loop"])
def test_every_kind_of_adamw_step_refreshes_the_copy(kind: str) -> None:
    weight = make_weight()
    before = local(weight, torch.bfloat16).detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=kind == "fused", foreach=kind == "foreach")
    track_updates(optimizer)
    optimizer.step()
    after = local(weight, torch.bfloat16)
    torch.testing.assert_close(after, weight.detach().bfloat16(), rtol=0, atol=0)
    assert not torch.equal(before, after)


def test_load_state_dict_refreshes_the_copy() -> None:
    layer = nn.Linear(3, 4, bias=False)
    local(layer.weight, torch.bfloat16)
    layer.load_state_dict({"weight": torch.full((4, 3), 2.0)})
    torch.testing.assert_close(local(layer.weight, torch.bfloat16), torch.full((4, 3), 2.0, dtype=torch.bfloat16))


def test_distributed_checkpoint_load_refreshes_the_copy(tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    weight = make_weight()
    dcp.save({"weight": torch.full((4, 3), 3.0)}, checkpoint_id=str(tmp_path), no_dist=True)
    local(weight, torch.bfloat16)
    dcp.load({"weight": weight}, checkpoint_id=str(tmp_path), no_dist=True)
    torch.testing.assert_close(local(weight, torch.bfloat16), torch.full((4, 3), 3.0, dtype=torch.bfloat16))


def test_replacing_data_refreshes_the_copy() -> None:
    weight = make_weight()
    local(weight, torch.bfloat16)
    weight.data = torch.full((4, 3), 5.0)
    torch.testing.assert_close(local(weight, torch.bfloat16), torch.full((4, 3), 5.0, dtype=torch.bfloat16))


def test_copy_made_under_inference_mode_serves_training_afterwards() -> None:
    weight = make_weight()
    with torch.inference_mode():
        local(weight, torch.bfloat16)
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    (local(weight, torch.bfloat16) @ x).sum().backward()
    assert weight.grad is not None


def test_writing_the_weight_between_forward_and_backward_is_an_error() -> None:
    weight = make_weight()
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    loss = (local(weight, torch.bfloat16) @ x).sum()
    with torch.no_grad():
        weight.add_(1)
    local(weight, torch.bfloat16)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_are_per_parameter_and_not_copied_along() -> None:
    layer = nn.Linear(3, 4, bias=False)
    local(layer.weight, torch.bfloat16)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert local(twin.weight, torch.bfloat16).abs().sum() == 0
    assert local(layer.weight, torch.bfloat16).abs().sum() > 0


def test_bf16_weight_can_be_read_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    local(weight, torch.float32).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_gathered_weights_are_never_cached() -> None:
    # FSDP2 refills the same low-precision tensor in every gather and hides the write from its version.
    gathered = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    local(gathered, torch.float32)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(gathered):
        gathered.fill_(2.0)
    assert local(gathered, torch.float32).sum() == 8.0


def test_precision_names() -> None:
    assert Precision.from_name("auto", "cpu").compute_dtype == torch.float32
    assert Precision.from_name("auto", "cuda").compute_dtype == torch.bfloat16
    assert Precision.from_name("bf16", "cpu").is_mixed
    assert Precision.from_name("bf16", "cpu").master_dtype == torch.float32
    with pytest.raises(ConfigError, match="--precision=fp8"):
        Precision.from_name("fp8", "cpu")


def test_a_rounded_parameter_can_be_read_unrounded() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-12])
    weight = nn.Parameter(values.bfloat16())
    assert torch.equal(local(weight, torch.float32), torch.ones(2)), "only rounded values are known"
    set_unrounded(weight, values)
    read = local(weight, torch.float32)
    assert torch.equal(read, values)
    (read * torch.tensor([2.0, 3.0])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [2.0, 3.0]
    assert local(weight, torch.bfloat16) is weight
