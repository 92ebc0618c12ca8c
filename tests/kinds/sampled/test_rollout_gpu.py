"""Check sampling on GPUs: Transformer Engine's layers with a cache against their packed forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kinds.sampled.decoded import Place, packed_scores, requests, sample
from tests.kinds.sampled.test_decoding import by_completion, sample_refilled
from tests.kinds.sampled.transformers_greedy import continued
from tests.ranks import skip_unless_gpus_take
from tests.tiny_models import add_tokenizer, make_model
from tests.train.rollout_run import EOS, VOCAB_SIZES, argv, make_files, one_step

pytestmark = pytest.mark.gpu
NO_STOP: frozenset[int] = frozenset()
GREEDY_TOKENS = 64
HEADS = dict(  # of gated delta nets
    linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4
)
SIZES = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def untuned(call: Callable[..., Any], *given: Any) -> Any:
    """Call with the first configuration of fused kernels: to time all of them takes minutes."""
    from mkd.plan.models.mixer_kernels import fla_version
    from tools.benchmarks.kernel_tuning import part_of_configurations

    with part_of_configurations(0, None) if fla_version() else nullcontext():
        return call(*given)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-windows", "qwen3_5"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_log_probabilities_are_those_of_the_packed_forward(family, dtype, tolerance, tmp_path, gpu_ranks):
    folder, place = make_model(tmp_path / family, family, **SIZES), Place("one GPU", dtype=dtype)
    asked = requests(8)
    (found,) = gpu_ranks.run(untuned, 1, sample_refilled, folder, place, asked)
    pairs = [(one.ids, ids) for one, (_, _, ids, _, _) in zip(asked, found, strict=True)]
    (expected,) = gpu_ranks.run(untuned, 1, packed_scores, folder, pairs, place)
    gaps = [np.abs(logp - scores) for (_, _, _, logp, _), scores in zip(found, expected, strict=True)]
    assert np.concatenate(gaps).mean() < tolerance


def greedily(folder, dtype, asked) -> list[tuple]:
    settings = dict(max_new_tokens=GREEDY_TOKENS, temperature=0.0, stop_ids=NO_STOP)
    return sample(folder, Place("one GPU", dtype=dtype), asked, **settings)


@pytest.mark.parametrize("family, sizes", [("qwen3_5", SIZES | HEADS), ("nemotron_h", {})])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_states_of_mixers_continue_prompts_as_transformers_does(
    family, sizes, dtype, tolerance, tmp_path, gpu_ranks
):
    """In bf16 the fused kernels of gated delta nets leave the states, and ln p differ by rounding."""
    folder, asked = make_model(tmp_path / family, family, **sizes), requests(8)
    asked[1] = replace(asked[1], ids=np.tile(asked[1].ids, 130)[:130])  # longer than chunks of the scan
    (found,) = gpu_ranks.run(untuned, 1, greedily, folder, dtype, asked)
    pairs = [(one.ids.tolist(), ids) for one, (_, _, ids, _, _) in zip(asked, found, strict=True)]
    for (_, _, ids, logp, _), (theirs, scores) in zip(
        found, continued(folder, pairs, GREEDY_TOKENS), strict=True
    ):
        assert np.abs(np.array(scores) - logp).max() < tolerance
        if dtype == torch.float32:
            assert ids == theirs


def sample_fixed(folder, place, asked, fixed_rows, temperature):
    """Sample with fewer slots than completions, beyond the first length of keys."""
    settings = dict(max_new_tokens=300, slots=6, temperature=temperature)
    return sample(folder, place, asked, fixed_rows=fixed_rows, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_sample_what_their_kernels_do(dtype, temperature, tmp_path, gpu_ranks):
    """The same rows without graphs: equal ids, and equal ln p to the bit."""
    folder, place = make_model(tmp_path / "qwen3", "qwen3", **SIZES), Place("one GPU", dtype=dtype)
    asked = requests(10)
    results = [
        by_completion(gpu_ranks.run(sample_fixed, 1, folder, place, asked, rows, temperature))
        for rows in ("graphs", "plain")
    ]
    for key, (ids, logp, finish) in results[0].items():
        assert results[1][key][0] == ids and results[1][key][2] == finish
        assert np.array_equal(results[1][key][1], logp)


def test_graphs_sample_what_rows_of_free_shapes_do(tmp_path, gpu_ranks):
    folder, place, asked = make_model(tmp_path / "qwen3", "qwen3", **SIZES), Place("one GPU"), requests(10)
    graphs, free = (
        by_completion(gpu_ranks.run(sample_fixed, 1, folder, place, asked, rows, 1.0))
        for rows in ("graphs", "off")
    )
    assert {key: ids for key, (ids, *_) in graphs.items()} == {key: ids for key, (ids, *_) in free.items()}


@pytest.mark.parametrize(
    "place",
    [
        Place("TP2", 2, tp=2, sequence_parallel=True),
        Place("PP2", 2, pp=2),
        Place("CP2", 2, cp=2),
        Place("TP2 CP2", 4, tp=2, cp=2, sequence_parallel=True),
    ],
    ids=lambda place: place.name,
)
def test_layouts_sample_the_same_tokens(place, tmp_path, gpu_ranks):
    skip_unless_gpus_take(place.ranks)
    folder, asked = make_model(tmp_path / "qwen3", "qwen3", **SIZES), requests(12)
    single = by_completion(gpu_ranks.run(sample_refilled, 1, folder, Place("one GPU"), asked))
    found = by_completion(gpu_ranks.run(sample_refilled, place.ranks, folder, place, asked))
    assert {key: ids for key, (ids, *_) in found.items()} == {key: ids for key, (ids, *_) in single.items()}


@pytest.mark.parametrize("family", ["qwen3", "qwen3-windows", "qwen3_5"])
def test_context_parallel_processes_score_whole_texts_in_bf16(family, tmp_path, gpu_ranks):
    """Transformer Engine's attention, which divides texts in training, reads whole ones while it samples."""
    skip_unless_gpus_take(2)
    folder = make_model(tmp_path / family, family, **SIZES)
    asked, place = requests(8), Place("CP2", 2, cp=2, dtype=torch.bfloat16)
    found = by_completion(gpu_ranks.run(untuned, 2, sample_refilled, folder, place, asked))
    assert len(found) == len(asked)
    pairs = [(one.ids, found[one.prompt, one.sample][0]) for one in asked]
    one_gpu = Place("one GPU", dtype=torch.bfloat16)
    (expected,) = gpu_ranks.run(untuned, 1, packed_scores, folder, pairs, one_gpu)
    gaps = [
        np.abs(found[one.prompt, one.sample][1] - scores) for one, scores in zip(asked, expected, strict=True)
    ]
    assert np.concatenate(gaps).mean() < 0.05


def test_a_step_trains_in_parts_on_texts_that_were_sampled_whole(tmp_path, gpu_ranks):
    """ln p of the sampled tokens in training, where two GPUs divide each text, are those of sampling."""
    skip_unless_gpus_take(2)
    files = make_files(tmp_path)
    for name, seed, size in zip(("student", "teacher"), (1, 2), VOCAB_SIZES, strict=True):
        sizes = dict(head_dim=64, hidden_size=128, vocab_size=size)
        add_tokenizer(make_model(files / f"wide {name}", "qwen3", seed=seed, **sizes | EOS))
    models = ("--student-hf", files / "wide student", "--teacher-hf", files / "wide teacher")
    words = argv(files, "parts", *models, "--bf16", "--context-parallel-size", 2)
    for found in gpu_ranks.run(one_step, 2, words, files / "gradients"):
        assert len(found["rollouts"]) == 10 and 0 < found["figures"]["rollout/logp_gap"] < 0.05
        assert found["figures"]["rollout/teacher_nll"] > 0
