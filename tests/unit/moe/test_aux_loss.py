import pytest
import torch
import torch.nn.functional as F

from megatron_glue.moe.aux_loss import (
    attach_losses,
    count_by_document,
    document_balancing_loss,
    load_balancing_loss,
    z_loss,
)
from megatron_glue.ops.grouping import count_ids
from tests.support.tolerances import assert_close


def naive_balance(probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    num_experts = probs.shape[1]
    share = F.one_hot(ids, num_experts).sum(1).to(probs.dtype).mean(0) / ids.shape[1]
    return num_experts * (share * probs.mean(0)).sum()


def case(num_tokens: int, num_experts: int = 6, top_k: int = 2):
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits, logits.softmax(-1), logits.detach().topk(top_k).indices


def test_balance_equals_the_formula_with_gradients():
    logits, probs, ids = case(17)
    actual = load_balancing_loss(probs.sum(0), count_ids(ids, 6), 2, 17)
    expected = naive_balance(probs, ids)
    assert_close(actual, expected)
    assert_close(torch.autograd.grad(actual, logits, retain_graph=True)[0], torch.autograd.grad(expected, logits)[0])


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balance_is_one_when_balanced_for_every_k(top_k):
    ids = (torch.arange(8)[:, None] + torch.arange(top_k)) % 8
    probs = torch.full((8, 8), 1 / 8)
    assert load_balancing_loss(probs.sum(0), count_ids(ids, 8), top_k, 8).item() == pytest.approx(1.0)


def test_documents_are_balanced_one_by_one_and_weighted_by_tokens():
    logits, probs, ids = case(12)
    lengths = [3, 5, 4]
    segment_ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))
    actual = document_balancing_loss(probs, count_by_document(ids, segment_ids, 3, 6), segment_ids, 12)
    expected = sum(
        length * naive_balance(part_probs, part_ids)
        for length, part_probs, part_ids in zip(lengths, probs.split(lengths), ids.split(lengths), strict=True)
    )
    expected = expected / 12
    assert_close(actual, expected)
    assert_close(torch.autograd.grad(actual, logits, retain_graph=True)[0], torch.autograd.grad(expected, logits)[0])


def test_document_scope_sees_what_micro_batch_scope_cannot():
    """Two documents, each all to an expert of its own: balanced together, not one by one."""
    ids = torch.tensor([[0]] * 4 + [[1]] * 4)
    probs = F.one_hot(ids[:, 0], 2).float()
    segment_ids = torch.tensor([0] * 4 + [1] * 4, dtype=torch.int32)
    assert load_balancing_loss(probs.sum(0), count_ids(ids, 2), 1, 8).item() == pytest.approx(1.0)
    counts = count_by_document(ids, segment_ids, 2, 2)
    assert counts.tolist() == [[4, 0], [0, 4]]
    assert document_balancing_loss(probs, counts, segment_ids, 8).item() == pytest.approx(2.0)


def test_f65_opposite_imbalances_of_two_layers_stay_visible():
    """Layer 0 sends all to A, layer 1 all to B; one loss over both would call that balanced."""
    probs_a, probs_b = torch.tensor([[1.0, 0.0]]).expand(6, 2), torch.tensor([[0.0, 1.0]]).expand(6, 2)
    loss_a = load_balancing_loss(probs_a.sum(0), torch.tensor([6, 0]), 1, 6)
    loss_b = load_balancing_loss(probs_b.sum(0), torch.tensor([0, 6]), 1, 6)
    pooled = load_balancing_loss(torch.cat((probs_a, probs_b)).sum(0), torch.tensor([6, 6]), 1, 12)
    assert (loss_a + loss_b).item() / 2 == pytest.approx(2.0)
    assert pooled.item() == pytest.approx(1.0)


def test_z_loss_equals_the_formula():
    logits, _, _ = case(9)
    expected = (logits.exp().sum(-1).log() ** 2).mean()
    assert_close(z_loss(logits.logsumexp(-1), 9), expected)
    assert torch.autograd.gradcheck(lambda logits: z_loss(logits.logsumexp(-1), 9), (logits,))


@pytest.mark.parametrize("lengths", [[17, 0], [5, 12], [1, 15, 1]], ids=str)
def test_f34_shares_of_ranks_add_up_to_the_loss_of_the_whole(lengths):
    """Rows cut anywhere, some ranks without any: values and gradients of the shares sum to those of one rank."""
    logits, probs, ids = case(17)
    segment_ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor([8, 5, 4]))
    counts, by_document = count_ids(ids, 6), count_by_document(ids, segment_ids, 3, 6)
    whole = [
        load_balancing_loss(probs.sum(0), counts, 2, 17),
        document_balancing_loss(probs, by_document, segment_ids, 17),
        z_loss(logits.logsumexp(-1), 17),
    ]
    shares = [torch.zeros((), dtype=torch.float64)] * 3
    cuts = zip(logits.split(lengths), probs.split(lengths), segment_ids.split(lengths), strict=True)
    for own_logits, own_probs, own_segments in cuts:
        shares = [
            shares[0] + load_balancing_loss(own_probs.sum(0), counts, 2, 17),
            shares[1] + document_balancing_loss(own_probs, by_document, own_segments, 17),
            shares[2] + z_loss(own_logits.logsumexp(-1), 17),
        ]
    for actual, expected in zip(shares, whole, strict=True):
        assert_close(actual, expected)
        gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (actual, expected)]
        assert_close(*gradients)


@pytest.mark.parametrize("num_tokens", [0, 5], ids=["nowhere", "on other ranks"])
def test_no_tokens_give_zero_with_an_edge(num_tokens):
    logits = torch.zeros(0, 4, requires_grad=True)
    segment_ids = torch.zeros(0, dtype=torch.int32)
    counts = torch.tensor([num_tokens, num_tokens, 0, 0])
    total = (
        load_balancing_loss(logits.softmax(-1).sum(0), counts, 2, num_tokens)
        + document_balancing_loss(logits.softmax(-1), counts[None], segment_ids, num_tokens)
        + z_loss(logits.logsumexp(-1), num_tokens)
    )
    assert total.item() == 0.0
    total.backward()
    assert logits.grad is not None


def test_attach_changes_no_value_and_adds_a_scaled_gradient():
    x = torch.randn(3, 2, requires_grad=True)
    parameter = torch.tensor(2.0, requires_grad=True)
    y = attach_losses(x, parameter.square(), 0.25)
    assert torch.equal(y, x)
    (y * 3).sum().backward()
    assert x.grad is not None
    assert parameter.grad is not None
    assert x.grad.tolist() == [[3.0, 3.0]] * 3
    assert parameter.grad.item() == 0.25 * 4.0
