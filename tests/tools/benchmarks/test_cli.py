"""Run every benchmark end to end on a CPU, at sizes of a second, and check that wrong results are caught."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mkd.errors import EXIT_USAGE
from tools.benchmarks import head_benchmark, logits_benchmark
from tools.benchmarks.cli import main
from tools.benchmarks.gate import SAME_FUNCTION, attempt, check
from tools.benchmarks.head_case import HeadCase, HeadShape
from tools.benchmarks.machine import Machine
from tools.benchmarks.results import read_figures

TOOL = Path(__file__).resolve().parents[3] / "tools" / "benchmark.py"
LINE = re.compile(r"^(R\d+) (PASS|FAIL) (\S+) .*\(required [<>]= (\S+)\)$|^(R\d+) SKIP .+$")
MACHINE = Machine(torch.device("cpu"), torch.float32, rounds=1, seed=0, compile=False)


def run_main(arguments: tuple[str, ...]) -> tuple[int, list[str]]:
    """Run the command in this process and return (exit code, printed lines), on each rank of a pool."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main([*arguments, "--rounds", "1"])
    return code, output.getvalue().splitlines()


def check_output(code: int, lines: list[str], ids: set[str]) -> None:
    assert code == 0, lines
    assert lines[0].startswith("CPU, ") and len(lines) < 60
    requirements = [match for line in lines if (match := LINE.match(line))]
    assert {match[1] or match[5] for match in requirements} == ids
    assert lines[len(lines) - len(requirements) :] == [match[0] for match in requirements]
    assert all(float(match[3]) > 0 and float(match[4]) > 0 for match in requirements if match[1])


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (("ceilings",), set()),
        (("logits", "--shape", "24,400", "5,37"), {"R8", "R12"}),
        (("head", "--shape", "24,16,24,400", "--block-rows", "8"), {"R6"}),
        (("library", "--shape", "24,16,24,400"), set()),
        (("step", "--seq-length", "64", "--microbatches", "2"), {"R10"}),
        pytest.param(("trainers", "--documents", "5"), {"R13"}, marks=pytest.mark.slow),
        (("pipeline",), {"R11"}),
        (("mixer",), {"R26"}),
        (("layouts", "--layouts", "dp,sft", "eager", "--packs", "2", "--seq-length", "64"), {"R20"}),
        (("decode", "--batch", "3", "--new-tokens", "4"), {"R24"}),
        pytest.param(
            ("experts", "--microbatches", "2", "--kernels", "0"), {"R10", "R20"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_benchmark_ends_with_its_requirement_lines(arguments, ids):
    check_output(*run_main(arguments), ids)
    assert not dist.is_initialized()


def test_a_step_with_its_profile():
    code, lines = run_main(("step", "--seq-length", "64", "--microbatches", "1", "--profile"))
    assert code == 0 and sum("garbage collections" in line for line in lines) == 3, lines


@pytest.mark.slow
def test_the_start_on_a_corpus_that_has_an_index():
    """Two real starts, of which the second one finds the index."""
    code, lines = run_main(("corpus", "--documents", "70000", "--workers", "0", "--loss-mask", "--strict"))
    found = [match for line in lines if (match := LINE.match(line))]
    assert code == 0 and [match[2] for match in found] == ["PASS"] * 5, lines
    assert "index 1 MiB" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (("head", "--shape", "24,16,24,400", "--block-rows", "8"), {"R7"}),
        (("step", "--seq-length", "64", "--microbatches", "2", "--tensor-parallel", "2"), {"R10"}),
        pytest.param(
            ("experts", "--microbatches", "2", "--kernels", "0"), {"R10", "R20"}, marks=pytest.mark.slow
        ),
        pytest.param(
            ("layouts", "--layouts", "dp", "tp2", "pp2,ahead4", "peers2,distributed", "--seq-length", "64"),
            {"R20"},
            marks=pytest.mark.slow,
        ),
        (("pipeline", "--pipeline-parallel", "2", "--seq-length", "64", "--microbatches", "3"), {"R11"}),
        (
            (
                "pipeline",
                "--pipeline-parallel",
                "2",
                "--virtual-stages",
                "2",
                "--seq-length",
                "64",
                "--student-shape",
                "tiny-teacher",
            ),
            {"R11"},
        ),
    ],
)
def test_benchmarks_of_two_ranks(ranks, arguments, ids):
    (code, lines), other = ranks.run(run_main, 2, arguments)
    check_output(code, lines, ids)
    assert other == (0, [])


def test_medians_are_appended_as_figures(tmp_path):
    for _ in range(2):
        code, _ = run_main(("logits", "--shape", "5,37", "--csv", str(tmp_path / "logits.csv")))
        assert code == 0
    figures = read_figures("logits", tmp_path)
    assert {figure.case for figure in figures} == {"5x37"} and {figure.unit for figure in figures} == {"ms"}
    assert sum(figure.arm == "mkd forward_kl" for figure in figures) == 2
    assert all(float(figure.median) > 0 and figure.command.startswith("logits --shape") for figure in figures)


def test_the_tool_runs_and_strict_reports_misses():
    command = [sys.executable, str(TOOL), "logits", "--shape", "2,8", "--rounds", "1", "--strict"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    missed = any(" FAIL " in line for line in result.stdout.splitlines())
    assert result.returncode == int(missed), result.stdout + result.stderr
    assert result.stderr == ""


def test_usage_errors(capsys):
    assert main(["logits", "--shape", "24,400,1"]) == EXIT_USAGE
    assert "invalid 2 positive integers value: '24,400,1'" in capsys.readouterr().err
    assert main(["step", "--student-shape", "gpt-5"]) == EXIT_USAGE
    assert "shape 'gpt-5' is not known" in capsys.readouterr().err
    assert main(["layouts", "--layouts", "tp2,zero3"]) == EXIT_USAGE
    assert "layout word 'zero3' is not known" in capsys.readouterr().err
    assert main(["layouts", "--layouts", "tp2"]) == EXIT_USAGE
    assert "layout 'tp2' cannot have 1 process" in capsys.readouterr().err
    assert main(["logits", "--device", "cuda"]) == EXIT_USAGE
    assert "torch sees no GPU" in capsys.readouterr().err


def test_logits_gate_catches_a_wrong_loss(monkeypatch, capsys):
    right = logits_benchmark.mkd_loss

    def reversed_forward(case, divergence, mask):
        return right(case, "reverse_kl" if divergence == "forward_kl" else divergence, mask)

    monkeypatch.setattr(logits_benchmark, "mkd_loss", reversed_forward)
    report = logits_benchmark.benchmark(MACHINE, 16, 300)
    assert report.wrong == ["mkd forward_kl at 16x300", "mkd forward_kl, 50% loss tokens at 16x300"]
    assert report.exit_code(strict=False) == 1
    assert "wrong: not timed" in capsys.readouterr().out


def test_head_gate_catches_a_wrong_gradient(monkeypatch):
    right = head_benchmark.mkd_head

    def doubled_weight_gradient(*arguments, **more):
        run = right(*arguments, **more)

        def wrong():
            loss, hidden, weight = run()
            return loss, hidden, 2 * weight

        return wrong

    monkeypatch.setattr(head_benchmark, "mkd_head", doubled_weight_gradient)
    report = head_benchmark.benchmark(MACHINE, HeadShape(16, 8, 12, 300), block_rows=8)
    assert len(report.wrong) == 4 and report.exit_code(strict=False) == 1


def test_a_peer_that_fails_is_noted_and_ours_raises():
    def fail():
        raise RuntimeError("no kernel\nfor this device")

    notes = []
    assert attempt(logits_benchmark.LogitsArm("Other", "jsd", fail), notes) is None
    assert notes == ["Other: RuntimeError: no kernel, skipped"]
    with pytest.raises(RuntimeError):
        attempt(logits_benchmark.LogitsArm("mkd jsd", "jsd", fail, is_ours=True), notes)


def test_logits_are_half_a_nat_apart_and_every_arm_sees_the_same_ones():
    case = logits_benchmark.LogitsCase(64, 2000, MACHINE)
    loss, gradient = case.reference("forward_kl", case.all_rows)
    assert 0.3 < loss < 0.7 and gradient.shape == (64, 2000)
    case.restore()
    first = logits_benchmark.mkd_loss(case, "forward_kl", case.all_rows)()
    case.restore()
    again = logits_benchmark.mkd_loss(case, "forward_kl", case.all_rows)()
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_every_right_arm_passes_the_gate():
    case = logits_benchmark.LogitsCase(32, 500, MACHINE)
    assert all(
        error.within(SAME_FUNCTION) for error in check(case, logits_benchmark.arms_of(case)[0], []).values()
    )
    heads = HeadCase(HeadShape(32, 24, 16, 500), MACHINE)
    assert all(
        error.within(SAME_FUNCTION)
        for error in check(heads, head_benchmark.arms_of(heads, 8)[0], []).values()
    )


def test_loops_of_transformers_have_the_losses_and_gradients_of_mkd():
    _, lines = run_main(("trainers", "--documents", "7"))
    timed = [line for line in lines if line.startswith(("mkd", "transformers, eager KL"))]
    assert len(timed) == 3, lines  # an arm with another loss or gradient norm would be a note
    assert len({tuple(line.split()[-2:]) for line in timed}) == 1, timed
