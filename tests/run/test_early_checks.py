"""Refusals that need no torch come before it is imported, in every command that reads or writes a model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reported import reported_codes
from tests.train.command import flags, make_files

ROOT = Path(__file__).resolve().parents[2]
NO_TEACHER = "there is no folder nobody/model, and no model of this name could be downloaded"
SCRIPT = """
import json, shutil, sys
from mkd.__main__ import main as command
from mkd.run.main import main as train
free = shutil.disk_usage
for disk, argv in json.loads(sys.argv[1]):
    shutil.disk_usage = (lambda path: shutil._ntuple_diskusage(1, 1, 0)) if disk == "full" else free
    assert (train(argv[1:]) if argv[0] == "train" else command(argv)) in (64, 65, 66), argv
assert not {"torch", "megatron", "transformers"}.intersection(sys.modules)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make models, a text, a folder with another model, and a checkpoint as far as its name is read."""
    folder = make_files(tmp_path_factory.mktemp("early"))
    (folder / "taken").mkdir()
    for name in ("model.safetensors", "scores.json", "page.html", "curves.png"):
        (folder / "taken" / name).write_text("another file")
    shutil.copytree(folder / "student", folder / "saved" / "iter_0000002" / "hf")
    (folder / "saved" / "iter_0000002" / "metadata.json").write_text("{}")
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    return folder


def refused(*commands: tuple[str, list[object]]) -> str:
    """Run (state of the disk, command) of each in one process, and return what they print on stderr."""
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": "/nonexistent/cache"}
    argv = json.dumps([(disk, [str(word) for word in words]) for disk, words in commands])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, argv],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_training_run(files):
    run = ["train", *flags(files, "run")]
    message = refused(
        ("", [*run, "--export-hf", files / "taken"]),
        ("", [*run, "--export-hf", files / "student"]),
        ("", [*run, "--teacher-hf", "nobody/model"]),
        ("", [*run, "--student-hf", "/nonexistent/model"]),
        ("", [*run, "--student-hf", files / "text.jsonl"]),
        ("", [*run, "--student-load", "/nonexistent/checkpoint"]),
        ("", [*run, "--log-dir", files / "text.jsonl" / "below"]),
        ("full", [*run, "--export-hf", files / "new"]),
    )
    assert reported_codes(message) == [
        "folder-holds-model",
        "export-hf-is-read",
        *["hf-model-not-found"] * 3,
        "model-checkpoint-missing",
        "folder-not-writable",
        "disk-too-small",
    ]
    assert f"--teacher-hf: {NO_TEACHER}" in message
    assert "--student-hf: the folder /nonexistent/model does not exist" in message
    assert "text.jsonl is a file, not a folder" in message


def test_commands_that_write_a_model(files):
    student, taken, new = files / "student", files / "taken", files / "new"
    export, make = ["export", "--load", files / "saved"], ["make-student", "--hf", student, "--num-layers", 1]
    message = refused(
        ("", ["export", "--load", "/nonexistent/checkpoint", "--hf-out", new]),
        ("", [*export, "--hf-out", taken]),
        ("", [*export, "--hf-out", new, "--tensor-model-parallel-size", 2]),
        ("full", [*export, "--hf-out", new]),
        ("", ["make-student", "--hf", "/nonexistent/model", "--num-layers", 1, "--out", new]),
        ("", ["make-student", "--hf", "nobody/model", "--num-layers", 1, "--out", new]),
        ("", [*make, "--out", taken]),
        ("", [*make, "--out", new, "--data-path", "/nonexistent/text.jsonl"]),
        ("full", [*make, "--out", new]),
        ("", ["convert", "--hf", student, "--save", files / "saved"]),
        ("full", ["convert", "--hf", student, "--save", new]),
    )
    assert reported_codes(message) == [
        "convert-checkpoint-missing",
        "folder-holds-model",
        "convert-layout-not-processes",
        "disk-too-small",
        *["hf-model-not-found"] * 2,
        "folder-holds-model",
        "data-path-not-found",
        "disk-too-small",
        "convert-save-not-empty",
        "disk-too-small",
    ]
    assert NO_TEACHER in message and "the folder /nonexistent/model does not exist" in message


def test_commands_that_read_a_model(files):
    taken, task = files / "taken", ["--completions", files / "text.jsonl"]
    missing = ["--student-hf", "/nonexistent/model"]
    message = refused(
        ("", ["parity", "--hf", "/nonexistent/model"]),
        ("", ["evaluate", *task, *missing]),
        ("", ["evaluate", *task, "--student-hf", files / "student", "--out", taken / "scores.json"]),
        ("", ["topk", "--out", files / "new", *flags(files, "topk", teacher_hf="nowhere")]),
        ("", ["plan", *missing, "--kd-ratio", 0]),
        ("", ["report", files, "--out", taken / "page.html"]),
        ("", ["plot", files, "--out", taken / "curves.png"]),
    )
    assert reported_codes(message) == [
        *["hf-model-not-found"] * 2,
        "out-exists",
        *["hf-model-not-found"] * 2,
        *["out-exists"] * 2,
    ]
    assert {path.read_text() for path in taken.iterdir()} == {"another file"}
