"""Check the problems, the arms and the tables of the comparison of teachers."""

from __future__ import annotations

import ast
from random import Random

import pytest

from tools.benchmarks import teacher_gain
from tools.benchmarks.gain_report import EXPERTS, SELF, Run, tables, write_csv
from tools.benchmarks.gain_texts import is_right, problem, read_lines, write_texts

VALUES = {ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b}


def value(node: ast.expr) -> int:
    """Compute a sum without the code that made it."""
    if isinstance(node, ast.BinOp):
        return VALUES[type(node.op)](value(node.left), value(node.right))
    return -value(node.operand) if isinstance(node, ast.UnaryOp) else node.value


def test_references_are_right_line_by_line():
    random = Random(5)
    for one in (problem(random) for _ in range(300)):
        question = one["prompt"].removeprefix("Problem: ").removesuffix("\nSolution:")
        assert str(value(ast.parse(question, mode="eval").body)) == one["answer"]
        assert is_right(one["completion"], one["answer"]) and not is_right(one["completion"], "x")
        for line in one["reference"].splitlines():
            left, _, right = line.partition(" = ")
            assert value(ast.parse(left, mode="eval").body) == int(right)


def test_held_out_problems_and_code_are_in_no_other_file(tmp_path):
    write_texts(tmp_path, teacher_gain.SMALL)
    files = ("valid", "test", "arms", "sums", "start")
    prompts = [
        one["prompt"].rpartition("\n\n")[2]
        for name in files
        for one in read_lines(tmp_path / f"{name}.jsonl")
    ]
    assert len(prompts) == len(set(prompts)) == 4 + 8 + 16 + 120 + 60
    behind = [one["prompt"].startswith("Reference") for one in read_lines(tmp_path / "start.jsonl")]
    assert sum(behind) == 30
    code = "".join(one["text"] for one in read_lines(tmp_path / "code.jsonl"))
    held_out = read_lines(tmp_path / "held_out_code.jsonl")
    assert len(held_out) == 3 and not any(one["text"] in code for one in held_out)


@pytest.mark.parametrize("arm", [*teacher_gain.SELF_ARMS, *teacher_gain.MERGES])
def test_every_arm_is_a_run_that_mkd_accepts(arm, tmp_path):
    from mkd.config.load import load_config

    args = teacher_gain.parse(["--model", str(tmp_path / "model"), "--out", str(tmp_path)])
    bench = teacher_gain.Bench(args, teacher_gain.FULL, 0.0, start="start 20")
    part = SELF if arm in teacher_gain.SELF_ARMS else EXPERTS
    if arm.startswith("ema"):
        assert bench.flags(Run(part, arm, 1e-4, 1))[1]["teachers"][0]["weights"] == "ema"
        return
    words = bench.command(Run(part, arm, 1e-4, 1))
    config = load_config(words[words.index("train") + 1 :]).config
    assert config.training.train_iters == (45 if part == SELF else 150)
    assert (config.kd.kd_ratio == 0) == arm.startswith("SFT")
    samples = config.rollout.rollout_prompts if config.rollout.is_on else config.training.global_batch_size
    assert samples == (128 if part == SELF else 16)


def test_tables_have_the_best_rate_of_each_arm(tmp_path):
    def figures(valid: float, test: float) -> dict[str, float]:
        return dict(valid=valid, test=test, code=1.0, seconds=30.0)

    found = {
        Run(SELF, "start", 0, 0): figures(0.4, 0.4),
        Run(SELF, "SFT", 1e-4, 1): figures(0.5, 0.9),
        Run(SELF, "SFT", 3e-4, 1): figures(0.6, 0.5),
        Run(SELF, "SFT", 3e-4, 2): figures(0.1, 0.7),
    }
    lines = tables(found, [SELF])
    assert "| start |  | 1 | 0.400 | 1.000 |  |" in lines
    assert "| SFT | 0.0003 | 2 | 0.600 (0.141) | 1.000 (0.000) | 30 |" in lines
    write_csv(found, [SELF], "machine", tmp_path / "gain.csv")
    rows = (tmp_path / "gain.csv").read_text().splitlines()
    assert rows[3].endswith("self-teachers,SFT,sums solved,,0.5,0.5,0.7")
