"""Check what stored hidden states refuse, and what they leave free, before anything is loaded."""

from __future__ import annotations

import pytest

from tests.plan.checks.test_problems import shape
from tests.plan.shapes import config
from tests.reported import reports
from tests.run_facts import problems_of

BASE = ("--student-hf", "s", "--data-path", "d.jsonl", "--train-iters", 10, "--seq-length", 64)
HIDDEN = "--teacher-hidden", "folder"


def codes(*argv, world_size: int = 1, teachers=()) -> list[str]:
    return reports(problems_of(config(*BASE, *argv), world_size, shape(), teachers))


def of_file(tmp_path, text: str, *argv) -> list[str]:
    path = tmp_path / "run.yaml"
    path.write_text(f"teachers: [{text}]\n")
    return codes("--config", path, *argv)


def test_any_divergence_and_temperature():
    assert codes(*HIDDEN, "--kd-divergence", "jsd", "--kd-temperature", 3, "--kd-fp32-logits", "--bf16") == []


@pytest.mark.parametrize(
    "argv, code",
    [
        (("--teacher-topk", "k"), "stored-teacher-excludes: is given for a teacher with topk"),
        (("--teacher-residency", "host"), "remove-flag: no effect"),
        (
            ("--teacher-prefetch", 2, "--pipeline-model-parallel-size", 2),
            "teacher-prefetch-not-possible: no teacher runs",
        ),
        (("--on-policy-fraction", 1, "--prompt-data-path", "p"), "rollouts-exclude: a stored teacher"),
        (("--dpo-beta", 0.1), "preferences-exclude: with teacher-hidden"),
    ],
)
def test_refused_settings(argv, code):
    assert code in codes(*HIDDEN, *argv, world_size=2)


def test_teachers_that_run_come_first(tmp_path):
    second = "{hidden: folder, name: b}"
    assert of_file(tmp_path, "{hf: t}, " + second) == []
    (found,) = of_file(tmp_path, second + ", {hf: t}")
    assert found == "stored-teacher-excludes: is in front of"
    both = of_file(tmp_path, "{hidden: a, name: a}, " + second, "--teacher-combination", "average")
    assert both == []
    (found,) = of_file(tmp_path, "{topk: a, name: a}, " + second)
    assert found == "stored-teacher-excludes: is given, and 2 teachers"
    (found,) = of_file(tmp_path, "{hidden: a, xtoken: {loss: gold}}")
    assert found == "stored-teacher-excludes: is given for a teacher with xtoken settings"
