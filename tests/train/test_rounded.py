"""Rounded students: equal bits at every layout, gradients at the rounded weights, and runs that resume."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saved_tensors import all_tensors
from tests.reported import refused
from tests.rounding.plain_rounding import rounded
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import flags, make_files, read_metrics, run_main
from tests.train.invariance import DISTRIBUTED, SINGLE, SP, Layout, build_layout, export_student, make_pair

SIZES = dict(hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
INT4 = ("--student-rounding", "int4", "--rounding-group", "32")
W4A4 = ("--student-rounding", "nvfp4", "--round-activations", "--calibration-batches", "1")
W8A8 = ("--student-rounding", "int8", "--round-activations")
UPDATES = 3
LAYOUTS = {  # -> relative difference of gradient norms, from the order of their sums
    Layout("PP2 VPP2", 2, pp=2, vp=2): 1e-6,
    Layout("DP2 + distributed optimizer", 2, flags=DISTRIBUTED): 1e-6,
    Layout("TP2 PP2 + SP, distributed", 4, tp=2, pp=2, flags=SP + DISTRIBUTED): 2e-2,  # products in bf16
}


def train(layout: Layout, more: tuple[str, ...], student: Path, teacher: Path, out: Path) -> list:
    """Export the weights of training before and after some updates, and the exact ones after them.

    Return loss and gradient norm of each update.
    """
    from mkd.train.step import train_step

    argv = [*layout.argv(student, teacher), "--bf16", *more]
    engine, state, batches = build_layout(layout, argv)
    export_student(engine, state, student, out / "start")
    found = []
    for _ in range(UPDATES):
        result = train_step(engine, batches, following=batches)
        found.append((result.sums.token_sums()["loss"], result.grad_norm))
    export_student(engine, state, student, out / "end")
    with engine.optimizer.exact_weights():
        export_student(engine, state, student, out / "exact")
    export_student(engine, state, student, out / "again")
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), SIZES)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(INT4, id="int4"),
        pytest.param(W4A4, id="nvfp4 W4A4"),
        pytest.param(W8A8, id="int8 W8A8", marks=pytest.mark.slow),
    ],
)
def single(request, pair, ranks, tmp_path_factory):
    out = tmp_path_factory.mktemp("single")
    (found,) = ranks.run(train, 1, SINGLE, request.param, *pair, out)
    return request.param, out, found


def equal(first: Path, second: Path) -> bool:
    """Return True if two folders hold the same tensors."""
    ours, theirs = all_tensors(first), all_tensors(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def require_rounded(folder: Path, exact: Path, name: str) -> None:
    """Compare with the definition of the format: matrices of layers are rounded, and nothing else is."""
    found, wanted = all_tensors(folder), all_tensors(exact)
    fused = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    for tensor, weight in wanted.items():
        weight = weight.bfloat16()
        if "_proj" in tensor:
            own, parts = next(
                ((one, parts) for parts in fused for one in parts if one in tensor), ("", ("",))
            )
            peaks = [
                wanted[tensor.replace(own, one) if own else tensor].bfloat16().abs().max() for one in parts
            ]
            group = 32 if name == "int4" else None
            weight = rounded(weight, name, torch.stack(peaks).max().float(), group).bfloat16()
        assert torch.equal(found[tensor], weight), tensor


def test_weights_are_rounded_from_exact_ones(single, pair):
    more, out, _ = single
    require_rounded(out / "start", pair[0], more[1])
    require_rounded(out / "end", out / "exact", more[1])
    assert not equal(out / "start", out / "end") and equal(out / "end", out / "again")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, id=one.name, marks=[] if one.tp > 1 else pytest.mark.slow) for one in LAYOUTS],
)
def test_layouts_round_to_the_same_bits(layout, single, pair, ranks, tmp_path):
    more, out, expected = single
    if more == INT4 and os.environ.get("MKD_SLOW") != "1":
        pytest.skip("slow: nvfp4 has more to gather")
    found = ranks.run(train, layout.ranks, layout, more, *pair, tmp_path)[-1]
    assert equal(tmp_path / "start", out / "start")
    require_rounded(tmp_path / "end", tmp_path / "exact", more[1])
    assert equal(tmp_path / "end", tmp_path / "again")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=LAYOUTS[layout], abs=0)
    if LAYOUTS[layout] < 1e-5:
        assert [loss for loss, _ in found] == [loss for loss, _ in expected]


def test_gradients_are_those_of_an_ordinary_model_with_rounded_weights(single, pair, ranks, tmp_path):
    more, out, expected = single
    if more != INT4:
        pytest.skip("rounded inputs have gradients as if they were exact")
    folder = add_tokenizer(out / "start")
    (folder / "text.txt").write_text("the quick brown fox\n", encoding="utf-8")
    (found,) = ranks.run(train, 1, SINGLE, (), folder, pair[1], tmp_path)
    assert found[0] == expected[0] and found[1] != expected[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = make_files(tmp_path_factory.mktemp("files"))
    make_model(folder / "wide", "llama", seed=5, num_hidden_layers=2, **SIZES)
    add_tokenizer(folder / "wide")
    return folder


@pytest.mark.parametrize(
    "more", [pytest.param(INT4, id="int4", marks=pytest.mark.slow), pytest.param(W4A4[:3], id="nvfp4 W4A4")]
)
def test_a_stopped_run_continues_bit_for_bit_and_other_layouts_read_it(more, files, ranks, tmp_path):
    rounding = more + (("--calibration-batches", "3") if "--round-activations" in more else ())

    def run(name: str, *words, world: int = 1) -> None:
        argv = flags(files, name, student_hf="wide", teacher_hf=None)
        argv = [word for word in argv if word != "--no-save"]
        argv += ["--teacher-hf", "student-initial", "--bf16", "--kd-ratio", "1", *rounding]
        argv += ["--train-iters", "4", "--save", tmp_path / name, "--export-hf", tmp_path / f"{name}-hf"]
        (result, *_) = run_main(ranks, [*map(str, argv), *map(str, words)], world)
        assert result.exit_code == 0, result.stderr

    run("whole")
    run("parts", "--exit-interval", 2)
    state = json.loads((tmp_path / "parts" / "iter_0000002" / "mkd.json").read_text())["rounding"]
    assert state["format"] == more[1] and not state.get("is_calibrated")
    run("parts", "--load", tmp_path / "parts", "--overwrite")
    assert equal(tmp_path / "parts-hf", tmp_path / "whole-hf")
    # Nothing is left to train: what TP2 loads, rounds and exports is the same.
    two = ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--load", tmp_path / "whole")
    run("two", *two, world=2)
    assert equal(tmp_path / "two-hf", tmp_path / "whole-hf")
    argv = ["--load", str(tmp_path / "whole"), "--hf-out", str(tmp_path / "converted")]
    (result,) = run_main(ranks, argv, command="mkd.commands.export")
    assert result.exit_code == 0 and more[1] in result.stdout, result.stderr
    assert equal(tmp_path / "converted", tmp_path / "whole-hf")
    # It is no other run's teacher before it is exported.
    argv = flags(files, "refused", student_hf="wide", teacher_hf=None)
    argv += ["--teacher-hf", str(files / "wide"), "--teacher-load", str(tmp_path / "whole")]
    (result,) = run_main(ranks, argv)
    assert "error[checkpoint-of-another-model]" in result.stderr
    ranks.run(require_no_scores, 1, files / "wide", tmp_path / "whole")


def require_no_scores(folder: Path, checkpoint: Path) -> None:
    """Let lm-evaluation-harness's model load a checkpoint of a rounded student: it is refused."""
    from mkd.evaluation.harness_model import ScoredModel

    with refused("checkpoint-of-another-model: holds the exact weights"):
        ScoredModel.load(folder, checkpoint, None, "bf16")


def test_rollouts_sample_from_the_rounded_student(ranks, tmp_path):
    from tests.train.rollout_run import argv
    from tests.train.rollout_run import make_files as make_rollout_files

    folder = make_rollout_files(tmp_path)
    more = ("--bf16", "--no-save", "--train-iters", 2, "--student-rounding", "nvfp4", "--round-activations")
    (result,) = run_main(ranks, argv(folder, "run", *more, "--calibration-batches", 1))
    assert result.exit_code == 0, result.stderr
    _, second = read_metrics(folder / "run")
    # What sampled and what is trained are the same model: in bf16 their probabilities are this close.
    assert second["rollout/logp_gap"] < 0.05, second
