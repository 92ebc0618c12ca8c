"""A command takes one thread where other processes fill the cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from mkd import platform

CODE = """
import os
{before}
os.getloadavg = lambda: ({load}, 0.0, 0.0)
os.sched_getaffinity = lambda process: {{0, 1}}
from mkd.busy_machine import share_cores
share_cores()
import torch
print(torch.get_num_threads())
"""


BUSY = ["more processes want to run than this machine has cores: one thread, which waits for no other"]


@pytest.mark.parametrize("before", ["", "import torch; torch.set_num_threads(2)"])
@pytest.mark.parametrize(("load", "is_busy"), [(3.9, False), (9.0, True)])
def test_a_busy_machine_gets_one_thread(before, load, is_busy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    printed, said = lines_of(CODE.format(before=before, load=load), environment)
    assert said == (BUSY if is_busy else [])
    assert printed == ["1"] if is_busy else before == "" or printed == ["2"]


def test_threads_that_were_given_stay():
    code = CODE.format(before="", load=9.0)
    assert lines_of(code, os.environ | {"OMP_NUM_THREADS": "2"}) == (["2"], [])


def test_a_run_keeps_its_threads_and_says_that_one_is_faster(monkeypatch):
    cpu = platform.Platform(torch.device("cpu"), "gloo", transformer_engine=False, apex=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(platform, "is_busy", lambda: False)
    assert cpu.describe().endswith("2 threads a process")
    monkeypatch.setattr(platform, "is_busy", lambda: True)
    assert cpu.describe().endswith("2 threads a process; on this busy machine OMP_NUM_THREADS=1 is faster")


def lines_of(code: str, environment: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return what a program prints, and what it says beside it."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines(), done.stderr.splitlines()
