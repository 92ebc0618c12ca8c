"""torchrun --max-restarts: the processes of a second attempt meet each other, and not those that are gone."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from mkd.operations.launch.rendezvous import Rendezvous
from mkd.parallel.context import join_process_group
from mkd.platform import detect

rank, is_first = int(os.environ["RANK"]), not Path(sys.argv[1]).exists()
meeting = Rendezvous(rank, 2)
choice = meeting.gather("--teacher-processes", os.getpid(), 60)
meeting.ready(60)
join_process_group(detect(), timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
present = [None, None]
dist.all_gather_object(present, os.getpid())
if rank and is_first:
    Path(sys.argv[1]).touch()
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print(f"{total.item()}, {'those present' if choice == present else 'others'} have chosen", flush=True)
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


def test_stores_that_may_have_keys_of_an_earlier_attempt(monkeypatch):
    """On several machines each torchrun counts its own failures; without it, rank 0 hosts a new store."""
    from mkd.parallel.start_store import needs_own_keys

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for world_size, restarts, agent_store, needed in (
        ("8", "0", "True", False),
        ("8", "1", "True", True),
        ("16", "0", "True", True),
        ("16", "1", "False", False),
        ("16", "1", None, False),
    ):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        if agent_store:
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)
        assert needs_own_keys() == needed


@pytest.fixture
def clients():
    """Return a function that makes clients of one store, as each process has its own."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False)


def attempt_of(clients, size: int, order: list[int], timeout_s: float = 30.0) -> list[int]:
    """Return the number that each rank of an attempt gets. They come in this order, a little apart."""
    from mkd.parallel.start_store import agree_on_attempt

    def of_rank(rank: int) -> int:
        time.sleep(0.01 * order.index(rank))
        return agree_on_attempt(clients(), rank, size, timedelta(seconds=timeout_s))

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(of_rank, range(size)))


def test_the_processes_of_every_attempt_agree_on_a_number_of_their_own(clients):
    """In every order, and with tickets of processes that died with or without an answer."""
    found = []
    for repetition in range(20):
        order = random.Random(repetition).sample(range(4), 4)
        dead = clients()
        for _ in range(repetition % 3):  # they took a ticket, and died before they read the answer
            dist.PrefixStore("mkd/attempts", dead).add("tickets", 1)
        (number,) = set(attempt_of(clients, 4, order))
        found.append(number)
    assert len(set(found)) == 20


def test_a_rank_that_does_not_come_ends_the_wait(clients):
    with pytest.raises(dist.DistError):
        attempt_of(clients, 2, [0, 1][:1], timeout_s=0.5)
    assert len(set(attempt_of(clients, 2, [1, 0]))) == 1  # the next attempt is complete


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_a_restart_by_torchrun_meets_itself(tmp_path, machines):
    """No process of the second attempt has a value of the first one, which is in the same store."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free.getsockname()[1]}"]
    launch = ["-m", "torch.distributed.run", "--nnodes", str(machines), *meet, "--rdzv-id", "restart"]
    launch += ["--max-restarts", "2", "--nproc-per-node", str(2 // machines), "--monitor-interval", "0.1"]
    command = [sys.executable, *launch, str(tmp_path / "script.py"), str(tmp_path / "was killed")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(machines)]
    try:
        ended = [one.communicate(timeout=300) for one in started]
    finally:
        for one in started:
            one.terminate()
    assert [one.returncode for one in started] == [0] * machines, [said[-3000:] for _, said in ended]
    lines = "".join(said for said, _ in ended).splitlines()
    assert lines == ["2.0, those present have chosen"] * 2
