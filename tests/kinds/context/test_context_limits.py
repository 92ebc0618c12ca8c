"""Check what a teacher with a context refuses before anything is loaded."""

from __future__ import annotations

import json

import pytest

from mkd.config.load import load_config
from tests.plan.checks.test_problems import BASE, shape
from tests.reported import reports
from tests.run_facts import problems_of

FRESH = ("--on-policy-fraction", "1", "--prompt-data-path", "p.jsonl", "--max-new-tokens", "8")


def problems(tmp_path, *flags, context=None, several=False, **teacher):
    path = tmp_path / "context.yaml"
    teachers = [{"hf": "t", "context": context or {}} | teacher, *([{"hf": "u"}] * several)]
    teachers = [{key: value for key, value in one.items() if value is not None} for one in teachers]
    path.write_text(json.dumps({"teachers": teachers}))
    argv = [*BASE[:2], *BASE[4:], "--config", str(path), *flags]
    shapes = [] if teacher.get("topk") else [shape()] * len(teachers)
    return reports(problems_of(load_config(argv).config, 1, shape(), shapes))


def test_a_teacher_with_a_context_is_no_problem(tmp_path):
    assert problems(tmp_path) == []
    assert (
        problems(tmp_path, several=True, context={"user": "{prompt} {{x}} {solution}", "skip_first": 2}) == []
    )
    assert problems(tmp_path, "--teacher-residency", "host", "--kd-ratio", "0") is not None
    assert problems(tmp_path, *FRESH, "--kd-ratio", "1") == []


def live(tmp_path, *flags, **teacher):
    path = tmp_path / "live.yaml"
    given = {"weights": "live", "context": {}} | teacher
    given = {key: value for key, value in given.items() if value is not None}
    path.write_text(json.dumps({"teachers": [given]}))
    config = load_config([*BASE[:2], *BASE[4:], "--config", str(path), *flags]).config
    return config, reports(problems_of(config, 1, shape(), [shape()]))


def test_a_live_teacher_is_the_student(tmp_path):
    config, found = live(tmp_path)
    assert found == [] and config.teachers[0].hf == "s" and config.parallel.teacher_prefetch == "0"
    rewarded = (*FRESH, "--reward", "m:f", "--samples-per-prompt", "4", "--kd-ratio")
    for ratio in ("1", "0.5"):  # it is no reference, whose weights would be frozen
        config, found = live(tmp_path, *rewarded, ratio, context={"user": "{prompt} {sibling}"})
        assert found == [] and config.teachers[0].residency == "student"
    assert "value-not-valid: it has a residency" in live(tmp_path, residency="host")[1]
    assert live(tmp_path, "--dpo-beta", "0.1", "--kd-ratio", "0")[1]


@pytest.mark.parametrize(
    "flags, teacher",
    [
        ((), {"hf": "t"}),
        ((), {"context": None}),
        ((), {"hf": "s", "residency": "host"}),
        ((), {"precision": "fp8"}),
        (("--teacher-prefetch", "2"), {}),
        (("--student-rounding", "int8", "--bf16"), {}),
    ],
)
def test_what_a_live_teacher_cannot_have(flags, teacher, tmp_path):
    _, found = live(tmp_path, *flags, **teacher)
    assert any(one.startswith("value-not-valid") for one in found), found


def test_rewards_fill_prompts_with_or_without_a_policy_loss(tmp_path):
    siblings, feedback = {"user": "{prompt} {sibling}"}, {"fallbacks": ["{prompt} {feedback}"]}
    ratio = ("--kd-ratio", "1", *FRESH)
    rewarded = (*ratio, "--reward", "m:f", "--samples-per-prompt", "4")
    assert [one[:8] for one in problems(tmp_path, *ratio, context=siblings)] == ["add-flag"]
    assert problems(tmp_path, *rewarded, context=siblings) == []
    assert problems(tmp_path, *rewarded, "--kd-ratio", "0.5", context=siblings) == []
    alone = (*rewarded, "--samples-per-prompt", "1")
    assert problems(tmp_path, *alone, context=feedback) == []
    assert any(one.startswith("reward-needs") for one in problems(tmp_path, *alone, context=siblings))
    assert any(one.startswith("reward-needs") for one in problems(tmp_path, *rewarded))


@pytest.mark.parametrize(
    "context, code",
    [
        ({"user": "{prompt} {0.x}"}, "value-not-valid: is not a template"),
        ({"system": "{} no"}, "value-not-valid: is not a template"),
        ({"user": "{open"}, "value-not-valid: is not a template"),
        ({"fallbacks": ["{}"]}, "value-not-valid: is not a template"),
        ({"chat_template_kwargs": "[1]"}, "value-not-valid: is not a JSON object"),
        ({"chat_template_kwargs": '{"tools": 1}'}, "remove-flag: sets"),
        ({"skip_first": -1}, "out-of-range: is too small"),
    ],
)
def test_settings_that_are_not_valid(context, code, tmp_path):
    found = problems(tmp_path, context=context)
    assert [one.partition(":")[0] for one in found] == [code.partition(":")[0]], found


def test_packs_of_the_teacher_that_cannot_be_cut(tmp_path):
    found = problems(tmp_path, "--context-parallel-size", "2", context={"seq_length": 81})
    assert "length-not-divisible: teachers[0].context.seq_length 81" in found


@pytest.mark.parametrize(
    "flags, more, code",
    [
        (("--teacher-combination", "average"), {"several": True}, "exclude-each-other"),
        (("--dpo-beta", "0.1", "--kd-ratio", "0"), {}, "preferences-exclude"),
        (("--dpo-beta", "0.1", "--kd-ratio", "0"), {"weights": "ema", "hf": None}, "preferences-exclude"),
        (("--dpo-beta", "0.1", "--kd-ratio", "0"), {"weights": "live", "hf": None}, "preferences-exclude"),
        (("--overlong-conversations", "split"), {}, "exclude-each-other"),
        (("--overlong-conversations", "truncate-left"), {}, "exclude-each-other"),
    ],
)
def test_what_a_context_excludes(flags, more, code, tmp_path):
    found = problems(tmp_path, *flags, **more)
    assert found.count(f"{code}: context") == 1, found  # each has one reason
