"""Run a heterogeneous job of the real Slurm: the student on one machine, its teacher on another kind.

Both machines are on this host, each with a name, an address and a port. See test_slurm.py for the rest.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.test_slurm import ROOT, SETTINGS, Slurm, free_ports, require_slurm, running_slurm, wait_until
from tests.train.command import flags, make_files, read_metrics

HOST = socket.gethostname().partition(".")[0]
MACHINES = """
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 Feature=small State=UNKNOWN
NodeName=other NodeHostname=other NodeAddr=127.0.0.2 Port={second} CPUs=1 Feature=large State=UNKNOWN
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    """Run a private Slurm of two machines of different kinds."""
    require_slurm()
    folder = tmp_path_factory.mktemp("slurm")
    settings = folder / "slurm.conf"
    ports = dict(zip(("controller", "first", "second"), free_ports(3), strict=True))
    text = SETTINGS.format(
        host=HOST,
        cores=1,
        folder=folder,
        controller_port=ports["controller"],
        daemon_port=ports["first"],
        delay=5,
    )
    lines = [line for line in text.splitlines() if not line.startswith(("NodeName", "SlurmdPort"))]
    text = "\n".join(lines).replace(f"{folder}/spool", f"{folder}/spool-%n")
    text = text.replace(f"{folder}/slurmd.pid", f"{folder}/slurmd-%n.pid")
    at = text.index("PartitionName=normal")
    machines = MACHINES.format(host=HOST, first=ports["first"], second=ports["second"]).strip()
    settings.write_text(f"{text[:at]}{machines}\n{text[at:]}\n")
    daemons = [as_machine(name, ["slurmd", "-D", "-c", "-f", settings]) for name in (HOST, "other")]
    with running_slurm(settings, daemons) as one:
        yield one


def as_machine(name: str, command: list) -> list:
    """Return a command that runs another one under another name of this host: slurmd runs once for a name."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]


def submit(slurm: Slurm, files, run: str, *more: object) -> str:
    """Submit a run of one process on either machine; return the number of the job."""
    argv = flags(files, run, "--teacher-processes", 1, "--save", files / run, "--load", files / run, *more)
    own = ["--gpus-per-node", 0, "--cpus-per-task", 1, "--teacher-nodes", 1, "--teacher-constraint", "large"]
    own += ["--option", "constraint=small", "--option", f"output={files / run}.out"]
    command = [sys.executable, ROOT / "launch" / "submit.py", *map(str, own), *argv]
    environment = slurm.environment() | {"NPROC": "1"}
    asked = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout.split()[-1]


def machines_of(slurm: Slurm, job: str) -> list[str]:
    """Return the machine of each part of a heterogeneous job."""
    text = slurm.ask("scontrol", "--oneliner", "show", "job", job)
    parts = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines()]
    return [part["NodeList"] for part in sorted(parts, key=lambda part: int(part["HetJobOffset"]))]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("runs"))


def test_a_job_with_machines_of_two_kinds(slurm, files):
    """It runs to its end, with the student's process on the first kind and the teacher's on the second."""
    job = submit(slurm, files, "both", "--train-iters", 6)
    wait_until(
        lambda: slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "CONFIGURING"), 180, "the end"
    )
    output = (files / "both.out").read_text()
    assert slurm.job(job)["JobState"] == "COMPLETED" and slurm.job(job)["ExitCode"] == "0:0", output
    assert machines_of(slurm, job) == [HOST, "other"]
    assert [one["iteration"] for one in read_metrics(files / "both")] == list(range(1, 7)), output
    assert all("teacher_wait_ms" in one for one in read_metrics(files / "both"))


def test_a_job_that_is_cancelled_saves(slurm, files):
    """Slurm sends SIGTERM to the processes of both parts; both end with 75."""
    job = submit(slurm, files, "cancelled", "--train-iters", 1000000)
    run = files / "cancelled"
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(read_metrics(run)) > 5, 180, "training")
    slurm.ask("scancel", job)
    wait_until(lambda: slurm.job(job)["JobState"] == "CANCELLED", 120, "the end")
    wait_until(lambda: (run / "PREEMPTED").exists(), 60, "the save")
    marker = json.loads((run / "PREEMPTED").read_text())
    assert int((run / "latest_checkpointed_iteration.txt").read_text()) == marker["iteration"] > 5
    assert "preempted: received SIGTERM" in (files / "cancelled.out").read_text()
