"""Check which checkpoint a path and a step name."""

from __future__ import annotations

import pytest

from mkd.checkpoint.folders import MEGATRON_FILE, POINTER, find_checkpoint
from mkd.errors import CheckpointError
from tests.reported import refused


@pytest.fixture
def directory(tmp_path):
    for name in ("iter_0000001", "iter_0000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MEGATRON_FILE).touch()
    (tmp_path / POINTER).write_text("2\n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "step", "found"),
    [(".", None, 2), (".", 1, 1), ("iter_0000001", None, 1), ("iter_0000001", 1, 1)],
)
def test_what_is_found(path, step, found, directory):
    assert find_checkpoint((directory / path).resolve(), step) == directory / f"iter_000000{found}"


@pytest.mark.parametrize(
    ("path", "step", "code"),
    [
        (".", 3, "checkpoint-not-found: there is no"),
        ("iter_0000001", 2, "checkpoint-not-found: is one checkpoint, and --ckpt-step"),
    ],
)
def test_what_is_not_there(path, step, code, directory):
    with refused(code, CheckpointError):
        find_checkpoint((directory / path).resolve(), step)
