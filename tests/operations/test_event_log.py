from __future__ import annotations

import json
import os

import pytest

from mkd.errors import DataError, Preempted
from mkd.operations.console import LOG, console
from mkd.operations.event_log import SPIKE, EventLog


def events(folder, name="events.jsonl"):
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [(one["iteration"], one["kind"], one["text"]) for one in lines]


def a_run(folder, start, appends, error):
    """Log a line before the folder is known, one in step `start` + 1, and one after the end."""
    with console(rank=0):
        log = EventLog()
        LOG.info("data of %d packs", 3)
        log.open(folder, start, appends)
        log.entered("data", start + 1)
        LOG.warning("high", extra={"event": SPIKE})
        LOG.warning("low disk")
        log.end(error)
        LOG.info("after the end")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (None, "done", "ended"),
        (Preempted("time is up", code="preempted"), "stopped", "time is up"),
        (DataError("no text", code="x"), "failed", "no text"),
        (MemoryError("full"), "failed", "MemoryError('full')"),
    ],
)
def test_events_have_their_iteration_and_kind(tmp_path, error, kind, text):
    a_run(tmp_path, 0, False, error)
    assert events(tmp_path) == [
        (0, "start", "started"),
        (0, "note", "data of 3 packs"),
        (1, "loss spike", "high"),
        (1, "warning", "low disk"),
        (1, kind, text),
    ]


def test_a_resumed_run_appends_and_a_new_one_renames(tmp_path):
    a_run(tmp_path, 0, True, None)
    a_run(tmp_path, 7, True, None)
    both = events(tmp_path)
    assert len(both) == 10 and both[5] == (7, "resume", "resumed from iteration 7")
    a_run(tmp_path, 0, False, None)
    assert events(tmp_path) == both[:5] and events(tmp_path, "events.1.jsonl") == both


def test_a_torn_line_takes_no_event_with_it(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"time": 1, "iter')
    a_run(tmp_path, 7, True, None)
    torn, *lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert torn == '{"time": 1, "iter' and json.loads(lines[0])["kind"] == "resume"


def test_a_full_disk_does_not_fail_a_run_that_is_done(tmp_path, capsys):
    with console(rank=0), open("/dev/full", "w") as full:
        log = EventLog()
        log.open(tmp_path, 0, appends=False)
        os.dup2(full.fileno(), log._file.fileno())
        log.end(None)
    assert "lacks the end of the run" in capsys.readouterr().err and not LOG.handlers


def test_a_run_that_fails_before_it_owns_its_folder_writes_nothing(tmp_path):
    with console(rank=0):
        EventLog().end(ValueError())
    assert not LOG.handlers and not list(tmp_path.iterdir())
