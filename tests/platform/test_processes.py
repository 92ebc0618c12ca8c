"""Check which processes exist."""

from __future__ import annotations

import os
import subprocess
import sys

from mkd.platform.processes import is_alive, process_space


def test_a_process_is_there_until_it_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(os.getpid()) and is_alive(child.pid)
    child.kill()
    # it has ended, and nobody has asked for its exit code
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid)
    child.communicate()
    assert not is_alive(child.pid)


def test_a_child_is_in_the_same_space():
    code = "from mkd.platform.processes import process_space; print(process_space())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == process_space()
