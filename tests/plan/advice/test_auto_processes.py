"""Check the place of a teacher that a plan chooses with --teacher-processes auto, and when it cannot."""

from __future__ import annotations

import pytest

from mkd.errors import ErrorList, UsageError
from mkd.plan.advice.auto_processes import ChosenPlace, choose_place, open_problems
from mkd.plan.models.model_shape import ModelShape
from tests.plan.shapes import MOE_STUDENT, MOE_TEACHER, STUDENT, TEACHER, config
from tests.reported import reports
from tests.run_facts import facts_of

BASE = ("--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--bf16", "--use-distributed-optimizer")
AUTO = ("--teacher-processes", "auto", "--global-batch-size", 120)
DENSE = (STUDENT, TEACHER)
OWN_TEXT = ("--kd-ratio", 1, "--on-policy-fraction", 1, "--prompt-data-path", "p", "--max-new-tokens", 64)
FP8 = ("--teacher-precision", "fp8")


def chosen(pair: tuple[ModelShape, ModelShape], world_size: int, gib: float, *argv) -> ChosenPlace:
    found = facts_of(config(*BASE, *AUTO, *argv), world_size, pair[0], pair[1:])
    return choose_place(found, 0.95 * gib)


def test_a_split_that_is_faster():
    """Beside the student, the teacher fits on the host alone."""
    found = chosen(DENSE, 2, 60)
    assert found.settings == {"processes": 1}
    assert found.text.startswith("--teacher-processes auto: 1 process (1 replica), 24.1 s a step; on shared ")
    assert found.text.endswith("processes (host) 28.1 s")


def test_a_place_beside_the_student_that_is_as_fast():
    found = chosen(DENSE, 8, 80)
    assert found.settings == {"residency": "device"}
    assert found.text.startswith("--teacher-processes auto: 0, on shared processes (device) 5898 ms; 4 proc")
    peers = chosen(DENSE, 8, 56)
    assert peers.settings == {"residency": "peers", "peers": 2}


def test_the_precision_is_that_of_the_settings():
    assert "(device, fp8)" in chosen(DENSE, 4, 80, *FP8).text


def test_a_teacher_with_experts():
    more = ("--seq-length", 4096, "--expert-model-parallel-size", 8, "--global-batch-size", 256)
    found = chosen((MOE_STUDENT, MOE_TEACHER), 64, 80, *more)
    layout = {"pipeline_model_parallel_size": 8, "pipeline_layout": "12,12,12,12,12,12,11,11"}
    assert found.settings == {"processes": 32, **layout}


def test_only_a_split_is_possible():
    """Two processes share each matrix of the student, and three are there."""
    found = chosen(DENSE, 3, 80, "--tensor-model-parallel-size", 2, "--sequence-parallel")
    assert found.settings == {"processes": 1} and "nothing else is possible" in found.text


def test_nothing_to_split_or_to_fit():
    assert chosen(DENSE, 1, 80).settings == {"residency": "device"}
    assert chosen(DENSE, 4, 20).settings == {} and "no place" in chosen(DENSE, 4, 20).text


def test_problems_of_the_run_are_raised():
    with pytest.raises(ErrorList) as raised:
        chosen(DENSE, 3, 80, "--tensor-model-parallel-size", 5)
    assert "world-not-divisible" in reports(raised.value)


def test_the_chosen_settings_take_the_place_of_all():
    (teacher,) = ChosenPlace({"processes": 2, "peers": 4}, "").apply(config(*BASE, *AUTO)).teachers
    assert (teacher.processes, teacher.peers, teacher.residency) == (2, 4, "device")


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("--teacher-residency", "host"), "exclude-each-other: it chooses the place"),
        (("--teacher-pipeline-model-parallel-size", 2), "exclude-each-other: it chooses the place"),
        (("--teacher-ahead", 4), "exclude-each-other: it chooses the place"),
        (("--kd-ratio", 0), "remove-flag: no teacher is read"),
        (("--teacher-topk", "k"), "remove-flag: a stored teacher"),
        (("--teacher-prefetch", 2), "exclude-each-other: --teacher-prefetch 2 needs a teacher on shared"),
    ],
)
def test_what_is_refused(argv, code):
    assert code in reports(list(open_problems(config(*BASE, *AUTO, *argv))))


def test_text_that_the_run_samples():
    with pytest.raises(UsageError, match="out the time of sampling"):
        chosen(DENSE, 4, 80, *OWN_TEXT)


def test_the_frozen_base_of_adapters_is_shared():
    """As without `auto`, unless it has processes of its own."""
    same = ("--teacher-hf", "s", "--lora-rank", 8)
    assert config(*BASE, *same).teachers[0].residency == "student"
    found = chosen((STUDENT, STUDENT), 4, 80, *same)
    assert found.apply(config(*BASE, *AUTO, *same)).teachers[0].residency == "student"
    (apart,) = ChosenPlace({"processes": 2}, "").apply(config(*BASE, *AUTO, *same)).teachers
    assert (apart.processes, apart.residency) == (2, "device")


def test_several_teachers_and_a_batch_that_follows(tmp_path):
    (tmp_path / "run.yaml").write_text("teachers: [{hf: a, processes: auto}, {hf: b}]\n")
    several = config(*BASE, "--config", tmp_path / "run.yaml")
    assert reports(list(open_problems(several))) == ["exclude-each-other: with 2 teachers"]
    follows = config(*BASE, *AUTO[:2])
    assert reports(list(open_problems(follows))) == ["add-flag: without --global-batch-size"]
    with pytest.raises(ErrorList) as raised:
        config(*BASE, "--teacher-processes", -1)
    assert reports(raised.value) == ["value-not-valid: is not a whole number or auto"]
