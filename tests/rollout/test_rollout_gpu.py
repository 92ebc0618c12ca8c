"""Check sampling on GPUs: Transformer Engine's layers with a cache against their packed forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ranks import skip_unless_gpus_take
from tests.rollout.decoded import Place, packed_scores, requests
from tests.rollout.test_decoding import by_completion, sample_refilled
from tests.tiny_models import make_model

pytestmark = pytest.mark.gpu
SIZES = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-windows"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_log_probabilities_are_those_of_the_packed_forward(family, dtype, tolerance, tmp_path, gpu_ranks):
    folder, place = make_model(tmp_path / family, family, **SIZES), Place("one GPU", dtype=dtype)
    asked = requests(8)
    (found,) = gpu_ranks.run(sample_refilled, 1, folder, place, asked)
    pairs = [(one.ids, ids) for one, (_, _, ids, _, _) in zip(asked, found, strict=True)]
    (expected,) = gpu_ranks.run(packed_scores, 1, folder, pairs, place)
    gaps = [np.abs(logp - scores) for (_, _, _, logp, _), scores in zip(found, expected, strict=True)]
    assert np.concatenate(gaps).mean() < tolerance


@pytest.mark.parametrize(
    "place", [Place("TP2", 2, tp=2, sequence_parallel=True), Place("PP2", 2, pp=2)], ids=["TP2", "PP2"]
)
def test_layouts_sample_the_same_tokens(place, tmp_path, gpu_ranks):
    skip_unless_gpus_take(place.ranks)
    folder, asked = make_model(tmp_path / "qwen3", "qwen3", **SIZES), requests(12)
    single = by_completion(gpu_ranks.run(sample_refilled, 1, folder, Place("one GPU"), asked))
    found = by_completion(gpu_ranks.run(sample_refilled, place.ranks, folder, place, asked))
    assert {key: ids for key, (ids, *_) in found.items()} == {key: ids for key, (ids, *_) in single.items()}
