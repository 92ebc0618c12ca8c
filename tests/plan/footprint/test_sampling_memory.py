"""Check the memory of keys and values while the student samples."""

from __future__ import annotations

import pytest

from mkd.plan.footprint.memory import predict_memory
from mkd.plan.footprint.sampling_memory import cache_bytes
from mkd.plan.models.model_shape import ModelShape
from tests.plan.shapes import QWEN3_5_9B, config, trained

ON = ("--on-policy-fraction", 1, "--prompt-data-path", "p.jsonl", "--kd-ratio", 1)
KIB, MIB = 2**10, 2**20


def test_keys_and_values_of_a_token():
    """Qwen2.5-1.5B has 28 layers with 2 key/value heads of 128 channels: 28 KiB a token in bf16."""
    sizes = dict(hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2)
    shape = ModelShape.from_hf_config(
        dict(model_type="qwen2", num_hidden_layers=28, vocab_size=151936, **sizes)
    )
    one = config(*ON, "--seq-length", 1024, "--max-new-tokens", 8)
    assert cache_bytes(one, 1, shape, shape.layers, 2) == 1024 * 28 * KIB
    split = config(*ON, "--seq-length", 1024, "--tensor-model-parallel-size", 2)
    assert cache_bytes(split, 1, shape, shape.layers[:14], 2) == 1024 * 28 * KIB / 4


def test_states_do_not_depend_on_the_length():
    """Qwen3.5-9B has 8 layers with 4 key/value heads of 256 channels, and 24 gated delta nets.

    Each has 32 states of 128 x 128, and sees 3 inputs of 8,192 channels again.
    """
    flags = (*ON, "--max-new-tokens", 8, "--tensor-model-parallel-size")
    state, inputs = 32 * 128 * 128 * 4, 3 * 8192 * 2
    for tensor, length in ((1, 1024), (1, 2048), (2, 1024)):
        one = config(*flags, tensor, "--seq-length", length)
        kept = length * 8 * 2 * 4 * 256 * 2 + 24 * (state + inputs)
        assert cache_bytes(one, 3, QWEN3_5_9B, QWEN3_5_9B.layers, 2) == 3 * kept / tensor


MANY = (*ON, "--bf16", "--rollout-prompts", 600)


def test_the_forecast_counts_a_cache_that_exceeds_the_activations():
    def peak(*flags) -> float:
        return predict_memory(trained(config(*MANY, *flags), microbatches=1)).ranks[0].total_gib

    few, many, more = (peak("--rollout-slots", slots) for slots in (1, 256, 257))
    assert few < many
    assert more - many == pytest.approx(8192 * 2 * 28 * 8 * 128 * 2 / 2**30, rel=0.01)


def test_context_parallel_processes_keep_whole_texts_while_they_sample():
    """Two processes have each a cache of its slots: it is as large as on one process, but shares no row."""
    one, two = (
        predict_memory(trained(config(*MANY, "--rollout-slots", 256, *flags), microbatches=1))
        for flags in ((), ("--context-parallel-size", 2))
    )
    for name in ("activations_gib", "transient_gib"):
        assert getattr(two.ranks[0], name) == pytest.approx(getattr(one.ranks[0], name), rel=1e-3), name


def test_a_process_has_no_more_slots_than_its_share_of_a_step():
    def activations(slots: int, replicas: int, *flags) -> float:
        settings = config(*MANY, "--rollout-slots", slots, *flags)
        return (
            predict_memory(trained(settings, microbatches=1, data_parallel=replicas)).ranks[0].activations_gib
        )

    assert activations(600, 3) == activations(200, 3) > activations(199, 3)
    shared = ("--context-parallel-size", 2)
    assert activations(200, 3, *shared) == activations(100, 3, *shared) > activations(99, 3, *shared)
