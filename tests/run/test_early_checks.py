"""Refusals that need no torch come before it is imported, in every command that reads or writes a model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest

from mkd.config.load import load_config
from mkd.human import size
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import weight_bytes
from mkd.run.early_checks import early_model_problems, early_problems
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


def refused(*commands: tuple[str, list[object]], **hub: str) -> str:
    """Run (state of the disk, command) of each in one process, and return what they print on stderr."""
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": "/nonexistent/cache"} | hub
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
        ("", [*run, "--push-to-hub", "student"]),
        ("", [*run, "--push-to-hub", "student", "--export-hf", files / "new"]),
        HF_TOKEN="",
        HF_TOKEN_PATH="/nonexistent/token",
    )
    assert reported_codes(message) == [
        "already-exists: holds a model",
        "choose-another-folder: is a folder that this run reads",
        *["hf-model-not-found"] * 3,
        "checkpoint-missing: holds no checkpoint",
        "not-writable",
        "disk-too-small",
        "add-flag: --push-to-hub student without --export-hf",
        "hub-login: no token of the hub is found",
    ]
    assert f"--teacher-hf: {NO_TEACHER}" in message
    assert "--student-hf: the folder /nonexistent/model does not exist" in message
    assert "text.jsonl is a file, not a folder" in message


def test_only_what_a_command_reads_must_exist_and_stay(files):
    """An evaluation reads no corpus, an export of predictions no prompts, and --kd-ratio 0 no teacher."""
    missing = "/nonexistent/text.jsonl"

    def found(check, *more, **paths):
        config = load_config(flags(files, "run", *more, **paths)).config
        return [str(problem) for problem in check(config)]

    prompts = ("--prompt-data-path", missing)
    for check, number in (
        (lambda config: early_model_problems(config, 1), 0),
        (lambda config: early_model_problems(config, 1, teacher=0), 1),
        (lambda config: early_problems(config, 1), 1),
    ):
        texts = found(check, data_path=missing)
        assert len(texts) == number and all(f"--data-path {missing}: nothing" in text for text in texts)
        assert not any("nothing found" in text for text in found(check, *prompts))
    sampled = found(lambda config: early_problems(config, 1), *prompts, "--on-policy-fraction", 0.5)
    assert any(f"--prompt-data-path {missing}: nothing found" in text for text in sampled)
    for ratio, number in ((1, 1), (0, 0)):
        out = ("--export-hf", files / "teacher", "--overwrite", "--kd-ratio", ratio)
        texts = found(lambda config: early_problems(config, 1), *out)
        assert len(texts) == number and all("is a folder that this run reads" in text for text in texts)


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
        "checkpoint-missing: holds no checkpoint",
        "already-exists: holds a model",
        "number-of-processes: x pipeline-model-parallel-size",
        "disk-too-small",
        *["hf-model-not-found"] * 2,
        "already-exists: holds a model",
        "data-path-not-found: nothing found",
        "disk-too-small",
        "save-folder-taken: already holds checkpoints",
        "disk-too-small",
    ]
    assert NO_TEACHER in message and "the folder /nonexistent/model does not exist" in message
    assert "--no-save" not in message  # a flag of training
    assert json.loads((student / "config.json").read_text())["dtype"] == "float32"
    assert f"the checkpoint {size(weight_bytes(ModelShape.from_hf_dir(student), bf16=False))}" in message


def test_commands_that_read_a_model(files):
    taken, task = files / "taken", ["--completions", files / "text.jsonl"]
    missing = ["--student-hf", "/nonexistent/model"]
    unread = ["--prompt-data-path", "/nonexistent/not-read.jsonl"]
    message = refused(
        ("", ["parity", "--hf", "/nonexistent/model"]),
        ("", ["evaluate", *task, *missing, "--data-path", "/nonexistent/not-read.jsonl"]),
        ("", ["evaluate", *task, "--student-hf", files / "student", "--out", taken / "scores.json"]),
        ("", ["evaluate", *task, "--student-hf", files / "student", "--out", files / "none" / "scores.json"]),
        ("", ["topk", "--out", files / "new", *flags(files, "topk", *unread, teacher_hf="nowhere")]),
        ("", ["plan", *missing, "--kd-ratio", 0]),
        ("", ["report", files, "--out", taken / "page.html"]),
        ("", ["report", files, "--png", taken / "curves.png"]),
    )
    assert reported_codes(message) == [
        *["hf-model-not-found"] * 2,
        "already-exists: exists",
        "not-writable",
        *["hf-model-not-found"] * 2,
        *["already-exists: exists"] * 2,
    ]
    assert f"the folder {files / 'none'} does not exist" in message
    assert {path.read_text() for path in taken.iterdir()} == {"another file"}


@contextmanager
def late_hub(files: dict[str, Path]) -> Iterator[str]:
    """Serve the files of hub models by their paths, and yield the URL. The first answer comes too late."""
    numbers, ended = count(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.wfile.write(self.answer())

        def answer(self) -> bytes:
            found = files.get(self.path.replace("/resolve/main", "").strip("/"))
            if found is not None and next(numbers) == 0:
                ended.wait(60)
            body = b"" if found is None else found.read_bytes()
            headers = {"X-Repo-Commit": "0" * 40, "ETag": '"1"', "Content-Length": str(len(body))}
            self.send_response(200 if found else 404)
            for name, value in (headers | ({} if found else {"X-Error-Code": "EntryNotFound"})).items():
                self.send_header(name, value)
            self.end_headers()
            return body

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def test_models_of_the_hub(files, tmp_path):
    """A late hub is asked again. A model without config.json is not said to be missing."""
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text("{}")
    served = {
        "some/model/config.json": files / "teacher" / "config.json",
        f"some/adapter/{adapter.name}": adapter,
    }
    make = ["make-student", "--num-layers", 99, "--out", files / "new", "--hf"]
    with late_hub(served) as url:
        environment = {
            "HF_ENDPOINT": url,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_ETAG_TIMEOUT": "1",
        }
        message = refused(
            ("", [*make, "some/model"]),
            ("", [*make, "some/adapter"]),
            ("", [*make, "some/gguf"]),
            **environment,
        )
    expected = ["out-of-range: is more than the teacher's", "hf-adapter", "hf-weights-missing"]
    assert reported_codes(message) == expected
    assert "some/adapter is an adapter" in message and "merge_and_unload" in message
    assert "the model some/gguf of the Hugging Face hub has no config.json" in message
