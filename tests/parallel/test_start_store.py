"""torchrun --max-restarts: the processes of a second attempt meet each other, and not those that are gone."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal
from datetime import timedelta
import torch
import torch.distributed as dist
from mkd.operations.launch.rendezvous import Rendezvous
from mkd.parallel.context import join_process_group
from mkd.platform import detect

rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
Rendezvous(rank, 2).ready(60)
join_process_group(detect(), timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
if rank and attempt == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print(f"rank {rank}, attempt {attempt}: {total.item()}", flush=True)
"""


def test_every_attempt_has_keys_of_its_own(monkeypatch):
    from mkd.parallel.start_store import start_store

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    stores = []
    for attempt in ("0", "1", "2", "1"):
        for name, value in (world | {"TORCHELASTIC_RESTART_COUNT": attempt}).items():
            monkeypatch.setenv(name, value)
        stores.append(start_store(timedelta(seconds=30)))
    for number, store in enumerate(stores[:3]):
        store.set("address", str(number))
    assert [store.get("address") for store in stores] == [b"0", b"1", b"2", b"1"]


def test_machines_that_count_their_failures_apart_share_their_keys(monkeypatch):
    """Each torchrun counts the failures of its own machine."""
    from mkd.parallel.start_store import needs_own_keys

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for world_size, needed in (("8", True), ("16", False)):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        assert needs_own_keys() == needed


@pytest.mark.slow
def test_a_restart_by_torchrun_meets_itself(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "--monitor-interval", "0.1", str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}, attempt 1: 2.0" for rank in (0, 1)]
