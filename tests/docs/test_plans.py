"""Check that the plans printed in the docs are those of today."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from mkd.commands.plan import main
from tests.plan.shapes import MOE_STUDENT, MOE_TEACHER
from tools.benchmarks.shapes import shape_of

ROOT = Path(__file__).parents[2]
MODELS = {"Qwen/Qwen3-30B-A3B-Base": MOE_STUDENT, "Qwen/Qwen3-235B-A22B": MOE_TEACHER}
MODELS |= {f"Qwen/Qwen3-{size}": shape_of(f"qwen3-{size.lower()}") for size in ("1.7B", "8B")}
MODELS |= {
    f"Qwen/Qwen2.5-VL-{size}-Instruct": shape_of(f"qwen2.5-vl-{size.lower()}") for size in ("3B", "7B")
}
PLAN = re.compile(r"^\$ mkd plan ([^\n]*--config configs/[^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(
    r"^\$ mkd plan ([^\n]*--pipeline-layout auto[^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL
)


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Return a function: what `mkd plan` prints in a folder with configs/ and the models of `MODELS`."""
    for name, shape in MODELS.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(dict(shape.hf_config)))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> str:
        assert main(argv) == 0
        return capsys.readouterr().out

    return run


def test_the_example(printed):
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    ((command, expected),) = EXAMPLE.findall(text)
    argv = shlex.split(command)
    assert printed(*argv).splitlines() == expected.splitlines()
    (even,) = re.findall(r"the step takes (\d+) ms before the update", text)
    assert f"chosen by auto): {even} ms" in printed(*argv, "--pipeline-layout", "even")


def test_the_recipe_of_a_pair_with_experts(printed):
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    ((command, expected),) = PLAN.findall(text)
    argv = shlex.split(command)
    assert printed(*argv).splitlines() == expected.splitlines()
    step, spread = re.search(r"at EP 16, .*? from\s(\d+) to (\d+) ms", text, re.DOTALL).groups()
    wider = printed(*argv, "--teacher-expert-model-parallel-size", "16")
    assert f"chosen by auto): {step} ms" in expected and f"chosen by auto): {spread} ms" in wider


def test_the_recipe_of_a_pair_with_images(printed):
    text = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
    ((command, expected),) = PLAN.findall(text)
    argv = shlex.split(command)
    assert printed(*argv).splitlines() == expected.splitlines()
    recomputed = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    less = printed(*argv, *recomputed, "--recompute-num-layers", "1")
    memory, step = re.search(r"full recomputation the plan has ([\d.]+) GiB and ([\d,]+) ms", text).groups()
    assert f"memory of pipeline rank 0: {memory} GiB" in less
    assert f"predicted step: {step.replace(',', '')} ms" in less
