"""Scores of given tokens: equal to dense float64 for every split of vocabulary and sequence."""

from __future__ import annotations

import pytest
import torch

from mkd.losses.scores import token_scores

TOKENS, WIDTH, VOCAB, PADDED = 48, 24, 307, 320
NAMES = ("label", "entropy", "highest")


def inputs(dtype: torch.dtype):
    """Return hidden states, padded head, rows (unordered, some twice) and labels.

    There are more rows than one block has.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(PADDED, WIDTH, generator=generator).to(dtype)
    rows = torch.randint(TOKENS, (600,), generator=generator)
    return hidden, weight, rows, torch.randint(VOCAB, (600,), generator=generator)


def dense(hidden, weight, rows, labels):
    """Return the scores by name, in float64; `weight` has real rows only."""
    log_p = (hidden[rows].double() @ weight.double().t()).log_softmax(-1)
    label = log_p.gather(1, labels[:, None]).squeeze(1)
    return dict(label=label, entropy=-(log_p.exp() * log_p).sum(1), highest=log_p.amax(1))


def assert_close(scores, expected, allowed):
    for name in NAMES:
        assert (getattr(scores, name).double() - expected[name]).abs().max() <= allowed, name


def sharded(tp: int, dtype: torch.dtype, sequence_parallel: bool):
    """Return (scores of this rank's shards, scores of no row)."""
    import torch.distributed as dist

    from mkd.platform import detect

    detect()
    hidden, weight, rows, labels = inputs(dtype)
    rank = dist.get_rank()
    own = hidden.chunk(tp)[rank] if sequence_parallel else hidden
    settings = dict(tp_group=dist.group.WORLD, vocab_size=VOCAB, logits_cap=None)
    settings |= dict(sequence_parallel=sequence_parallel)
    shard = weight.chunk(tp)[rank]
    return tuple(token_scores(own, shard, rows[:n], labels[:n], **settings) for n in (600, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_dense(tp, sequence_parallel, dtype, ranks):
    results = ranks.run(sharded, tp, tp, dtype, sequence_parallel)
    hidden, weight, rows, labels = inputs(dtype)
    expected = dense(hidden, weight[:VOCAB], rows, labels)
    for scores, nothing in results:
        assert_close(scores, expected, 1e-12 if dtype == torch.float64 else 1e-5)
        for name in NAMES:
            assert getattr(scores, name).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert torch.equal(getattr(scores, name), getattr(results[0][0], name))
            assert getattr(nothing, name).shape == (0,)


def test_one_process_needs_no_group():
    hidden, weight, rows, labels = inputs(torch.float32)
    scores = token_scores(hidden, weight, rows, labels, tp_group=None, logits_cap=None, vocab_size=VOCAB)
    assert_close(scores, dense(hidden, weight[:VOCAB], rows, labels), 1e-5)


def on_slots(tp: int):
    """Return scores of a head whose real columns lie anywhere, on exchanged rows.

    The last rank has no real column.
    """
    import torch.distributed as dist

    hidden, weight, places, order, rows, labels = slots(tp)
    rank, width = dist.get_rank(), PADDED // tp
    real = torch.zeros(PADDED, dtype=torch.bool)
    real[places] = True
    spread = torch.full_like(weight, torch.nan)  # what is not real is never read
    spread[places] = weight[: len(places)]
    own = slice(rank * width, (rank + 1) * width)
    return token_scores(
        hidden,
        spread[own],
        rows,
        places[labels],
        tp_group=dist.group.WORLD,
        logits_cap=None,
        real=real[own],
        exchange=lambda h: h[order],
    )


def slots(tp: int):
    """Return hidden states, head by id, place of each id, exchanged rows, rows of those, labels."""
    hidden, weight, _, _ = inputs(torch.float64)
    generator = torch.Generator().manual_seed(1)
    filled = PADDED - PADDED // tp if tp > 1 else PADDED
    places = torch.randperm(filled, generator=generator)[: filled - 20]
    order = torch.randint(TOKENS, (30,), generator=generator)
    rows = torch.randint(len(order), (50,), generator=generator)
    return hidden, weight, places, order, rows, torch.randint(len(places), (50,), generator=generator)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_columns_in_any_order_and_exchanged_rows(tp, ranks):
    hidden, weight, places, order, rows, labels = slots(tp)
    expected = dense(hidden, weight[: len(places)], order[rows], labels)
    for scores in ranks.run(on_slots, tp, tp):
        assert_close(scores, expected, 1e-12)
