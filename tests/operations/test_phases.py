"""Check that phases are announced to all followers of a run, in order, and also at a failure."""

from __future__ import annotations

import io
import sys

import pytest

from mkd.operations.console import LOG, console
from mkd.operations.phases import DATA, EVAL, INIT, Follower, Phases


class Diary(Follower):
    """Follower that records every announcement."""

    def __init__(self):
        self.pages = []

    def entered(self, phase, iteration):
        self.pages.append(f"{phase} {iteration}")

    def left(self, phase, iteration):
        self.pages.append(f"end of {phase} {iteration}")

    def passed(self, moment, iteration):
        self.pages.append(f"at {moment} {iteration}")


def test_every_follower_is_told_everything():
    first, late = Diary(), Diary()
    phases = Phases(first)
    phases.enter(INIT, 0)
    phases.follow(late)
    with phases(DATA, 1):
        phases.moment("mid_shard", 1)
    assert [step for step in phases.each(EVAL, 1, "ab")] == ["a", "b"]
    rest = ["data 1", "at mid_shard 1", "end of data 1", "eval 1", "eval 1"]
    assert late.pages == rest and first.pages == ["init 0", *rest]


def test_a_phase_that_fails_is_left():
    diary = Diary()
    with pytest.raises(ValueError), Phases(Follower(), diary)(DATA, 3):
        raise ValueError
    assert diary.pages == ["data 3", "end of data 3"]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_prints_what_the_run_logs(rank, monkeypatch, capsys):
    """Rank 0 prints plain lines on the current stdout.

    Nothing reaches the handlers of libraries, and nothing stays installed.
    """
    before = LOG.handlers[:], LOG.level, LOG.propagate
    with console(rank, " "):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        LOG.info("saved %s", "iter_1")
        LOG.warning("100 % of it")
        written = sys.stdout.getvalue()
    assert written == (" saved iter_1\n 100 % of it\n" if rank == 0 else "")
    assert (LOG.handlers[:], LOG.level, LOG.propagate) == before and capsys.readouterr().err == ""
