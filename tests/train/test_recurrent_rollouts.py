"""Check runs whose student has mixers and trains on its own samples: layouts equal one process."""

from __future__ import annotations

import pytest
import torch

from mkd.families.weight_rules import KEPT_IN_FP32
from tests.checkpoint.saved_tensors import all_tensors
from tests.tiny_models import add_tokenizer, make_model
from tests.tiny_vision_models import make_vision_model
from tests.train.command import read_metrics, run_main
from tests.train.rollout_run import EOS, VOCAB_SIZES, Case, argv, make_files

SLOW = pytest.mark.slow
STEPS = 3
# With what every weight moves at least: the square of ReLU makes small gradients of experts smaller.
FAMILIES = ("qwen3_5_moe", 1e-4), pytest.param(("nemotron_h-experts", 0.0), marks=SLOW)
FIGURES = (
    "loss",
    "grad_norm",
    "rollout/length",
    "rollout/entropy",
    "rollout/teacher_nll",
    "rollout/truncated",
)
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
CASES = (
    Case("TP2 + sequence parallel", 2, (*TP2, "--sequence-parallel")),
    Case("PP2", 2, PP2),
    Case("CP2", 2, ("--context-parallel-size", 2)),
    Case("CP2 EP2", 2, ("--context-parallel-size", 2, "--expert-model-parallel-size", 2)),
    Case("EP2", 2, ("--expert-model-parallel-size", 2, "--use-distributed-optimizer")),
)


def run(files, ranks, name: str, case: Case, student: str = "recurrent"):
    """Run three steps of 5 prompts, 2 samples each; return the metrics and the exported weights."""
    more = ("--student-hf", files / student, "--export-hf", files / f"{name} hf", "--no-save")
    # Where a gradient is rounding alone, Adam's update depends on its sign: see test_latent_invariance.py.
    more += ("--train-iters", STEPS, "--log-interval", 1, "--adam-eps", 1e-6)
    results = run_main(ranks, argv(files, name, *more, *case.flags), case.ranks)
    assert all(one.exit_code == 0 for one in results), results[0].stderr
    return read_metrics(files / name), all_tensors(files / f"{name} hf")


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda one: one[0])
def single(request, ranks, tmp_path_factory):
    files = make_files(tmp_path_factory.mktemp("recurrent"))
    family, least = request.param
    add_tokenizer(make_model(files / "recurrent", family, seed=3, vocab_size=VOCAB_SIZES[0], **EOS))
    return files, least, *run(files, ranks, "single", Case("one process"))


@pytest.mark.parametrize(
    "case", [pytest.param(one, id=one.name, marks=[] if one is CASES[1] else SLOW) for one in CASES]
)
def test_every_layout_trains_as_one_process(case, single, ranks):
    files, least, expected, weights = single
    metrics, trained = run(files, ranks, case.name, case)
    assert len(metrics) == len(expected) == STEPS
    for ours, theirs in zip(metrics, expected, strict=True):
        assert max(ours["rollout/logp_gap"], theirs["rollout/logp_gap"]) < 1e-5
        for name in FIGURES:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    before = all_tensors(files / "recurrent")
    for name, tensor in weights.items():
        moved = (tensor - before[name]).abs().max()
        assert moved > least or name.endswith(KEPT_IN_FP32), name
        assert (trained[name] - tensor).abs().max() < 1e-5, name


@pytest.mark.slow
def test_models_with_towers_complete_and_judge_texts(single, ranks):
    """Student and teacher see images in other runs. PP2 is as one process, and the tower stays as it is."""
    files = single[0]
    for name, family, seed in (("seeing", "qwen3_5_moe", 3), ("judge", "qwen3_vl", 4)):
        text = dict(vocab_size=VOCAB_SIZES[name == "judge"], **EOS)
        add_tokenizer(make_vision_model(files / name, family, seed, text=text))
    flags = ("--teacher-hf", files / "judge")
    one = run(files, ranks, "one", Case("one process", 1, flags), "seeing")
    two = run(files, ranks, "two", Case("PP2", 2, (*flags, *PP2)), "seeing")
    for ours, theirs in zip(two[0], one[0], strict=True):
        for name in FIGURES:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    before = all_tensors(files / "seeing")
    unchanged = {name for name in before if torch.equal(before[name], one[1][name])}
    assert unchanged == {name for name in before if "visual" in name}
