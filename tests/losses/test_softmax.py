"""Merging softmax pieces of vocabulary shards."""

from __future__ import annotations

import pytest
import torch

from mkd.losses.softmax import Normaliser, ShardSoftmax, real_columns


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_shares_turn_shard_softmaxes_into_the_whole_one(temperature, spread):
    logits = spread * torch.randn(6, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shards = [ShardSoftmax.of(part, temperature) for part in logits.split([10, 1, 19], dim=1)]
    maxima, totals = (torch.stack([getattr(s, name) for s in shards]) for name in ("maximum", "total"))
    merged = Normaliser.merge(maxima, totals, temperature)
    whole = torch.cat(
        [s.probabilities * share[:, None] for s, share in zip(shards, merged.share, strict=True)], dim=1
    )
    torch.testing.assert_close(whole, (logits / temperature).softmax(1), rtol=1e-12, atol=1e-300)
    lse = merged.log_sum + merged.maximum / temperature
    torch.testing.assert_close(lse, (logits / temperature).logsumexp(1), rtol=1e-14, atol=0)
    centred = torch.stack([(s.centred() * s.probabilities).sum(1) for s in shards])
    mean = merged.mean_centred(centred) + merged.maximum / temperature
    torch.testing.assert_close(
        mean, ((logits / temperature).softmax(1) * logits / temperature).sum(1), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_shard_of_padding_has_no_share(dtype):
    logits = torch.tensor([[1.0, 2.0, 3.0], [-3e4, -3e4, -3e4]], dtype=dtype)
    real, padding = (ShardSoftmax.of(real_columns(logits, count), 1.0) for count in (2, 0))
    assert real.logits.shape == (2, 2)
    assert padding.logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    merged = Normaliser.merge(
        torch.stack([padding.maximum, real.maximum]), torch.stack([padding.total, real.total]), 1.0
    )
    assert merged.share.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert torch.equal(merged.maximum, real.maximum)
