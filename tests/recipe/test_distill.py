"""Distil with one command, in real processes that are killed and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mkd.commands.distill import main
from mkd.commands.init import main as init
from mkd.errors import EXIT_CHECKPOINT, EXIT_PREEMPTED, EXIT_USAGE
from mkd.operations.launch.child_command import ChildCommands
from mkd.recipe.distill_stages import only_one
from tests.reported import reported_codes
from tests.train.command import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300


def words(files: Path, student: str, out: Path, *more) -> list[str]:
    own = [files / "teacher", student, files / "text.jsonl", "--gpus", 0, "--out", out]
    own += ["--seq-length", 32, "--train-iters", 8, "--eval-interval", 8, *more]
    return [str(word) for word in own]


def start(argv: list[str], folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "mkd", "distill", *argv],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stop_when(
    process: subprocess.Popen, is_time: Callable[[], bool], number: signal.Signals
) -> tuple[int, str]:
    """Send the signal to `mkd distill` alone as soon as it is time. Return (exit code, output)."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_time():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    out = process.communicate(timeout=PATIENCE_S)[0]
    return process.returncode, out


def finish(process: subprocess.Popen) -> str:
    out = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, out
    return out


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_steps(out: Path, number: int) -> Callable[[], bool]:
    metrics = out / "run/metrics.jsonl"
    return lambda: metrics.exists() and len(metrics.read_text().splitlines()) > number


def test_a_kill_in_training_and_the_same_command_again(files, tmp_path, capsys, monkeypatch):
    """The training process does not outlive the kill; then every stage is done once."""
    out = tmp_path / "out"
    process = start(words(files, files / "student", out), tmp_path)
    running = []

    def is_time() -> bool:
        running[:] = children(process.pid)
        return has_steps(out, 1)()

    code, _ = stop_when(process, is_time, signal.SIGKILL)
    assert code == -signal.SIGKILL and running
    deadline = time.monotonic() + 20
    while Path(f"/proc/{running[0]}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    text = finish(start(["--out", str(out)], tmp_path))
    assert f"resuming in {out}" in text and "the student is distilled" in text
    assert text.count("next:\n") == 1 and "the same command" not in text  # that would be `mkd train`
    assert [one["iteration"] for one in read_metrics(out / "run") if "split" not in one] == list(range(1, 9))
    assert (out / "hf/model.safetensors").exists() and (out / "run/report.html").exists()
    state = json.loads((out / "distill.json").read_text())
    assert list(state["stages"]) == ["train", "check", "report"]

    monkeypatch.chdir(tmp_path)
    assert main(["--out", str(out)]) == 0  # nothing is left to do
    text = capsys.readouterr().out
    assert text.count(": done") == 3 and "the student is distilled" in text
    assert main(words(files, files / "student", out, "--lr", 1)) == EXIT_USAGE  # in another folder, too
    assert reported_codes(capsys.readouterr().err)[0].startswith("choose-another-folder")
    with only_one(out):
        assert main(["--out", str(out)]) == EXIT_CHECKPOINT
    assert reported_codes(capsys.readouterr().err)[0].startswith("save-in-use")


def test_what_a_folder_holds_is_taken_or_refused(files, tmp_path, capsys, monkeypatch):
    """The settings of `mkd init` stay. Other arguments, checkpoints and another directory are refused."""
    out = tmp_path / "out"

    def plan(*words) -> str:
        """Return the output, or the text of the errors."""
        code = main([*map(str, words), "--plan-only"])
        found = capsys.readouterr()
        assert code in (0, EXIT_USAGE) and (not code or "error[choose-another-folder]" in found.err)
        return found.err if code else found.out

    assert init(words(files, "layers:2", out)) == 0
    settings = out / "run.yaml"
    settings.write_text(settings.read_text() + "# edited\n")
    assert f"{settings} has other settings" in plan(*words(files, files / "student", out))
    assert "the student has layers 2" in plan(*words(files, "layers:1", out))
    assert "optimizer.lr is 0.0001" in plan(*words(files, "layers:2", out, "--lr", 1))
    (out / "run").mkdir()
    pointer = out / "run/latest_checkpointed_iteration.txt"
    pointer.write_text("1")
    assert f"{out / 'run'} holds checkpoints" in plan(*words(files, "layers:2", out))
    pointer.unlink()
    described = json.loads((out / "student/config.json").read_text())
    (out / "student/config.json").write_text(json.dumps(described | {"mkd_planned": False}))
    (out / "student/model.safetensors").touch()  # as after `mkd make-student`, which is not done again
    text = plan(*words(files, "layers:2", out))
    assert f"the settings are those of {settings}" in text
    assert re.findall(r"\] (.*): done", text) == ["cut the student out of the teacher"]
    assert settings.read_text().endswith("# edited\n")

    assert "resuming" in plan("--out", out) and "resuming" in plan("--out", out, "--gpus", 0)
    assert "with other arguments: there gpus 0" in plan("--out", out, "--gpus", 8, "--gpu-memory-gib", 80)
    assert init([*words(files, "layers:2", out), "--overwrite"]) == EXIT_USAGE
    here = Path.cwd()
    monkeypatch.chdir(tmp_path)
    assert f"start it in that directory: cd {here}" in plan("--out", out)


@pytest.mark.parametrize("residency", ["device", "host"])
def test_the_scores_of_the_teacher_are_not_needed(residency, files, tmp_path, capsys, monkeypatch):
    """A teacher that cannot be scored costs no later stage. Nothing runs here: only the order is tested."""
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"prompt": "the quick", "completion": " brown fox"}) + "\n")
    ran = []

    def run(commands, command) -> int:
        ran.append(Path(command[-2]).name if command[0] == "evaluate" else command[0])
        return {"tasks-teacher.json": 1, "report": EXIT_CHECKPOINT}.get(ran[-1], 0)

    monkeypatch.setattr(ChildCommands, "run", run)
    more = ("--eval-completions", task, "--teacher-residency", residency)
    assert main(words(files, files / "student", tmp_path / "out", *more)) == EXIT_CHECKPOINT
    scored = ["tasks-teacher.json"] * (residency == "device") + ["tasks-student.json"]
    assert ran == ["train", *scored, "parity", "report"]
    assert ("skipped, because its residency is host" in capsys.readouterr().out) == (residency == "host")
    stages = json.loads((tmp_path / "out/distill.json").read_text())["stages"]
    assert list(stages) == ["train", "evaluate-student", "check"]


@pytest.mark.slow
def test_stops_in_every_stage_do_not_change_the_student(files, tmp_path):
    """A kill while the student is cut, SIGTERM in training, a kill in the check: the bits stay the same."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    finish(start(words(files, "layers:2", whole), tmp_path))
    argv = words(files, "layers:2", torn)

    process = start(argv, tmp_path)
    code, _ = stop_when(
        process, lambda: (torn / "student").exists() and children(process.pid), signal.SIGKILL
    )
    assert code == -signal.SIGKILL
    process = start(argv, tmp_path)
    code, text = stop_when(process, has_steps(torn, 3), signal.SIGTERM)
    assert code == EXIT_PREEMPTED and "stopped in the stage train; start the same command again" in text
    process = start(argv, tmp_path)
    state = torn / "distill.json"
    code, _ = stop_when(
        process, lambda: '"train"' in state.read_text() and children(process.pid), signal.SIGKILL
    )
    assert code == -signal.SIGKILL
    finish(start(argv, tmp_path))
    for name in ("student", "hf"):
        assert (torn / name / "model.safetensors").read_bytes() == (
            whole / name / "model.safetensors"
        ).read_bytes()


@pytest.mark.slow
def test_tasks_are_scored_and_edited_settings_train_further(files, tmp_path):
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"prompt": "the quick", "completion": " brown fox"}) + "\n")
    out = tmp_path / "out"
    argv = words(files, files / "student", out, "--eval-completions", task)
    text = finish(start(argv, tmp_path))
    assert "tasks of the teacher" in text and "tasks of the student" in text
    settings = out / "run.yaml"
    settings.write_text(settings.read_text().replace("train_iters: 8", "train_iters: 10"))
    text = finish(start(argv, tmp_path))
    assert [one["iteration"] for one in read_metrics(out / "run") if "split" not in one][-1] == 10
    assert ": done" not in text
