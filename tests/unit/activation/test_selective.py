"""Chosen modules are computed again with the same bits, and what they keep is gone between forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_glue.activation import ActivationManager, ActivationPlan
from tests.support.activation_blocks import context_of, gradients_of, run_forward
from tests.support.activation_variants import assert_same, inputs, plain_gradients
from tests.support.alive_storages import AliveStorages

DIM = 16  # that of inputs()
MODULES = ("core_attn", "mlp", "layernorm")


class SelectiveBlock(nn.Module):
    """A stretch of three inputs, one of a norm's result, with draws from torch's generator and from the decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.ffn_norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)
        self.runs = []

    def attend(self, q_TD, k_TD, v_TD, context):
        self.runs.append(("core_attn", context.is_recompute))
        return F.dropout(torch.softmax(q_TD @ k_TD.t(), -1), 0.3, training=True) @ v_TD

    def transform(self, x_TD, context):
        self.runs.append(("mlp", context.is_recompute))
        if context.decisions is not None and not context.is_recompute:
            context.decisions.put("scale", 3.0)
        scale = 3.0 if context.decisions is None else context.decisions.get("scale")
        return self.down(F.gelu(self.up(x_TD)) * scale)

    def forward(self, x_TD, context):
        with context.rebuilt("layernorm", self.norm, x_TD) as normed_TD:
            q, k, v = self.qkv(normed_TD).unflatten(1, (3, DIM)).unbind(1)
            x_TD = x_TD + context.recompute("core_attn", self.attend, q, k, v)
        with context.rebuilt("layernorm", self.ffn_norm, x_TD) as normed_TD:
            return x_TD + context.recompute("mlp", self.transform, normed_TD)


def blocks_of(num):
    torch.manual_seed(0)
    return nn.ModuleList(SelectiveBlock() for _ in range(num))


def manager_of(*modules, **fields):
    return ActivationManager(ActivationPlan(recompute_modules=frozenset(modules), **fields), "cpu")


@pytest.mark.parametrize("modules", [(), *((name,) for name in MODULES), ("layernorm", "mlp"), MODULES])
def test_gradients_are_equal_bit_for_bit(modules):
    blocks, micro_batches = blocks_of(3), inputs(2)
    torch.manual_seed(5)
    expected = [plain_gradients(blocks, micro_batches) for _ in range(2)]
    torch.manual_seed(5)
    manager = manager_of(*modules)
    for block in blocks:
        block.runs.clear()
    for step in range(2):
        for index, x in enumerate(micro_batches):
            run_forward(manager, blocks, x, index).square().sum().backward()
        assert_same(gradients_of(blocks), expected[step])
    for name in ("core_attn", "mlp"):
        again = [is_recompute for module, is_recompute in blocks[0].runs if module == name]
        assert again == [False, True] * 4 if name in modules else [False] * 4


def kept_bytes(modules, num_tokens=64):
    """Memory alive behind a forward pass of one block."""
    (block,) = blocks_of(1)
    x = torch.randn(num_tokens, DIM, requires_grad=True)
    with AliveStorages() as alive:
        y = manager_of(*modules).run_block(block, x, context_of(num_tokens=num_tokens))
        num_bytes = alive.num_bytes
    del y
    return num_bytes


def test_what_is_recomputed_is_not_kept():
    """A norm keeps its result [T, D], attention its weights [T, T], the feed-forward [T, 4 D] twice."""
    num_tokens, row_bytes = 64, 4 * DIM
    everything = kept_bytes((), num_tokens)
    saved = {name: everything - kept_bytes((name,), num_tokens) for name in MODULES}
    assert saved["layernorm"] == 2 * num_tokens * row_bytes
    assert saved["core_attn"] >= 2 * 4 * num_tokens**2
    assert saved["mlp"] == 2 * num_tokens * 4 * row_bytes
    together = everything - kept_bytes(MODULES, num_tokens)
    assert together == sum(saved.values()), "the feed-forward keeps a note of its norm's result, not the result"


def test_memory_that_was_computed_again_is_freed_in_backward():
    blocks, (x,) = blocks_of(2), inputs(1)
    manager = manager_of(*MODULES)
    loss = run_forward(manager, blocks, x).square().sum()
    with AliveStorages() as alive:
        loss.backward()
        gradients_of(blocks)
        assert alive.num_bytes == 0, "with the graph still alive"
    del loss


@pytest.mark.parametrize("modules", [("layernorm",), ("core_attn",)])
def test_a_second_backward_is_an_error(modules):
    blocks, (x,) = blocks_of(1), inputs(1)
    loss = run_forward(manager_of(*modules), blocks, x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_an_input_that_was_written_to_is_an_error():
    blocks, (x,) = blocks_of(1), inputs(1)
    x = x.clone()
    loss = run_forward(manager_of("layernorm"), blocks, x).sum()
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_without_gradient_nothing_is_noted():
    blocks, (x,) = blocks_of(1), inputs(1)
    with torch.no_grad():
        run_forward(manager_of(*MODULES), blocks, x)
    run_forward(manager_of(*MODULES), blocks.requires_grad_(False), x)
    assert {is_recompute for _, is_recompute in blocks[0].runs} == {False}


def test_autocast_of_forward_holds_in_backward():
    blocks, (x,) = blocks_of(1), inputs(1)
    results = []
    for modules in ((), MODULES):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run_forward(manager_of(*modules), blocks, x).float().sum()
        loss.backward()
        results.append(gradients_of(blocks))
    assert_same(results[1], results[0])


def test_the_first_blocks_whole_and_modules_of_the_others():
    blocks, (x,) = blocks_of(3), inputs(1)
    torch.manual_seed(5)
    expected = plain_gradients(blocks, [x])
    torch.manual_seed(5)
    manager = manager_of("mlp", recompute=True, num_recomputed=1)
    for block in blocks:
        block.runs.clear()
    run_forward(manager, blocks, x).square().sum().backward()
    assert_same(gradients_of(blocks), expected)
    counts = [[name for name, is_recompute in block.runs if is_recompute] for block in blocks]
    assert counts == [["core_attn", "mlp"], ["mlp"], ["mlp"]]


def test_describe_names_the_modules():
    assert manager_of("mlp", "core_attn").describe() == "activations: those of core_attn, mlp recomputed, others kept"
