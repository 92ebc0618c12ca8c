"""Check that only the settings that it reads are checked for a model that runs alone."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.plan.checks.model_alone import ModelAlone
from tests.plan.checks.test_problems import shape
from tests.reported import reports
from tests.run_facts import problems_of_one

STUDENT = ["--student-hf", "s"]
PP2 = ["--pipeline-model-parallel-size", "2"]


def codes(*argv: str, world_size: int = 1, model=None, teacher: int | None = None) -> list[str]:
    config = load_config([*argv]).config
    return reports(problems_of_one(config, world_size, model, teacher))


def test_settings_of_training_may_be_missing_or_wrong():
    assert codes(*STUDENT, model=shape()) == []
    assert codes(*STUDENT, "--train-iters", "0", "--kd-ratio", "7", "--split", "x", model=shape()) == []


def test_the_model_must_be_given():
    assert codes("--teacher-hf", "t") == ["model-missing"]
    assert codes(*STUDENT, "--teacher-topk", "c", teacher=0) == ["model-missing"]
    assert codes("--teacher-hf", "t", teacher=0) == []


@pytest.mark.parametrize(
    ("argv", "world_size", "code"),
    [
        (["--micro-batch-size", "0"], 1, "out-of-range: must be"),
        (["--tensor-model-parallel-size", "2"], 3, "world-not-divisible: cannot be divided into replicas"),
        (["--tensor-model-parallel-size", "5"], 5, "model-not-divisible: is not divisible by"),
        (
            ["--context-parallel-size", "2", "--seq-length", "63"],
            2,
            "length-not-divisible: is not divisible by 2 x",
        ),
        (["--num-virtual-stages-per-pipeline-rank", "2"], 1, "remove-flag: virtual pipeline stages need"),
        ([*PP2, "--student-pipeline-layout", "8,8"], 2, "layout-not-valid: layers, the model has"),
        (["--pipeline-model-parallel-size", "3"], 3, "layers-not-divisible: layers do not divide over"),
    ],
)
def test_what_the_model_reads_is_checked(argv, world_size, code):
    assert codes(*STUDENT, *argv, world_size=world_size, model=shape(8)) == [code]


def test_a_teacher_has_its_own_layout():
    argv = [*STUDENT, "--teacher-hf", "t", *PP2, "--teacher-pipeline-layout", "5,3"]
    config = load_config(argv).config
    assert problems_of_one(config, 2, shape(8), teacher=0) == []
    assert ModelAlone(config, 2, shape(8), teacher=0).layout.layers == (5, 3)
    assert ModelAlone(config, 2, shape(8)).layout.layers == (4, 4)
    auto = load_config([*STUDENT, *PP2, "--pipeline-layout", "auto"]).config
    assert sum(ModelAlone(auto, 2, shape(9)).layout.layers) == 9
