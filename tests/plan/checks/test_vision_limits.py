"""Refusals of settings of models with images."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.errors import UsageError
from mkd.plan.checks.vision_limits import check_train_parts, check_vision, require_deepstack_layers
from mkd.plan.models.model_shape import ModelShape
from tests.plan.shapes import STUDENT as TEXT
from tests.reported import Reported, reports
from tests.run_facts import facts_of, problems_of_one
from tests.tiny_vision_models import vision_config

DEEP = ModelShape.from_hf_config(vision_config("qwen3_vl", text=dict(num_hidden_layers=4)).to_dict())
PP, LAYOUT = "--pipeline-model-parallel-size", "--student-pipeline-layout"


def settings(*argv):
    return load_config(["--student-hf", "s", "--teacher-hf", "t", *map(str, argv)]).config


@pytest.mark.parametrize(
    ("argv", "student", "expected"),
    [
        ((), DEEP, []),
        (("--student-train-parts", "text"), DEEP, []),
        (("--student-train-parts", "text", "eyes"), DEEP, ["value-unknown: is not a known value"]),
        (("--student-train-parts", "tower"), DEEP, ["value-not-valid: leaves out text"]),
        (("--student-train-parts", "text", "tower"), TEXT, ["remove-flag: no effect"]),
        (("--image-token-share", 0), DEEP, []),
        (("--image-token-share", 0), TEXT, ["remove-flag: no effect"]),
        ((PP, 2), DEEP, []),
        ((PP, 4), DEEP, ["layout-not-valid: features of the vision tower"]),
        ((PP, 2, LAYOUT, "1,3"), DEEP, ["layout-not-valid: features of the vision tower"]),
        (
            (PP, 2, "--num-virtual-stages-per-pipeline-rank", 2),
            DEEP,
            ["layout-not-valid: features of the vision tower"],
        ),
    ],
)
def test_settings_of_models_with_images(argv, student, expected):
    facts = facts_of(settings(*argv), 4, student, [TEXT])
    found = [*check_train_parts(facts), *check_vision(facts)]
    assert reports(found) == expected
    if expected == ["layout-not-valid: features of the vision tower"]:
        assert LAYOUT in found[0].report()


@pytest.mark.parametrize("teacher", [None, 0])
def test_a_model_alone_is_checked_too(teacher):
    """As `mkd evaluate` and `mkd topk` run one."""
    assert problems_of_one(settings(PP, 2), 4, DEEP, teacher) == []
    (problem,) = problems_of_one(settings(PP, 4), 4, DEEP, teacher)
    assert Reported.of(problem) == "layout-not-valid: features of the vision tower"


def test_a_teachers_first_stage_is_checked_too():
    layouts = (), ("--teacher-pipeline-layout", "1,3")
    even, uneven = (facts_of(settings(PP, 2, *layout), 2, DEEP, [DEEP]) for layout in layouts)
    require_deepstack_layers(even)
    with pytest.raises(UsageError) as error:
        require_deepstack_layers(uneven)
    assert Reported.of(error.value) == "layout-not-valid: features of the vision tower"
    assert "--teacher-pipeline-layout" in error.value.report()
