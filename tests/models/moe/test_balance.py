"""Check the balance losses and the load against a plain computation, document by document."""

from __future__ import annotations

import pytest
import torch

from mkd.families.layer_shape import MoEShape
from mkd.models.moe.balance import RouterRecord, WithLoss
from tests.models.test_hf_parity import LENGTHS, PADDING, documents, load_model, pack
from tests.tiny_models import make_model

ALPHA, ZETA = 0.3, 0.07


def record_of(moe, balance=ALPHA, z=ZETA):
    record = RouterRecord(moe, balance, z, torch.zeros(2, moe.num_experts + 2, dtype=torch.float64))
    record.start_step(torch.tensor(1.0 / sum(LENGTHS)))
    return record


class OneProcess:
    """Stands for a group of one process, over which nothing is communicated."""

    def size(self):
        return 1


def reference(moe, logits, selected, spans):
    """Return both losses by the formulas, one document after another, in fp64."""
    logits, tokens = logits.double(), sum(LENGTHS)
    balance = z = torch.zeros((), dtype=torch.float64)
    for length, start in zip(LENGTHS, spans, strict=True):
        rows = slice(start, start + length)
        scores = logits[rows].softmax(-1) if moe.scores == "softmax" else logits[rows].sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        counts = selected[rows].sum(0).double()
        balance = balance + (scores.sum(0) * counts).sum() / length
        z = z + logits[rows].exp().sum(-1).log().square().sum()
    return balance * ALPHA * moe.num_experts / (moe.top_k * tokens), z * ZETA / tokens


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_losses_and_gradients_are_those_of_the_formula(scores):
    moe = MoEShape(num_experts=6, top_k=2, ffn_hidden_size=4, scores=scores)
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS) + PADDING
    logits = torch.randn(total, 6, generator=generator).requires_grad_()
    selected = torch.zeros(total, 6).scatter(1, logits.topk(2).indices, 1.0).bool()
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    ids = torch.full((total,), -1, dtype=torch.int32)
    for number, length in enumerate(LENGTHS):
        ids[starts[number] : starts[number] + length] = number
    encoded = torch.cat((ids, torch.tensor(LENGTHS, dtype=torch.int32)))
    record = record_of(moe)
    loss = record.add(2, logits, selected, encoded, OneProcess())
    (mine,) = torch.autograd.grad(loss, logits)
    expected = reference(moe, logits, selected, starts[:-1].tolist())
    (theirs,) = torch.autograd.grad(sum(expected), logits)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)
    assert not mine[sum(LENGTHS) :].any(), "padding has no gradient"
    torch.testing.assert_close(record.sums[1, -2:], torch.stack(expected).detach(), rtol=1e-6, atol=0)
    assert torch.equal(record.sums[1, :-2], selected[: sum(LENGTHS)].sum(0).double())
    assert not record.sums[0].any(), "the other layer has no tokens"


def test_even_routing_has_a_balance_loss_of_alpha():
    moe = MoEShape(num_experts=4, top_k=2, ffn_hidden_size=4)
    record = RouterRecord(moe, ALPHA, 0.0, torch.zeros(1, 6, dtype=torch.float64))
    record.start_step(torch.tensor(1 / 12))
    selected = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]] * 6).bool()
    ids = torch.tensor([0] * 4 + [1] * 8 + [4, 8], dtype=torch.int32)
    loss = record.add(1, torch.zeros(12, 4), selected, ids, OneProcess())
    assert loss.item() == pytest.approx(ALPHA)


def test_the_loss_rides_on_the_weights():
    weights, loss = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
    (WithLoss.apply(weights * 2, loss * 5) * 7).sum().backward()
    assert weights.grad.tolist() == [14.0] * 3 and loss.grad.item() == 5.0


def recorded(folder, frozen):
    """Return the record of a model after one pack, in training or as a frozen teacher."""
    model = load_model(folder, tp=1)
    if not frozen:
        model.train()
    tokens = torch.cat([*documents(model.shape.vocab_size), torch.zeros(PADDING, dtype=torch.int64)])
    with torch.set_grad_enabled(not frozen):
        model(tokens[None], torch.arange(tokens.numel())[None], pack(LENGTHS, PADDING))
    return model.router_record.sums[:, :-2]


def test_only_training_is_recorded_and_without_padding(ranks, tmp_path):
    folder = make_model(tmp_path / "model", "qwen3_moe")
    (trained,) = ranks.run(recorded, 1, folder, False)
    assert trained.sum(1).tolist() == [2 * sum(LENGTHS), 0, 2 * sum(LENGTHS), 2 * sum(LENGTHS)]
    (frozen,) = ranks.run(recorded, 1, folder, True)
    assert not frozen.any()


def trained(folder, padding, filler):
    """Return counts and losses, and all gradients, of one pack with `padding` tokens `filler` behind it."""
    model = load_model(folder, tp=1).train()
    record = model.router_record
    record.balance_coeff, record.z_coeff = ALPHA, ZETA
    record.start_step(torch.tensor(1.0 / sum(LENGTHS)))
    tokens = torch.cat([*documents(model.shape.vocab_size), torch.full((padding,), filler)])
    hidden = model(tokens[None], torch.arange(tokens.numel())[None], pack(LENGTHS, padding))
    model.logits(hidden)[: sum(LENGTHS)].square().mean().backward()
    return record.sums, {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek-experts"])
def test_padding_changes_no_gradient_count_or_loss(family, ranks, tmp_path):
    """Padding is routed like other tokens, also through shared experts."""
    folder = make_model(tmp_path / "model", family)
    (sums, gradients), (more_sums, more) = (
        ranks.run(trained, 1, folder, *given)[0] for given in ((0, 0), (3 * PADDING, 7))
    )
    assert torch.equal(sums[:, :-2], more_sums[:, :-2]) and (sums[:, -2:].sum(0) > 0).all()
    torch.testing.assert_close(sums[:, -2:], more_sums[:, -2:], rtol=1e-6, atol=0)
    assert gradients.keys() == more.keys() and any("router" in name for name in more)
    for name, gradient in gradients.items():
        assert (gradient - more[name]).abs().max() <= 1e-5 * gradient.abs().max(), name
