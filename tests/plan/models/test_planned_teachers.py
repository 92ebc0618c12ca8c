from __future__ import annotations

import pytest

from mkd.config.models import XTokenConfig, teacher_names, teacher_roles
from mkd.kinds.placed.fp8 import Fp8
from mkd.kinds.placed.host_place import HostMemory
from mkd.kinds.placed.peer_place import PeerMemory
from mkd.kinds.placed.place import DeviceMemory
from mkd.kinds.placed.precision import Precision
from mkd.plan.models.planned_teachers import Teacher
from tests.plan.shapes import SEQ_LENGTH, STUDENT, TEACHER, several
from tests.run_facts import facts_of


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
    assert teacher_roles(("t0",)) == ("teacher",)
    assert teacher_roles(("t0", "b")) == ("teacher t0", "teacher b")


def test_what_a_plan_knows_of_teachers():
    settings = several(
        {},
        {"xtoken": XTokenConfig(), "residency": "host"},
        {"xtoken": XTokenConfig(seq_length=9), "residency": "peers", "peers": 4}
        | {"precision": "fp8", "fp8_recipe": "blockwise"},
    )
    assert facts_of(settings, 1, STUDENT, (TEACHER, STUDENT, TEACHER)).planned_teachers == (
        Teacher(TEACHER, "teacher t0", SEQ_LENGTH, False, DeviceMemory(), Precision()),
        Teacher(
            STUDENT,
            "teacher t1",
            SEQ_LENGTH,
            True,
            HostMemory(),
            Precision(),
            has_own_row=True,
            number=1,
            is_length_known=False,
        ),
        Teacher(TEACHER, "teacher t2", 9, True, PeerMemory(4), Fp8("blockwise"), has_own_row=True, number=2),
    )
    assert facts_of(settings, 1, STUDENT).planned_teachers == (), "with kd-ratio 0 none runs"
