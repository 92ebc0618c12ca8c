"""Check greedy completions of the real SmolLM2-135M-Instruct against transformers: 20 prompts x 64 tokens."""

from __future__ import annotations

import time

import pytest
import torch

from tests.kinds.sampled.decoded import Place, load_parts

pytestmark = [pytest.mark.download, pytest.mark.slow]
NUM_PROMPTS, NEW_TOKENS = 20, 64
SUBJECTS = ("rivers", "prime numbers", "bread", "the moon", "Python lists")


def chat_prompts(folder) -> list:
    import numpy as np

    from mkd.data.prompt_readers import encode_prompt
    from mkd.data.prompts import parse_prompt
    from mkd.kinds.sampled.sampler.rollouts import Request
    from mkd.tokenizers.load import open_tokenizer

    tokenizer, found = open_tokenizer(str(folder)), []
    for number in range(NUM_PROMPTS):
        text = f"Write {number + 2} short sentences about {SUBJECTS[number % 5]}."
        prompt, _ = parse_prompt({"messages": [{"role": "user", "content": text}]})
        ids = encode_prompt(prompt, tokenizer)
        found.append(Request(number, 0, np.asarray(ids)))
    return found


def complete(folder, asked):
    from mkd.kinds.sampled.sampler.decoding import sample_completions
    from mkd.kinds.sampled.sampler.rollouts import Sampling
    from mkd.kinds.sampled.stop_ids import stop_ids

    context, parts = load_parts(folder, Place("one process"))
    settings = Sampling(NEW_TOKENS, stop_ids(folder), parts[0].shape.vocab_size, temperature=0.0, slots=8)
    start = time.perf_counter()
    found = [one.ids.tolist() for one in sample_completions(parts, context, asked, settings, iteration=1)]
    return found, sum(map(len, found)) / (time.perf_counter() - start)


@torch.no_grad()
def test_greedy_completions_equal_transformers(smollm2, ranks):
    from transformers import AutoModelForCausalLM

    asked = chat_prompts(smollm2)
    ((found, tokens_per_s),) = ranks.run(complete, 1, smollm2, asked)
    print(f"{sum(map(len, found))} tokens, {tokens_per_s:.1f} tokens/s")
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for one, ids in zip(asked, found, strict=True):
        row = torch.from_numpy(one.ids)[None]
        expected = model.generate(row, max_new_tokens=NEW_TOKENS, do_sample=False)[0, row.shape[1] :].tolist()
        assert ids == expected, one.prompt
