"""Log-probabilities of given tokens: equal to log_softmax for every split of vocabulary and sequence."""

from __future__ import annotations

import pytest
import torch

from mkd.losses.scores import token_log_probabilities

TOKENS, WIDTH, VOCAB, PADDED = 48, 24, 307, 320


def inputs(dtype: torch.dtype):
    """Hidden states, padded head, rows (unordered, some twice) and labels; more rows than one chunk has."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(PADDED, WIDTH, generator=generator).to(dtype)
    rows = torch.randint(TOKENS, (600,), generator=generator)
    return hidden, weight, rows, torch.randint(VOCAB, (600,), generator=generator)


def sharded(tp: int, dtype: torch.dtype, sequence_parallel: bool):
    """(scores of this rank's shards, scores of no row)."""
    import torch.distributed as dist

    from mkd.platform import detect

    detect()
    hidden, weight, rows, labels = inputs(dtype)
    rank = dist.get_rank()
    own = hidden.chunk(tp)[rank] if sequence_parallel else hidden
    settings = dict(tp_group=dist.group.WORLD, vocab_size=VOCAB, sequence_parallel=sequence_parallel)
    shard = weight.chunk(tp)[rank]
    scores, nothing = (token_log_probabilities(own, shard, rows[:n], labels[:n], **settings) for n in (600, 0))
    return scores, nothing


def reference(dtype: torch.dtype):
    hidden, weight, rows, labels = inputs(dtype)
    log_p = (hidden[rows].double() @ weight[:VOCAB].double().t()).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_log_softmax(tp, sequence_parallel, dtype, ranks):
    results = ranks.run(sharded, tp, tp, dtype, sequence_parallel)
    expected = reference(dtype)
    for scores, nothing in results:
        assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (scores.double() - expected).abs().max() <= (1e-12 if dtype == torch.float64 else 1e-5)
        assert torch.equal(scores, results[0][0])
        assert nothing.shape == (0,)


def test_one_process_needs_no_group():
    hidden, weight, rows, labels = inputs(torch.float32)
    scores = token_log_probabilities(hidden, weight, rows, labels, tp_group=None, vocab_size=VOCAB)
    assert (scores.double() - reference(torch.float32)).abs().max() <= 1e-5
