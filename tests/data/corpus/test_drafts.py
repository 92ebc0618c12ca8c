"""Drafts of files: drafts of killed writers are removed, drafts of live ones stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mkd.data.corpus.drafts import MAX_IDLE_S, draft_name, remove_left_behind

WRITER = """
import sys
from mkd.data.corpus.drafts import draft_name
for end in (".bin", ".idx"):
    open(draft_name(sys.argv[1]) + end, "w").write("x")
print("written", flush=True)
input()
"""


@pytest.fixture
def writer(tmp_path):
    """Return a live process that has written drafts of `c [1]`."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "c [1]")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    yield process
    process.kill()
    process.communicate()


def test_what_a_killed_writer_leaves_goes(writer, tmp_path):
    target = tmp_path / "c [1]"
    others = [
        tmp_path / "c [1].bin",
        tmp_path / "c [1]2.partial-host-0-1.bin",
        tmp_path / "c 1.partial-host-0-1.bin",
    ]
    for path in others:
        path.write_text("x")
        os.utime(path, (0, 0))
    remove_left_behind(str(target))
    assert len(list(tmp_path.iterdir())) == 5, "a live writer's drafts stay"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    remove_left_behind(str(target))
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_an_earlier_process_of_this_number(tmp_path):
    own = tmp_path / (draft_name("c") + ".bin")
    own.write_text("x")
    remove_left_behind(str(tmp_path / "c"))
    assert not own.exists()


@pytest.mark.parametrize("name", ["c.partial-node7.cluster-1a2b3c4d-31", "c.partial-31"])
def test_of_other_machines_only_what_has_been_idle_for_a_day(name, tmp_path):
    """All files of a writer count, because it may start to write some of them late."""
    paths = [tmp_path / (name + end) for end in (".bin", ".quarantine.jsonl")]
    for path in paths:
        path.write_text("x")
    for idle_s, stays in ((MAX_IDLE_S - 60, True), (MAX_IDLE_S + 60, False)):
        then = time.time() - idle_s
        os.utime(paths[0], (then, then))
        os.utime(paths[1], (0, 0))
        remove_left_behind(str(tmp_path / "c"))
        assert [path.exists() for path in paths] == [stays, stays]
