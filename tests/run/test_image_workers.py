"""Images become pixels in the workers of --num-workers, in training, evaluations and exports."""

from __future__ import annotations

import json
import multiprocessing
import os
from unittest.mock import patch

import pytest

from tests.data.images.tiny_processors import make_qwen
from tests.train.command import call_main, flags, write_records
from tests.train.two_processors import with_text, with_weights

COMMANDS = {"train": "mkd.run.main", "topk": "mkd.commands.topk", "evaluate": "mkd.commands.evaluate"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a model, which is its own teacher, conversations, and a task with images."""
    folder = tmp_path_factory.mktemp("image_workers")
    with_text(with_weights(make_qwen(folder / "student", most_pixels=16 * 16), seed=1))
    asked = dict(question="what is it?", choices=["red", "a fox"], answer=0)
    records = ({**asked, "images": [f"{number}.png"]} for number in range(4))
    write_records(folder / "what.jsonl", *records)
    return folder


def without_pixels_here(argv: list[str], command: str) -> tuple[int, str, str]:
    """Run the command on this rank, which may not make pixels itself: its workers may.

    They are forked, as those of torchrun's processes. The pool of ranks would start Python anew for each.
    """
    from mkd.data.images.processors import ImageProcessor
    from mkd.errors import DataError

    rank, pixels = os.getpid(), ImageProcessor.pixels

    def elsewhere(self, image):
        if os.getpid() == rank:
            raise DataError("pixels are made in the process of the models", code="image-not-valid")
        return pixels(self, image)

    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        with patch.object(ImageProcessor, "pixels", elsewhere):
            return call_main(argv, command)
    finally:
        multiprocessing.set_start_method(before, force=True)


def argv_of(name: str, files, run: str, *more) -> list[str]:
    """Return the command line of one command."""
    shared = ("--image-root", files / "student/pictures", *more)
    if name == "evaluate":
        own = ["--multiple-choice", files / "what.jsonl", "--student-hf", files / "student"]
        return [str(word) for word in (*own, "--seq-length", 192, "--out", files / run, *shared)]
    given = dict(teacher_hf="student", data_path="student/chats.jsonl")
    evaluated = ("--eval-interval", 1, "--eval-iters", 1, "--split", "80,20,0")
    evaluated += ("--eval-multiple-choice", files / "what.jsonl")
    own = ("--out", files / run, "--k", 8) if name == "topk" else evaluated
    argv = flags(files, f"{name} log {run}", *own, *shared, **given)
    for flag, value in (("--seq-length", 192), ("--train-iters", 1)):
        argv[argv.index(flag) + 1] = str(value)
    return argv


@pytest.mark.parametrize("name", COMMANDS)
def test_workers_make_the_pixels(name, files, ranks):
    if name == "topk":
        pytest.importorskip("pyarrow")
    alone = argv_of(name, files, f"{name} 0")
    ((code, _, stderr),) = ranks.run(without_pixels_here, 1, alone, COMMANDS[name])
    assert code == 65 and "in the process of the models" in stderr, "without workers it makes them itself"
    ((code, _, stderr),) = ranks.run(call_main, 1, alone, COMMANDS[name])
    assert code == 0, stderr
    beside = argv_of(name, files, f"{name} 2", "--num-workers", 2)
    ((code, _, stderr),) = ranks.run(without_pixels_here, 1, beside, COMMANDS[name])
    assert code == 0, stderr
    if name == "topk":
        one, other = (sorted((files / f"topk {n}").glob("*.parquet")) for n in (0, 2))
        assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other] != []
    if name == "evaluate":
        one, other = (json.loads((files / f"evaluate {n}").read_text()) for n in (0, 2))
        assert one == other
