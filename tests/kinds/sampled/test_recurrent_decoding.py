"""Check sampling from students with mixers against transformers, at every layout.

Those with a vision tower complete texts too.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils import deterministic

from tests.kinds.sampled.decoded import VOCAB_SIZE, Place, requests, sample
from tests.kinds.sampled.test_decoding import by_completion
from tests.tiny_models import make_model
from tests.tiny_vision_models import make_vision_model, reference_model

SINGLE = Place("one process")
SLOW = pytest.mark.slow
TP2_SP = Place("TP2 + sequence parallel", 2, tp=2, sequence_parallel=True)
PP2 = Place("PP2", 2, pp=2)
CP2 = Place("CP2", 2, cp=2)
CASES = (  # family, layout, rows, temperature; the other cases are slow
    ("qwen3_next", SINGLE, "off", 1.0),
    ("qwen3_5", TP2_SP, "off", 1.0),
    ("qwen3_5 with images", PP2, "off", 0.0),
    ("qwen3_5", SINGLE, "plain", 1.0),
    ("nemotron_h-experts", TP2_SP, "off", 1.0),
)
SLOW_CASES = (
    ("nemotron_h", SINGLE, "plain", 0.0),
    ("nemotron_h", PP2, "off", 1.0),
    ("qwen3_5", CP2, "off", 1.0),
    ("nemotron_h-experts", CP2, "off", 1.0),
    ("qwen3_5_moe with images", CP2, "plain", 0.0),
    ("nemotron_h", Place("PP2 VPP2", 2, pp=2, vp=2), "off", 0.0),
    ("qwen3_5", PP2, "off", 0.0),
    ("qwen3_next", SINGLE, "off", 0.0),
    ("qwen3_5", SINGLE, "off", 1.0),
    ("qwen3_5_moe", SINGLE, "off", 0.0),
    ("qwen3_5", Place("TP2", 2, tp=2), "off", 1.0),
    ("qwen3_5_moe", TP2_SP, "off", 0.0),
    ("qwen3_5_moe", TP2_SP, "off", 1.0),
    ("qwen3_5", PP2, "off", 1.0),
    ("qwen3_next", Place("PP2 VPP2", 2, pp=2, vp=2), "off", 1.0),
    ("qwen3_next", Place("TP2 PP2 + sequence parallel", 4, tp=2, pp=2, sequence_parallel=True), "off", 1.0),
    ("qwen3_5_moe", Place("PP2 DP2", 4, pp=2), "off", 1.0),
    ("qwen3_5_moe with images", TP2_SP, "off", 1.0),
    ("qwen3_vl with images", SINGLE, "plain", 1.0),
    ("qwen2_5_vl with images", PP2, "off", 0.0),
)
NEW_TOKENS = 24
STOP_IDS = frozenset(range(0, VOCAB_SIZE, 10))  # completions end one by one, and others move to their slots
TOLERANCE = 1e-5  # nats


def long_and_short() -> list:
    """Return prompts of 1 to 16 tokens, and two longer than chunks of the scan, each three times."""
    from mkd.kinds.sampled.sampler.rollouts import Request

    random = np.random.default_rng(6)
    prompts = [one.ids for one in requests(6)]
    prompts[1:1] = [random.integers(1, VOCAB_SIZE, size=length) for length in (130, 70)]
    return [Request(p, s, ids) for p, ids in enumerate(prompts) for s in range(3)]


def sample_poisoned(folder, place, asked, fixed_rows, temperature):
    """Sample in 5 slots; all memory that is not written before it is read has NaN."""
    was_filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        assert torch.ones(1).new_empty(3).isnan().all()
        settings = dict(max_new_tokens=NEW_TOKENS, slots=5, prefill_tokens=90, stop_ids=STOP_IDS)
        return sample(folder, place, asked, fixed_rows, temperature=temperature, **settings)
    finally:
        deterministic.fill_uninitialized_memory = was_filled
        torch.use_deterministic_algorithms(False)


@torch.no_grad()
def reference_log_p(model, prompt: np.ndarray, ids: list[int]) -> torch.Tensor:
    """Return ln p of all tokens at every place of a completion, from one forward of transformers, fp64."""
    row = torch.from_numpy(np.concatenate([prompt, ids]))[None]
    return model(row).logits[0, len(prompt) - 1 : -1].double().log_softmax(1)


@pytest.mark.parametrize(
    "family, place, fixed_rows, temperature",
    [
        pytest.param(
            *one, id=f"{one[0]}, {one[1].name}, {one[2]}, {one[3]}", marks=[] if one in CASES else SLOW
        )
        for one in CASES + SLOW_CASES
    ],
)
def test_log_probabilities_are_those_of_transformers(family, place, fixed_rows, temperature, tmp_path, ranks):
    """Every token of every completion, whose slots others have had before."""
    from transformers import AutoModelForCausalLM

    name, _, sees_images = family.partition(" ")
    if sees_images:
        folder = make_vision_model(tmp_path / name, name, text=dict(vocab_size=VOCAB_SIZE))
    else:
        folder = make_model(tmp_path / name, name)
    asked = long_and_short()
    found = by_completion(
        ranks.run(sample_poisoned, place.ranks, folder, place, asked, fixed_rows, temperature)
    )
    assert len(found) == len(asked) > 5
    if sees_images:
        model = reference_model(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for one in asked:
        ids, logp, finish = found[one.prompt, one.sample]
        assert len(ids) == NEW_TOKENS or (finish == "stop" and ids[-1] in STOP_IDS)
        expected = reference_log_p(model, one.ids, ids)
        assert np.abs(expected[range(len(ids)), ids].numpy() - logp).max() <= TOLERANCE
        if not temperature:
            assert expected.argmax(1).tolist() == ids
    by_prompt = [{tuple(found[one.prompt, s][0]) for s in range(3)} for one in asked[::3]]
    assert all(len(texts) == (3 if temperature else 1) for texts in by_prompt)
