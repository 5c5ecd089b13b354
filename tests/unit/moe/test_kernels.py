"""A whole layer, as the builder makes it, with the Triton kernels in place of operators of torch."""

import pytest
import torch

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.backends.grouped_mm import grouped_mm_torch
from megatron_glue.backends.registry import resolve
from megatron_glue.config.sections import BackendConfig, ModelConfig, MoEConfig
from megatron_glue.moe.build import MoEExecution, MoEPlacement, build_moe_layer
from megatron_glue.moe.layer import MoELayer
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support.layer_cases import layer_build
from tests.support.moe_cases import random_rows
from tests.support.tolerances import assert_close
from tests.support.triton_kernels import kernel_device

MODEL = ModelConfig(num_layers=2, hidden_size=16)


def build(name: str, scope: str = "micro-batch") -> MoELayer:
    """A layer whose three roles are all served by the backend of this name."""
    backends = resolve(
        BackendConfig(grouping_backend=name, permutation_backend=name, router_backend=name),
        kernel_device(),
        torch.float32,
        head_dim=16,
    )
    moe = MoEConfig(
        num_experts=6,
        moe_router_topk=3,
        moe_ffn_hidden_size=8,
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.01,
        moe_aux_loss_scope=scope,
        moe_router_enable_expert_bias=True,
    )
    execution = MoEExecution(
        grouped_mm_torch,
        HostReader(),
        grouping_implementation=backends.grouping,
        permutation=backends.permutation,
        router_kernel=backends.router,
    )
    return build_moe_layer(MODEL, moe, MoEPlacement(1, "blocks.1.ffn"), execution, layer_build(MODEL, seed=5)).to(
        kernel_device()
    )


def context_of(lengths: list[int], **changes) -> ForwardContext:
    sequence = PackedSequence.from_lengths(lengths, num_pad_tokens=2).to(kernel_device())
    return ForwardContext(sequence, aux_loss_scale=1.0, **changes)


def run(layer: MoELayer, lengths: list[int], *, is_recomputed: bool = False) -> tuple[dict[str, torch.Tensor], list]:
    """Output and all gradients, and what the layer logged."""
    log = []
    x = random_rows(sum(lengths) + 2, 16).detach().to(kernel_device()).requires_grad_()
    context = context_of(lengths, router_log=log)
    if is_recomputed:
        manager = ActivationManager(ActivationPlan(recompute=True), kernel_device())
        out = manager.run_block(layer, x, context)
    else:
        out = layer(x, context)
    probe = random_rows(*out.shape, seed=9).detach().to(kernel_device())
    names = ["x", *(name for name, _ in layer.named_parameters())]
    grads = torch.autograd.grad((out * probe).sum(), (x, *layer.parameters()))
    return {"out": out, **dict(zip(names, grads, strict=True))}, log


@pytest.mark.parametrize("scope", ["micro-batch", "sequence"])
@pytest.mark.parametrize("lengths", [[5, 9, 3], []], ids=["packed", "nothing but padding"])
def test_a_layer_on_kernels_equals_one_on_torch(scope, lengths):
    """Output, gradients of input, experts and router with both auxiliary losses, and the logged statistics."""
    (actual, actual_log), (expected, expected_log) = (run(build(name, scope), lengths) for name in ("triton", "torch"))
    for name, wanted in expected.items():
        assert_close(actual[name], wanted, what=name)
    for actual_record, record in zip(actual_log, expected_log, strict=True):
        assert torch.equal(actual_record.counts_E, record.counts_E)
        assert_close(actual_record.aux_loss, record.aux_loss)
        assert_close(actual_record.z_loss, record.z_loss)


def test_f50_recompute_of_a_layer_on_kernels_gives_the_same_gradients():
    plain, _ = run(build("triton"), [5, 9])
    recomputed, log = run(build("triton"), [5, 9], is_recomputed=True)
    assert len(log) == 1
    for name, wanted in plain.items():
        assert torch.equal(recomputed[name], wanted), name
