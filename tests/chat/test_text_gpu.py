"""Texts outside a run on GPUs: as transformers writes them, and on two GPUs as on one."""

from __future__ import annotations

import pytest

from tests.chat.small_pair import NEW_TOKENS, TEXT, generated, greedy_ids, make_chat_model, sampled
from tests.chat.test_text_writers import ENDS, prompts_of
from tests.ranks import skip_unless_gpus_take

pytestmark = pytest.mark.gpu
SIZES = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def test_greedy_texts_on_a_gpu_are_those_of_transformers(tmp_path, gpu_ranks):
    """Attention as CUDA graphs, and recurrent states without."""
    folders = [make_chat_model(tmp_path / family, family, **SIZES) for family in ("qwen3", "qwen3_5")]
    (found,) = gpu_ranks.run(greedy_ids, 1, folders, TEXT)
    assert found == [ids for folder in folders for ids in generated(folder, prompts_of(folder), ENDS)]


def test_two_gpus_sample_as_one(tmp_path, gpu_ranks):
    skip_unless_gpus_take(2)
    folder = make_chat_model(tmp_path / "model", "qwen3", **SIZES)
    argv = [folder, "--prompt", TEXT, "--samples-per-prompt", "8", "--top-p", "0.9", "--dtype", "fp32"]
    argv += ["--max-new-tokens", NEW_TOKENS]
    (one,) = gpu_ranks.run(sampled, 1, argv, tmp_path / "one.jsonl")
    two = gpu_ranks.run(sampled, 2, argv, tmp_path / "two.jsonl")[0]
    assert [entry["student"] for entry in one] == [entry["student"] for entry in two]
