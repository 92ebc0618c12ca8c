"""Check the sides of a run with teachers on processes of their own, and what its settings refuse."""

from __future__ import annotations

import json
import math

import pytest

from mkd.config.load import load_config
from mkd.errors import UsageError
from mkd.kinds.known_kinds import KINDS
from mkd.plan.checks.model_alone import ModelAlone
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.sides import (
    apart_teachers,
    processes_apart,
    requests_ahead,
    side_of_teacher,
    student_processes,
    teacher_sizes,
)
from mkd.run.early_checks import early_problems
from tests.plan.checks.test_problems import shape
from tests.plan.shapes import config
from tests.reported import reports
from tests.run_facts import problems_of

BASE = ("--student-hf", "s", "--data-path", "d.jsonl", "--train-iters", 10, "--seq-length", 64)
BASE += ("--teacher-hf", "t")


def codes(*argv, world_size: int = 1) -> list[str]:
    return reports(problems_of(config(*BASE, *argv), world_size, shape()))


def test_settings_of_a_side_need_processes():
    (found,) = codes("--teacher-tensor-model-parallel-size", 2)
    assert found == "remove-flag: no effect"


@pytest.mark.parametrize(
    "argv, code",
    [
        (("--teacher-processes", -2), "out-of-range: must be 0 or more"),
        (("--teacher-processes", 2, "--teacher-ahead", 1), "out-of-range: must be 2 or more"),
        (
            ("--teacher-processes", 6, "--teacher-pipeline-model-parallel-size", 4),
            "world-not-divisible: --teacher-processes 6",
        ),
        (("--teacher-processes", 9), "world-not-divisible: 9 replicas of the teacher"),
        (("--teacher-processes", 1, "--teacher-topk", "k"), "stored-teacher-excludes: with topk"),
        (
            ("--teacher-processes", 2, "--teacher-expert-model-parallel-size", 2),
            "exclude-each-other: share its experts",
        ),
        (
            ("--teacher-processes", 2, "--teacher-residency", "peers", "--teacher-peers", 2),
            "exclude-each-other: exchange the layers",
        ),
    ],
)
def test_refused_settings(argv, code):
    assert code in codes(*argv)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the flags of a run whose files exist, as far as the checks before torch read them."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "d.jsonl").write_text('{"text": "a"}\n')
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 307}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 8, **sizes}))
    flags = ["--student-hf", folder, "--data-path", folder / "d.jsonl", "--train-iters", 10]
    return [*map(str, flags), "--seq-length", "64"]


def early(*argv, world_size: int = 1) -> list[str]:
    """Return the problems of all sides."""
    return reports(early_problems(load_config([*map(str, argv)]).config, world_size))


PEERS = ("--teacher-residency", "peers", "--teacher-peers")


@pytest.mark.parametrize(
    "flags, code",
    [
        (
            ("--teacher-processes", 1, "--teacher-prefetch", 4),
            "teacher-prefetch-not-possible: but no teacher shares the student's processes",
        ),
        (("--teacher-processes", 1, *PEERS, 2), "exclude-each-other: 2 processes exchange the layers"),
        (
            ("--teacher-processes", 4, "--teacher-context-parallel-size", 2, *PEERS, 3),
            "exclude-each-other: 3 processes exchange the layers",
        ),
        (
            ("--teacher-processes", 2, "--teacher-tensor-model-parallel-size", 2, *PEERS, 2),
            "exclude-each-other: 4 processes exchange the layers",
        ),
        (("--teacher-processes", 1, *PEERS[:2]), "add-flag: but no --teacher-peers"),
        (
            ("--teacher-processes", 2, "--teacher-expert-model-parallel-size", 2),
            "exclude-each-other: 2 processes share its experts",
        ),
        (
            ("--teacher-processes", 2, "--teacher-expert-model-parallel-size", 3, *PEERS, 2),
            "exclude-each-other: 3 processes share its experts",
        ),
    ],
)
def test_one_mistake_is_one_error_on_all_sides(files, flags, code):
    assert early(*files, "--teacher-hf", files[1], *flags) == [code]


def test_a_teacher_with_processes_and_a_place():
    flags = ("--teacher-processes", 2, "--teacher-pipeline-model-parallel-size", 2)
    assert codes(*flags, "--teacher-residency", "host", world_size=2) == []


@pytest.mark.parametrize(
    "flags", [("--xtoken-loss", "gold"), ("--dpo-beta", 0.1, "--kd-ratio", 0)], ids=["tokenizer", "pairs"]
)
def test_a_teacher_with_another_tokenizer_or_a_reference(flags):
    assert codes("--teacher-processes", 1, *flags) == []


def test_processes_alone_name_no_teacher():
    flags = [*map(str, BASE[:-2]), "--teacher-processes", "1"]
    (found,) = reports(problems_of(load_config(flags).config, 1, shape()))
    assert found.startswith("model-missing")
    (reference,) = load_config([*flags, "--dpo-beta", "0.1", "--kd-ratio", "0"]).config.teachers
    assert (reference.hf, reference.processes) == ("s", 1)


def test_the_text_may_be_the_students_own():
    flags = (
        "--on-policy-fraction",
        1,
        "--prompt-data-path",
        "p.jsonl",
        "--max-new-tokens",
        8,
        "--kd-ratio",
        1,
    )
    assert codes("--teacher-processes", 1, *flags) == []


def test_rows_that_the_students_processes_cannot_share():
    flags = ("--teacher-processes", 1, "--tensor-model-parallel-size", 2, "--seq-length")
    assert codes(*flags, 1024, world_size=2) == []
    (found,) = codes(*flags, 1025, world_size=2)
    assert found.startswith("length-not-divisible")


def test_rows_of_a_context_that_the_teachers_processes_cannot_share(tmp_path):
    path, models = tmp_path / "run.yaml", "{hf: a, processes: 2, tensor_model_parallel_size: 2"
    for length, expected in ((1024, []), (1025, ["length-not-divisible"])):
        path.write_text(f"teachers: [{models}, context: {{seq_length: {length}}}}}]\n")
        found = reports(problems_of(config(*BASE[:-2], "--config", path), 1, shape()))
        assert [one.partition(":")[0] for one in found] == expected


@pytest.mark.parametrize("own", ["xtoken", "context", None])
@pytest.mark.parametrize(
    "student, teacher, bad, good",  # lengths that do not divide; the one that the error proposes
    [
        ({}, {"tensor": 2}, (1025,), 1026),
        ({}, {"context": 2}, (1025, 1026), 1028),
        ({"tensor": 2}, {}, (1025,), 1026),
        ({"tensor": 2, "sequence": True}, {}, (1025,), 1026),
        ({"tensor": 2, "sequence": True}, {"tensor": 2}, (1025,), 1026),
        ({"context": 2}, {}, (1025, 1026), 1028),
        ({"context": 2}, {"context": 2, "tensor": 2}, (1025, 1026, 1027), 1028),
        ({"context": 3}, {"tensor": 4}, (1025, 1026, 1028), 1032),
        ({"tensor": 3}, {"context": 2}, (1025, 1026, 1028), 1032),
    ],
)
def test_a_length_that_no_layout_divides_is_one_error(files, tmp_path, own, student, teacher, bad, good):
    """It proposes a length that fits the layouts of all sides, with which the run has no problem."""
    sizes = {f"{name}_{'model_' * (name == 'tensor')}parallel_size": n for name, n in teacher.items()}
    one = {"hf": files[1], "processes": math.prod(teacher.values()), **sizes}
    names = {"tensor": "--tensor-model-parallel-size", "context": "--context-parallel-size"}
    layout = [word for name, n in student.items() if name in names for word in (names[name], n)]
    layout += ["--sequence-parallel"] * ("sequence" in student)
    flags, path = [*files[:-2], *layout, "--config", tmp_path / "run.yaml"], tmp_path / "run.yaml"
    world_size = student.get("tensor", 1) * student.get("context", 1)

    def found(length: int) -> list[str]:
        given = one if own is None else {**one, own: {"seq_length": length}}
        path.write_text(json.dumps({"teachers": [given]}))
        # The tensor size 3 divides no model here: that is another mistake.
        every = early(*flags, "--seq-length", length if own is None else 1032, world_size=world_size)
        return [problem for problem in every if problem == "length-not-divisible"]

    for length in bad:
        (problem,) = found(length)
        assert f"seq_length {good}" in problem.text.replace("-", "_"), problem.text
    assert found(good) == []


def test_peers_of_a_replica():
    flags = ("--teacher-processes", 4, "--teacher-context-parallel-size", 2, "--teacher-residency", "peers")
    assert codes(*flags, "--teacher-peers", 2, world_size=2) == []


def test_teachers_in_any_order_but_stored_ones_last(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("teachers: [{hf: a, processes: 1}, {hf: b}, {hf: c, processes: 1}]\n")
    assert codes_of(path) == []
    path.write_text("teachers: [{hidden: a}, {hf: b, processes: 1}, {hf: c}]\n")
    assert codes_of(path) == ["stored-teacher-excludes: teachers[2]", "exclude-each-other: it is behind"]


def codes_of(path) -> list[str]:
    return reports(problems_of(config(*BASE[:-2], "--config", path), 1, shape()))


def test_sides():
    flags = ("--teacher-processes", 4, "--teacher-pipeline-model-parallel-size", 2)
    found = config(*BASE, *flags, "--teacher-residency", "host", "--context-parallel-size", 2)
    (teacher,) = apart_teachers(found).values()
    assert processes_apart(found) == 4 and student_processes(found, 6) == 2
    assert teacher_sizes(teacher) == Sizes(pipeline=2, data=2)
    assert requests_ahead(teacher, 1) == 12 and requests_ahead(teacher, 4) == 3
    alone = side_of_teacher(found, 0)
    assert alone.parallel.context_parallel_size == 1 and alone.parallel.pipeline_model_parallel_size == 2
    assert alone.teachers[0].stand_in is None and alone.teachers[0].residency == "host"
    assert not apart_teachers(config(*BASE, *flags, "--kd-ratio", 0))


def test_a_student_without_processes():
    with pytest.raises(UsageError) as error:
        student_processes(config(*BASE, "--teacher-processes", 4), 4)
    assert error.value.code == "world-not-divisible"


def test_the_rule_of_the_run_splits_the_layers_of_a_side(files):
    """8 layers over 3 stages: the error's own remedies work, and a layout that is given wins."""
    own = (*files, "--teacher-hf", files[1], "--teacher-processes", 3)
    own = (*own, "--teacher-pipeline-model-parallel-size", 3)
    assert "layers-not-divisible: layers do not divide over" in early(*own, world_size=4)
    given = ("--teacher-pipeline-layout", "3,3,2")
    for more in (given, ("--pipeline-layout", "auto"), (*given, "--pipeline-layout", "auto")):
        settings = load_config([*map(str, (*own, *more))]).config
        assert reports(early_problems(settings, 1)) == []
        alone = ModelAlone(side_of_teacher(settings, 0), 3, ModelShape.from_hf_dir(files[1]), 0, KINDS, 1)
        layers = alone.layout.layers
        assert sum(layers) == 8 and len(layers) == 3 and (layers == (3, 3, 2) or given[0] not in more)
