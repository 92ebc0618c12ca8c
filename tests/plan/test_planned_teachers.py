from __future__ import annotations

import pytest

from mkd.config.models import XTokenConfig, teacher_names, teacher_roles
from mkd.plan.planned_teachers import Teacher, plan_teachers
from tests.plan.shapes import SEQ_LENGTH, STUDENT, TEACHER, several


@pytest.mark.parametrize(
    ("teachers", "names"),
    [
        ([], ()),
        ([{"hf": "org/Qwen3-8B"}], ("Qwen3-8B",)),
        ([{"hf": "runs/teacher/"}, {"hf": "other/teacher"}], ("teacher", "teacher-1")),
        ([{"hf": "x/big"}, {"name": "big"}], ("big-0", "big")),  # given names do not change
        ([{"hf": None, "load": "ckpt/a b"}, {"hf": None, "topk": "/cache"}], ("a-b", "cache")),
        ([{"hf": "."}, {"hf": None}], ("teacher0", "teacher1")),
    ],
)
def test_names(teachers, names):
    assert teacher_names(several(*teachers).teachers) == names


def test_a_single_teacher_needs_no_name():
    assert teacher_roles(several({}).teachers) == ("teacher",)
    assert teacher_roles(several({}, {"name": "b"}).teachers) == ("teacher t0", "teacher b")


def test_what_a_plan_knows_of_teachers():
    settings = several(
        {},
        {"xtoken": XTokenConfig(), "residency": "host"},
        {"xtoken": XTokenConfig(seq_length=9), "residency": "peers", "peers": 4},
    )
    assert plan_teachers(settings, (TEACHER, STUDENT, TEACHER)) == (
        Teacher(TEACHER, "teacher t0", SEQ_LENGTH, is_cross_tokenizer=False, residency="device"),
        Teacher(STUDENT, "teacher t1", SEQ_LENGTH, is_cross_tokenizer=True, residency="host"),
        Teacher(TEACHER, "teacher t2", 9, is_cross_tokenizer=True, residency="peers", peers=4),
    )
    assert plan_teachers(settings, ()) == (), "with kd-ratio 0 none runs"
