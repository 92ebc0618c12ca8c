"""Check what losses of judged answers refuse before anything is loaded."""

from __future__ import annotations

import json

import pytest

from mkd.config.load import load_config
from mkd.plan.checks.problems import find_problems
from tests.plan.checks.test_problems import BASE, codes, shape

DPO = ("--dpo-beta", "0.1", "--kd-ratio", "0")


def test_the_initial_student_is_the_reference_by_default():
    config = load_config([*BASE[:2], *BASE[4:], *DPO]).config
    assert find_problems(config, 1, shape(), [shape()]) == []
    assert [one.hf for one in config.teachers] == ["s"] and config.needs_models
    assert [one.hf for one in load_config([*BASE, *DPO]).config.teachers] == ["t"]
    assert load_config([*BASE[:2], *BASE[4:]]).config.teachers == ()


@pytest.mark.parametrize(
    "flags, code",
    [
        (("--kd-ratio", "0.5"), "dpo-with-distillation"),
        (("--on-policy-fraction", "1", "--prompt-data-path", "p.jsonl"), "dpo-with-rollouts"),
        (("--teacher-topk", "cache"), "dpo-with-stored-reference"),
        (("--xtoken-loss", "uld"), "dpo-with-cross-tokenizer-reference"),
        (("--dpo-beta", "0"), "value-out-of-range"),
    ],
)
def test_refused_beside_dpo(flags, code):
    assert code in codes(*DPO, *flags, student=shape(), teacher=shape())


def test_one_reference_is_enough(tmp_path):
    (tmp_path / "two.yaml").write_text(json.dumps({"teachers": [{"hf": "a"}, {"hf": "b"}]}))
    argv = [*BASE[:2], *BASE[4:], *DPO, "--config", str(tmp_path / "two.yaml")]
    found = find_problems(load_config(argv).config, 1, shape(), [shape(), shape()])
    assert [one.code for one in found] == ["dpo-with-several-references"]
