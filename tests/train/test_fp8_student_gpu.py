"""Check students in FP8 on GPUs: gradients, evaluations, states, recomputation and resumed runs."""

from __future__ import annotations

import pytest

from tests.ranks import skip_unless_gpus_take
from tests.train.command import call_main, read_metrics
from tests.train.fp8_student_steps import RECIPES, SHORT, measured
from tests.train.graphed_runs import COMMON, make_files
from tests.train.graphed_steps import GraphRow, train
from tests.train.invariance import FULL, SELECTIVE
from tests.train.test_graphs_gpu import away

pytestmark = pytest.mark.gpu
FP8 = {one: ("--student-precision", "fp8", "--student-fp8-recipe", one) for one in RECIPES}


@pytest.fixture(scope="module", params=RECIPES)
def found(request, gpu_ranks):
    return gpu_ranks.run(measured, 1, request.param)[0]


def test_gradients_of_two_packs_are_the_sum_of_theirs(found):
    """Weights are rounded in every forward, and no gradient is overwritten."""
    assert found["sum"] < 1e-6 and found["again"] == 0.0


def test_only_training_rounds(found):
    assert found["evaluation"] == 0.0 and found["states"] == 0
    assert found["finite"] and 0.01 < found["from bf16"] < 0.3 and 0 < found["loss"] < 0.01


def test_packs_need_multiples_of_16_tokens(found):
    assert found["short"] == [True] * len(SHORT)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_changes_no_bit(recipe, gpu_ranks):
    whole, *others = (
        gpu_ranks.run(train, 1, GraphRow(recipe, flags=(*FP8[recipe], *more)), False)[0]
        for more in ((), FULL, SELECTIVE)
    )
    for other in others:
        assert away(whole, other) == {"losses": 0.0, "norms": 0.0, "weights": 0.0}


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("tensorwise", ()),
        ("blockwise", ()),
        ("tensorwise", ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
        ("blockwise", ("--pipeline-model-parallel-size", "2")),
        ("tensorwise", ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")),
    ],
    ids=lambda one: one if isinstance(one, str) else one[0].strip("-") if one else "one GPU",
)
def test_a_stopped_run_continues_bit_for_bit(recipe, layout, gpu_ranks, tmp_path):
    """It resumes with CUDA graphs, which the first part had as well."""
    ranks = 2 if layout else 1
    skip_unless_gpus_take(ranks)
    files = make_files(tmp_path)

    def losses(name: str, *more) -> dict[int, float]:
        flags = [
            *COMMON.replace("--no-save", "").split(),
            "--log-dir",
            tmp_path / name,
            *FP8[recipe],
            *layout,
        ]
        flags += ["--student-hf", files / "student", "--teacher-hf", files / "teacher", *more]
        flags += ["--data-path", files / "text.jsonl", "--data-cache-path", files / "cache"]
        results = gpu_ranks.run(
            call_main, ranks, [*map(str, flags), "--save", str(tmp_path / name / "saved")]
        )
        assert all(code == 0 for code, _, _ in results), results[0][1][-800:] + results[0][2][-800:]
        records = read_metrics(tmp_path / name)
        return {one["iteration"]: (one["loss"], one["grad_norm"]) for one in records if "grad_norm" in one}

    whole = losses("whole")
    losses("parts", "--exit-interval", 5)
    assert losses("parts", "--load", tmp_path / "parts" / "saved") == whole and len(whole) == 8
