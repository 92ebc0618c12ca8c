"""Check students in FP8, with a rounding for CPUs: which forwards round, and that runs resume."""

from __future__ import annotations

import pytest
import torch

from tests.models.fp8_stand_in import stand_in_students
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import Result, call_main, flags, make_files, read_metrics
from tests.train.invariance import DISTRIBUTED, FULL, SELECTIVE, SINGLE, SP, Layout, build_layout, make_pair

NUM_LAYERS, NUM_PACKS = 4, 8
SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # multiples of 16
BLOCKWISE = ("--student-precision", "fp8")
FP8 = (*BLOCKWISE, "--student-fp8-recipe", "tensorwise")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("fp8_student"), SIZES | dict(num_hidden_layers=NUM_LAYERS))


def train(layout: Layout, more: tuple[str, ...], student, teacher) -> dict:
    """Return losses and norms of two updates, evaluations around them, and layers that rounded in each."""
    from mkd.evaluation.evaluate import evaluate
    from mkd.train.step import train_step

    calls = []
    with stand_in_students(calls):
        engine, state, batches = build_layout(layout, [*layout.argv(student, teacher), "--bf16", *more])

        def evaluated() -> tuple[float, int]:
            calls.clear()
            return evaluate(engine, [batches]).token_sums()["loss"], len(calls)

        found = {"before": evaluated(), "steps": [], "rounded": []}
        for _ in range(2):
            calls.clear()
            result = train_step(engine, batches, following=batches)
            found["steps"].append((result.sums.token_sums()["loss"], result.grad_norm))
            found["rounded"].append(len(calls))
        found["after"] = evaluated()
        found["states"] = states_of(state)
        found["keeps"] = kept_weights(engine)
    return found


def states_of(state) -> list:
    """Return Transformer Engine's states in a checkpoint, which other layers have by name."""
    entries = (one.sharded_state_dict().items() for one in state.models)
    return [one.data for model in entries for name, one in model if name.endswith("_extra_state")]


def kept_weights(engine) -> tuple[bool, ...]:
    """Return True for each model whose rounded weights would be kept for later micro-batches."""
    stage = engine.stages[0].module
    return tuple(not one.config.disable_parameter_transpose_cache for one in (stage.student, *stage.teachers))


@pytest.fixture(scope="module")
def single(pair, ranks):
    """Return what one process finds, in bf16 and in FP8.

    Scales of blocks do not depend on padding, which has other tokens in other layouts.
    """
    return [ranks.run(train, 1, SINGLE, more, *pair)[0] for more in ((), BLOCKWISE)]


def test_layers_round_in_training_alone(single):
    bf16, fp8 = single
    assert fp8["rounded"] == [NUM_LAYERS * NUM_PACKS] * 2 and bf16["rounded"] == [0, 0]
    assert fp8["before"] == bf16["before"] and fp8["after"][1] == 0
    assert fp8["after"][0] != bf16["after"][0]
    loss, other = (one["steps"][0][0] for one in single)
    assert loss != other and loss == pytest.approx(other, rel=0.05)
    assert fp8["keeps"] == (False, True) and bf16["keeps"] == (True, True)
    assert fp8["states"] and all(torch.equal(one, torch.empty(0, dtype=torch.uint8)) for one in fp8["states"])


@pytest.mark.parametrize(
    ("layout", "times"),
    [
        pytest.param(SINGLE.with_flags(FULL), 2, id="full recomputation"),
        pytest.param(SINGLE.with_flags(SELECTIVE), 1, id="selective", marks=pytest.mark.slow),
        pytest.param(Layout("PP2 VPP2", 2, pp=2, vp=2, flags=DISTRIBUTED), 1, id="PP2 VPP2"),
    ],
)
def test_recomputation_and_stages_change_no_bit(layout, times, single, pair, ranks):
    """A layer that is recomputed rounds again, in backward."""
    found = ranks.run(train, layout.ranks, layout, BLOCKWISE, *pair)
    assert sum(one["rounded"][0] for one in found) == times * NUM_LAYERS * NUM_PACKS
    losses, expected = ([loss for loss, _ in one["steps"]] for one in (found[-1], single[1]))
    assert losses == expected
    norms, expected = ([norm for _, norm in one["steps"]] for one in (found[-1], single[1]))
    assert norms == pytest.approx(expected, rel=1e-6) and found[-1]["after"] == single[1]["after"]


@pytest.mark.slow
def test_tensor_parallel_processes_round_too(single, pair, ranks):
    """Scales are those of a process's share, so that losses differ a little."""
    layout = Layout("TP2 + SP", 2, tp=2, micro=4, flags=SP)
    found = ranks.run(train, 2, layout, FP8, *pair)
    assert found[0]["rounded"] == [NUM_LAYERS * NUM_PACKS // 4] * 2
    assert found[0]["steps"][0][0] == pytest.approx(single[1]["steps"][0][0], rel=0.02)


def run_in_fp8(argv: list[str]) -> tuple[int, str, str]:
    with stand_in_students():
        return call_main(argv)


def test_a_stopped_run_continues_bit_for_bit_and_its_precision_stays(ranks, tmp_path):
    files = make_files(tmp_path)
    add_tokenizer(make_model(files / "fitting", "qwen3", seed=2, num_hidden_layers=2, **SIZES))

    def run(name: str, *more) -> tuple[Result, list[dict]]:
        argv = flags(files, name, "--save", "--bf16", student_hf="fitting", teacher_hf="teacher")
        argv[argv.index("--save") + 1 : argv.index("--save") + 1] = [str(tmp_path / name / "saved")]
        argv += ["--train-iters", "4", *map(str, more)]
        result = Result(*ranks.run(run_in_fp8, 1, argv)[0])
        return result, read_metrics(tmp_path / name) if result.exit_code == 0 else []

    _, whole = run("whole", *FP8)
    first, _ = run("parts", *FP8, "--exit-interval", 2)
    assert "layers multiply in FP8 (tensorwise scales)" in first.stdout + first.stderr
    load = ("--load", tmp_path / "parts" / "saved")
    refused, _ = run("parts", *load)
    assert refused.exit_code != 0 and "student.precision" in refused.stdout + refused.stderr
    _, parts = run("parts", *FP8, *load)
    losses = [{one["iteration"]: one["loss"] for one in run if "loss" in one} for run in (whole, parts)]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    card = (tmp_path / "parts" / "loss_card.txt").read_text(encoding="utf-8")
    assert "products of its layers in FP8 (E4M3, gradients E5M2, tensorwise scales) in training" in card
