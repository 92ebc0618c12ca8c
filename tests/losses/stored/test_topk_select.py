"""Vocabulary-parallel top-k against the dense one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from mkd.losses.stored.topk_select import vocab_parallel_topk

PADDED = 320


def select(logits, labels, k, settings):
    rank, size = dist.get_rank(), dist.get_world_size()
    top = vocab_parallel_topk(
        logits.chunk(size, dim=-1)[rank], labels, k, tp_group=dist.group.WORLD, **settings
    )
    return top.ids, top.logprobs, top.ce, top.entropy


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab, k", [(320, 16), (300, 300), (230, 100), (150, 1)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_equals_dense(ranks, tp, vocab, k, temperature):
    """Cover k above a shard's width, and (150 ids on four ranks) shards of padding alone."""
    generator = torch.Generator().manual_seed(vocab)
    for dtype, rows, tolerance in (
        (torch.float64, 40, 1e-12),
        (torch.float32, 40, 1e-5),
        (torch.float32, 0, 0.0),
    ):
        logits = (5 * torch.randn(rows, PADDED, generator=generator, dtype=torch.float64)).to(dtype)
        logits[:, vocab:] = float("nan")
        labels = torch.randint(vocab, (rows,), generator=generator)
        real = logits[:, :vocab].double()
        wanted, wanted_ids = (real / temperature).log_softmax(dim=1).topk(k, dim=1)
        log_p = real.log_softmax(dim=1)
        results = ranks.run(select, tp, logits, labels, k, dict(vocab_size=vocab, temperature=temperature))
        for ids, logprobs, ce, entropy in results:
            assert torch.equal(ids, wanted_ids)
            assert logprobs.dtype == dtype
            torch.testing.assert_close(logprobs.double(), wanted, rtol=tolerance, atol=tolerance)
            wanted_ce = functional.nll_loss(log_p, labels, reduction="none")
            torch.testing.assert_close(ce.double(), wanted_ce, rtol=tolerance, atol=tolerance)
            wanted_entropy = -(log_p.exp() * log_p).sum(dim=1)
            torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tp", [1, 4])
def test_a_label_that_the_model_lacks_is_impossible(ranks, tp):
    logits, labels = torch.randn(3, PADDED), torch.tensor([240, 160, 3])
    for _, logprobs, ce, _ in ranks.run(select, tp, logits, labels, 4, dict(vocab_size=160)):
        assert torch.equal(ce.isinf(), torch.tensor([True, True, False]))
        assert logprobs.isfinite().all()
