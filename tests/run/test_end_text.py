"""Check the summary at the end of a run: where everything is, what was reached, and what to do next."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mkd.config.load import load_config
from mkd.config.schema import PAIR_LOSSES
from mkd.operations.stopping import Stop
from mkd.parent_process import STAGE
from mkd.run.end_text import end_text
from mkd.run_command import mkd_command
from tests.train.command import flags, make_files, run_main

RECORDS = (
    {"iteration": 0, "split": "valid", "kd_loss": 0.9746, "ce_loss": 3.73, "top1_agreement": 0.492},
    {"iteration": 1, "kd_loss": 9.0},
    {"iteration": 30, "split": "valid", "kd_loss": 0.586, "ce_loss": 3.213, "top1_agreement": 0.623},
)


@pytest.fixture
def summary(tmp_path, monkeypatch):
    """Return summary(flags, iteration, records) -> lines of a run of 30 steps in `runs/one`."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/one")
    folder.mkdir(parents=True)

    def lines(*flags: str, iteration: int = 30, records=RECORDS, stop=None) -> list[str]:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        kept_in = None if "--no-save" in flags else folder / f"iter_{iteration:07d}"
        run = SimpleNamespace(
            config=load_config(["--train-iters", "30", *flags]).config,
            position=SimpleNamespace(iteration=iteration),
            progress=SimpleNamespace(kept_in=kept_in, kept_iteration=0 if kept_in is None else iteration),
        )
        return end_text(run, folder, 125.0, stop).splitlines()

    return lines


def test_a_finished_run(summary):
    lines = summary("--save", "runs/one", "--export-hf", "runs/one/hf")
    assert lines[:5] == [
        "done: 30 of 30 steps, 2m05s",
        "  weights   runs/one/iter_0000030",
        "  export    runs/one/hf",
        "  metrics   runs/one/metrics.jsonl, settings in config.yaml, events in events.jsonl",
        "  held-out  kd 0.9746 -> 0.5860, ce 3.730 -> 3.213, top1 0.492 -> 0.623 (after step 0 and 30)",
    ]
    commands = "\n".join(lines[6:])
    assert lines[5] == "next:" and "evaluate --student-hf runs/one/hf " in commands
    assert "report runs/one " in commands and "--load runs/one " in commands and " export " not in commands
    assert len(lines) <= 12


def test_a_stage_of_another_command_leaves_the_next_steps_to_it(summary, monkeypatch):
    monkeypatch.setenv(STAGE, "1")
    lines = summary("--save", "runs/one")
    assert lines[0].startswith("done: ") and len(lines) == 5


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_a_run_on_pairs_says_how_many_it_has_right(summary, loss):
    of_valid = [(0, 0.25), (30, 0.75)]
    key = f"{loss.prefix}/accuracy"
    records = [{"iteration": one, "split": "valid", "kd_loss": None, key: acc} for one, acc in of_valid]
    assert "  held-out  acc 0.25 -> 0.75 (after step 0 and 30)" in summary("--no-save", records=records)


def test_a_run_that_was_cut_short_and_one_that_kept_nothing(summary):
    over = Stop("the time of --exit-duration-in-mins is over", is_preempted=False)
    lines = summary("--save", "runs/one", iteration=12, records=RECORDS[:1], stop=over)
    assert lines[0] == "stopped: 12 of 30 steps, 2m05s" and lines[1] == f"  reason    {over.reason}"
    assert lines[3] == "  export    none" and lines[5].endswith("(after step 0)")
    assert "export --load runs/one --hf-out runs/one/hf" in lines[7]
    again = "with --load runs/one"
    assert lines[-1] == f"  the same command {again}    # resumes"
    lines = summary(*["--save", "runs/one", "--load", "runs/one", "--exit-interval", "12"], iteration=12)
    assert lines[1] == "  reason    --exit-interval 12"
    assert lines[-1] == "  the same command    # resumes"
    for load, step, changes in (
        ("", ("--ckpt-step", "6"), "without --ckpt-step"),
        ("/iter_0000006", (), again),
    ):
        lines = summary("--save", "runs/one", "--load", f"runs/one{load}", *step, iteration=12)
        assert lines[-1] == f"  the same command {changes}    # resumes"
    lines = summary("--no-save", records=())
    assert lines[1] == "  weights   not saved (--no-save)"
    assert not any("--load" in line or "held-out" in line for line in lines)


def test_commands_can_be_copied(tmp_path, monkeypatch):
    """`mkd` is on the path only in an activated environment."""
    (tmp_path / "mkd").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mkd_command() == "mkd"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert mkd_command() == str(tmp_path / "mkd")
    (tmp_path / "mkd").unlink()
    assert mkd_command() == f"{tmp_path / 'python'} -m mkd"


def test_a_run_whose_time_is_over_says_so_and_how_to_resume(tmp_path, ranks):
    files = make_files(tmp_path)
    more = ("--train-iters", 30, "--save", files / "run", "--exit-duration-in-mins", 1e-6)
    (result,) = run_main(ranks, flags(files, "run", *more))
    assert result.exit_code == 0, result.stderr
    assert "\nstopped: 1 of 30 steps, " in result.stdout
    assert "\n  reason    the time of --exit-duration-in-mins is over\n" in result.stdout
    assert result.stdout.endswith(f"\n  the same command with --load {files / 'run'}    # resumes\n")
