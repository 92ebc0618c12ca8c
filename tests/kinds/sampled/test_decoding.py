"""Check sampling with the training model: against transformers, the packed forward, and every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kinds.sampled.decoded import STOP_ID, Place, packed_scores, requests, sample
from tests.tiny_models import make_model

SINGLE = Place("one process")
SLOW = pytest.mark.slow
PLACES = (
    Place("TP2 + sequence parallel", 2, tp=2, sequence_parallel=True),
    Place("PP2 VPP2", 2, pp=2, vp=2),
    Place("TP2 PP2", 4, tp=2, pp=2),
    Place("DP2", 2),
    Place("CP2", 2, cp=2),
)
SLOW_PLACES = (
    Place("TP2", 2, tp=2),
    Place("PP2", 2, pp=2),
    Place("PP4", 4, pp=4),
    Place("TP2 PP2 + sequence parallel", 4, tp=2, pp=2, sequence_parallel=True),
    Place("PP2 DP2", 4, pp=2),
    Place("TP2 CP2 + sequence parallel", 4, tp=2, cp=2, sequence_parallel=True),
    Place("CP2 PP2", 4, cp=2, pp=2),
    Place("CP2 DP2", 4, cp=2),
)
FAMILIES = ("llama3.2", "gemma4")
SLOW_FAMILIES = ("gemma3", "qwen2", "qwen3-windows", "phi3", "qwen3_moe", "smollm3", "ministral3", "granite")
SLOW_FAMILIES += (
    "olmo3",
    "exaone4",
    "hunyuan_v1_dense",
    "ernie4_5",
    "minimax_m2",
    "gemma4-experts",
    "apertus",
)
NEW_TOKENS = 40


def by_completion(results: list[list[tuple]]) -> dict[tuple, tuple]:
    """Return (prompt, sample) -> (ids, ln p, finish). Ranks with the same completion must agree."""
    found: dict[tuple, tuple] = {}
    for result in results:
        for prompt, number, ids, logp, finish in result:
            known = found.setdefault((prompt, number), (ids, logp, finish))
            assert known[0] == ids and known[2] == finish and np.array_equal(known[1], logp)
    return found


def sample_refilled(folder, place, asked):
    """Sample with fewer slots than completions, and prompts in several rows."""
    return sample(folder, place, asked, max_new_tokens=NEW_TOKENS, slots=5, prefill_tokens=20)


def sample_greedily(folder, place, asked):
    return sample(folder, place, asked, max_new_tokens=NEW_TOKENS, temperature=0.0)


def sample_in_fixed_rows(folder, place, asked, temperature=1.0):
    """Sample as GPUs do, without graphs."""
    settings = dict(max_new_tokens=NEW_TOKENS, slots=5, prefill_tokens=20, temperature=temperature)
    return sample(folder, place, asked, fixed_rows="plain", **settings)


@torch.no_grad()
def generated(folder, asked) -> list[list[int]]:
    """Return the greedy completions of transformers, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=STOP_ID, pad_token_id=0)
    rows = [torch.from_numpy(one.ids)[None] for one in asked]
    return [model.generate(row, **settings)[0, row.shape[1] :].tolist() for row in rows]


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(one, marks=SLOW) for one in SLOW_FAMILIES)])
def test_completions_are_those_of_transformers_and_of_the_packed_forward(family, tmp_path, ranks):
    """Documents grow beyond windows and scaled positions; slots are refilled."""
    folder = make_model(tmp_path / family, family)
    asked = requests(6, samples=2)
    (greedy,) = ranks.run(sample_greedily, 1, folder, SINGLE, asked[::2])
    assert [ids for _, _, ids, _, _ in greedy] == generated(folder, asked[::2])
    (found,) = ranks.run(sample_refilled, 1, folder, SINGLE, asked)
    assert [(prompt, number) for prompt, number, *_ in found] == [(one.prompt, one.sample) for one in asked]
    assert len({tuple(ids) for _, _, ids, _, _ in found}) > len(found) / 2  # samples of a prompt differ
    for _, _, ids, _, finish in found:
        assert STOP_ID not in ids[:-1] and (ids[-1] == STOP_ID) == (finish == "stop")
        assert len(ids) == NEW_TOKENS or finish == "stop"
    pairs = [(one.ids, ids) for one, (_, _, ids, _, _) in zip(asked, found, strict=True)]
    (expected,) = ranks.run(packed_scores, 1, folder, pairs)
    for (_, _, _, logp, _), scores in zip(found, expected, strict=True):
        assert np.abs(logp - scores).max() < 1e-4


@pytest.fixture(scope="module")
def single(ranks, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("layouts") / "llama", "llama")
    asked = requests(12)
    return folder, asked, by_completion(ranks.run(sample_refilled, 1, folder, SINGLE, asked))


@pytest.mark.parametrize(
    "place",
    [
        *(pytest.param(one, id=one.name) for one in PLACES),
        *(pytest.param(one, id=one.name, marks=SLOW) for one in SLOW_PLACES),
    ],
)
def test_every_layout_samples_the_same_tokens(place, single, ranks):
    folder, asked, expected = single
    found = by_completion(ranks.run(sample_refilled, place.ranks, folder, place, asked))
    assert {key: ids for key, (ids, _, _) in found.items()} == {
        key: ids for key, (ids, *_) in expected.items()
    }
    assert max(np.abs(logp - expected[key][1]).max() for key, (_, logp, _) in found.items()) < 1e-5


@SLOW
@pytest.mark.parametrize("family", ["gemma4", "phi3", "qwen3_moe", "ministral3", "qwen3-windows"])
def test_context_parallel_ranks_sample_from_every_kind_of_layer(family, tmp_path, ranks):
    """Each runs whole rows, whose positions and windows are those of the text."""
    folder, asked = make_model(tmp_path / family, family), requests(6, samples=2)
    expected = by_completion(ranks.run(sample_refilled, 1, folder, SINGLE, asked))
    found = by_completion(ranks.run(sample_refilled, 2, folder, Place("CP2", 2, cp=2), asked))
    assert {key: ids for key, (ids, *_) in found.items()} == {key: ids for key, (ids, *_) in expected.items()}
    assert max(np.abs(logp - expected[key][1]).max() for key, (_, logp, _) in found.items()) < 1e-5


def test_rows_of_fixed_shapes_sample_the_same_tokens(single, ranks):
    """Slots without a sequence take part, and keys are read up to a rounded length."""
    folder, asked, expected = single
    found = by_completion(ranks.run(sample_in_fixed_rows, 1, folder, SINGLE, asked))
    assert {key: ids for key, (ids, _, _) in found.items()} == {
        key: ids for key, (ids, *_) in expected.items()
    }
    assert max(np.abs(logp - expected[key][1]).max() for key, (_, logp, _) in found.items()) < 1e-5


def test_a_completion_alone_is_the_one_in_a_batch(single, ranks):
    folder, asked, expected = single
    for one in asked[:2]:
        ((_, _, ids, logp, _),) = ranks.run(sample_refilled, 1, folder, SINGLE, [one])[0]
        assert ids == expected[one.prompt, one.sample][0]
        assert np.abs(logp - expected[one.prompt, one.sample][1]).max() < 1e-5
