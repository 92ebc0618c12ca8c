"""A job that is killed again and again writes the file of one that is not."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.generate.written_data import arguments, make_teacher, without_logp
from tests.ranks import REPOSITORY

KILLS = 6


def started(argv: list[object]) -> subprocess.Popen:
    command = [sys.executable, "-m", "mkd", "generate", *map(str, argv)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def lines_in(folder, out: str) -> int:
    work = folder / f"{out}.generated"
    return sum(path.read_bytes().count(b"\n") for path in work.glob("*.lines")) if work.exists() else 0


@pytest.mark.slow
def test_killed_jobs_lose_and_repeat_nothing(tmp_path):
    """SIGKILL comes as soon as a start has finished further completions."""
    folder = make_teacher(tmp_path)
    more = ("--samples-per-prompt", 20, "--max-new-tokens", 60, "--slots", 2)
    whole = started(arguments(folder, "whole.jsonl", *more))
    assert whole.wait() == 0, whole.stderr.read()
    for _ in range(KILLS):
        before = lines_in(folder, "killed.jsonl")
        job = started(arguments(folder, "killed.jsonl", *more))
        while job.poll() is None and lines_in(folder, "killed.jsonl") <= before + 5:
            time.sleep(0.01)
        job.kill()
        assert job.wait() == -9, job.stderr.read()
    assert not (folder / "killed.jsonl").exists()
    last = started(arguments(folder, "killed.jsonl", *more))
    assert last.wait() == 0, last.stderr.read()
    found, expected = (without_logp((folder / f"{one}.jsonl").read_bytes()) for one in ("killed", "whole"))
    assert found == expected
