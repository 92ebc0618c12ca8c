"""Check that a save folder has one writer: a second one learns who the first is; a dead one blocks nobody."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket

import pytest

from mkd.checkpoint.save_folder import LOCK_FILE, WriterLock, lock_folder
from mkd.errors import CheckpointError
from tests.checkpoint.tiny_saves import run_forked
from tests.reported import refused

SELF = {"host": socket.gethostname(), "pid": os.getpid(), "slurm_job": None}


def lock(context, directory):
    lock_folder(directory, context)
    return "locked"


def lock_and_die(context, directory):
    lock_folder(directory, context)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.fault(33)
def test_second_writer_is_refused(tmp_path):
    """Row 33: every rank of the second run is told who the first is."""
    first = WriterLock.take(tmp_path)
    outcomes = run_forked(2, lock, tmp_path)
    for _, (text, seconds) in outcomes:
        assert (
            f"{tmp_path} is the save folder of another run: process {os.getpid()} on {socket.gethostname()}"
            in text
        )
        assert seconds < 10
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    first.release()


def test_released_lock_is_free(tmp_path):
    WriterLock.take(tmp_path).release()
    assert run_forked(2, lock, tmp_path) == [(0, "locked")] * 2


@pytest.mark.fault(33)
def test_lock_of_a_killed_run_is_taken_over(tmp_path):
    assert run_forked(1, lock_and_die, tmp_path)[0][0] == -signal.SIGKILL
    assert "pid" in json.loads((tmp_path / LOCK_FILE).read_text())
    assert run_forked(1, lock, tmp_path) == [(0, "locked")]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe"])
def test_text_of_a_lock_need_not_make_sense(text, tmp_path):
    (tmp_path / LOCK_FILE).write_bytes(text)
    assert run_forked(1, lock, tmp_path) == [(0, "locked")]


@pytest.mark.parametrize(
    ("holder", "job", "is_free"),
    [
        ({}, None, True),
        ({"pid": 2**22 + 1}, None, True),  # no such process
        (SELF, None, False),
        ({"host": "another"}, None, False),
        ({"host": "another", "slurm_job": "7"}, "7", True),  # the same job, restarted on another machine
        ({"host": "another", "slurm_job": "7"}, "8", False),
    ],
)
def test_without_locks_of_the_file_system_the_text_decides(holder, job, is_free, tmp_path, monkeypatch):
    """Some network file systems have no locks. None is available here, so their answer is simulated."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / LOCK_FILE).write_text(json.dumps(SELF | holder) if holder else "")
    if is_free:
        WriterLock.take(tmp_path).release()
    else:
        with refused("save-in-use", CheckpointError):
            WriterLock.take(tmp_path)
