"""Test runs under a real Slurm on this machine: warned, preempted and cancelled.

Needs Debian's slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.train.command import flags, make_files, read_metrics
from tests.train.saved_state import saved_state

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
CYCLES = 3
CONTROLLER_S = 30  # time that a busy controller may take to answer
# Slurm waits this long after the end of a job before it restarts it (default: 120 s)
RESTART_DELAY_S = 5
LIMIT_MIN, LEAD_S = 2, 40  # limit of a start of the job; Slurm then warns between 50 and 80 s after the start
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={delay}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=90
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Slurm:
    """Slurm on one machine with a controller, reached through the variable SLURM_CONF."""

    settings: Path

    def ask(self, *command: object) -> str:
        words = [str(word) for word in command]
        return subprocess.run(
            words, env=self.environment(), cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    def environment(self) -> dict[str, str]:
        """Environment of a user who starts CPU runs of two processes."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        return {
            **inherited,
            "SLURM_CONF": str(self.settings),
            "PYTHON": sys.executable,
            "NPROC": "2",
            "OMP_NUM_THREADS": "1",
        }

    def submit(self, argv: list[str], output: Path, *options: object) -> str:
        """Start a run with launch/submit.py; return the number of the job."""
        own = ("--gpus-per-node", 0, "--cpus-per-task", 1, "--option", f"output={output}", *options)
        return self.ask(sys.executable, ROOT / "launch" / "submit.py", *own, *argv).split()[-1]

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows about a job: JobState, Restarts, ExitCode, ...

        Ask a busy controller again.
        """
        deadline = time.monotonic() + CONTROLLER_S
        while True:
            try:
                words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
                return dict(word.split("=", 1) for word in words if "=" in word)
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_until(holds: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.5)


def are_ready(slurm: Slurm, machines: int) -> bool:
    try:
        states = slurm.ask("sinfo", "--Node", "--noheader", "--format=%t", "--partition=normal").split()
    except subprocess.CalledProcessError:
        return False
    return states == ["idle"] * machines


def require_slurm() -> None:
    """Skip the tests where no private Slurm can run."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(
            f"Slurm is not installed, no {' '.join(missing)}: "
            "apt-get install slurmctld slurmd slurm-client munge"
        )
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as their users, and needs to be root for that")


@contextmanager
def running_slurm(settings: Path, machines: Sequence[list]) -> Iterator[Slurm]:
    """Run a Slurm with these commands of its machines and files beside its settings; remove it at the end."""
    folder = settings.parent
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D", "-c", "-f", settings],
        *machines,
    ]
    started = []
    with (folder / "daemons.log").open("w") as log:
        for command in commands:
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(1)
    one = Slurm(settings)
    try:
        wait_until(lambda: are_ready(one, len(machines)), 40, "all machines are ready for jobs")
    except AssertionError:
        pytest.skip(
            "Slurm does not start here: " + " | ".join((folder / "daemons.log").read_text().splitlines()[-6:])
        )
    else:
        yield one
        subprocess.run(["scancel", "--user=root"], env=one.environment(), check=False)
        wait_until(lambda: not one.ask("squeue", "--noheader"), 120, "all jobs have ended")
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    """Run a private Slurm with a folder, ports and a key of its own."""
    require_slurm()
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "spool").mkdir()
    settings = folder / "slurm.conf"
    controller_port, daemon_port = free_ports(2)
    places = dict(
        folder=folder, controller_port=controller_port, daemon_port=daemon_port, delay=RESTART_DELAY_S
    )
    host = socket.gethostname().partition(".")[0]
    settings.write_text(SETTINGS.format(host=host, cores=os.cpu_count(), **places))
    with running_slurm(settings, [["slurmd", "-D", "-c", "-f", settings]]) as one:
        yield one


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("runs"))


def run_flags(files: Path, run: str, *more: object) -> list[str]:
    """Return the flags of a run that resumes from its checkpoints and saves only at signals."""
    save = files / run
    return flags(files, run, "--save", save, "--load", save, "--lr-decay-style", "constant", *more)


def steps_of(files: Path, run: str) -> int:
    """Return the last logged step."""
    lines = read_metrics(files / run) if (files / run / "metrics.jsonl").exists() else []
    return lines[-1]["iteration"] if lines else 0


def saved_step(files: Path, run: str) -> int:
    pointer = files / run / "latest_checkpointed_iteration.txt"
    return int(pointer.read_text()) if pointer.exists() else 0


def test_the_script_is_one_that_slurm_takes(slurm, files):
    options = (
        "--dry-run",
        "--gpus-per-node",
        0,
        "--cpus-per-task",
        1,
        "--time",
        10,
        "--partition",
        "urgent",
        "--job-name",
        "it's a run",
        "--option",
        'comment=a "b" \\ #c',
    )
    script = slurm.ask(sys.executable, ROOT / "launch" / "submit.py", *options, *run_flags(files, "taken"))
    asked = subprocess.run(
        ["sbatch", "--test-only"],
        input=script,
        env=slurm.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert asked.returncode == 0 and "using" in asked.stderr and "in partition urgent" in asked.stderr, (
        asked.stderr
    )


@pytest.mark.fault(15)
def test_warned_three_times_before_its_time_limit(slurm, files):
    """The run gets a last step only after three restarts; it then ends like one that was never stopped."""
    output, settings = files / "warned.out", files / "length.yaml"
    settings.write_text("train_iters: 1000000\n")
    argv = [*run_flags(files, "warned"), "--config", str(settings)]
    at = argv.index("--train-iters")
    del argv[at : at + 2]  # the file sets it
    job = slurm.submit(argv, output, "--time", LIMIT_MIN, "--signal-lead-s", LEAD_S)
    saved = [0]
    for cycle in range(1, CYCLES + 1):
        wait_until(
            lambda cycle=cycle: slurm.job(job)["Restarts"] == str(cycle),
            60 * LIMIT_MIN + 60,
            f"restart {cycle}",
        )
        saved.append(saved_step(files, "warned"))
        assert output.read_text().count("preempted: received SIGUSR1") == cycle
        assert slurm.job(job)["JobState"] != "TIMEOUT"
    assert saved == sorted(set(saved)), "every start has got on"
    last = saved[-1] + 10
    # before the job restarts, RESTART_DELAY_S after its end
    settings.write_text(f"train_iters: {last}\n")
    wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED", 60 * LIMIT_MIN, "the end")
    assert slurm.job(job)["ExitCode"] == "0:0" and slurm.job(job)["Restarts"] == str(CYCLES)
    assert [line["iteration"] for line in read_metrics(files / "warned")] == list(range(1, last + 1))

    undisturbed = [
        "bash",
        ROOT / "launch" / "local.sh",
        *run_flags(files, "undisturbed"),
        "--train-iters",
        str(last),
    ]
    subprocess.run(
        undisturbed, env=slurm.environment(), cwd=files, check=True, capture_output=True, timeout=900
    )
    warned, undisturbed = (saved_state(files / run / f"iter_{last:07d}") for run in ("warned", "undisturbed"))
    assert warned == undisturbed


@pytest.mark.fault(15)
def test_preempted_goes_on_and_cancelled_does_not(slurm, files):
    """Slurm sends SIGTERM in both cases, and the run saves and ends with 75 both times."""
    output = files / "urgent.out"
    job = slurm.submit(run_flags(files, "urgent", "--train-iters", 1000000), output)
    wait_until(lambda: steps_of(files, "urgent") > 5, 120, "training")
    slurm.ask("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until(lambda: slurm.job(job)["Restarts"] == "1", 60, "a restart")
    wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", 120, "the restart is running")
    saved = saved_step(files, "urgent")
    assert saved > 5 and output.read_text().count("preempted: received SIGTERM") == 1
    wait_until(lambda: steps_of(files, "urgent") > saved + 5, 120, "training goes on")

    slurm.ask("scancel", job)
    wait_until(lambda: slurm.job(job)["JobState"] == "CANCELLED", 120, "the end")
    time.sleep(2 * RESTART_DELAY_S)
    assert slurm.job(job)["JobState"] == "CANCELLED" and slurm.job(job)["Restarts"] == "1"
    assert (
        saved_step(files, "urgent") > saved and output.read_text().count("preempted: received SIGTERM") == 2
    )
    assert [line["iteration"] for line in read_metrics(files / "urgent")] == list(
        range(1, steps_of(files, "urgent") + 1)
    )
