"""Start ranks of small scripts with mkd's launcher. Real trainings are started by tests/test_launch.py."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mkd.commands.evaluate import main as evaluate
from mkd.commands.train import main as train
from mkd.errors import EXIT_PREEMPTED, EXIT_USAGE
from mkd.operations.launch.child_command import ChildCommands
from mkd.operations.launch.local_ranks import ENVIRONMENT, is_started_by_launcher
from tests.reported import reported_codes

ROOT = Path(__file__).resolve().parents[2]
FROM_SHELL = re.compile(r'^export (\w+)="\$\{\1:-(.*)\}"$', re.MULTILINE)
DRIVER = """
import json, signal, sys
from mkd.operations.launch.local_ranks import run_ranks
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
folder, *scripts = sys.argv[1:]
codes = [run_ranks([sys.executable, "-c", script, folder], 2) for script in scripts]
print("codes", json.dumps(codes), flush=True)
"""
BEGIN = "import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"
CODE_OF_THE_FIRST = BEGIN + "time.sleep(30 * (rank == 0)); sys.exit(66)"
WELL = BEGIN + "assert os.environ['WORLD_SIZE'] == '2' and os.environ['NCCL_NVLS_ENABLE'] == '0'"
WELL += "; assert Path(os.environ['PYTHONPATH'].split(os.pathsep)[0], 'pyproject.toml').is_file()"
KILLED = BEGIN + "os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(30)"
SIGNALLED = (  # rank 1 signals the launcher when both can take it; the launcher's own SIGTERM comes later
    BEGIN
    + """
def end(number, frame):
    os.write(1, f"rank {rank} got {signal.Signals(number).name}\\n".encode())
    time.sleep(0.5 * rank)
    os._exit(75)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, end)
Path(sys.argv[1], str(rank)).touch()
while not Path(sys.argv[1], str(1 - rank)).exists():
    time.sleep(0.01)
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
if rank:
    os.kill(os.getppid(), signal.SIGHUP)  # nobody gets it
    time.sleep(0.2)
    os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(30)
"""
)
OUTLIVES = BEGIN + "from mkd.parent_process import end_with_launcher\nend_with_launcher()\n"
OUTLIVES += "os.write(1, f'pid {os.getpid()}\\n'.encode()); time.sleep(60)"


def driver(folder: Path, *scripts: str) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, folder, *scripts]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ranks_have_the_environment_of_the_launch_scripts():
    scripts = dict(FROM_SHELL.findall((ROOT / "launch/env.sh").read_text(encoding="utf-8")))
    others = ("OMP_NUM_THREADS", "MAX_RESTARTS")  # depends on the machine; is for Slurm
    assert {name: value for name, value in scripts.items() if name not in others} == ENVIRONMENT


def test_exit_codes_and_signals(tmp_path):
    """One process runs all four, because importing torch takes longer than they do."""
    stdout, stderr = driver(tmp_path, CODE_OF_THE_FIRST, WELL, KILLED, SIGNALLED).communicate(timeout=200)
    codes = json.loads(stdout.rpartition("codes ")[2])
    assert codes == [66, 0, 128 + signal.SIGKILL, 75], stderr
    assert sorted(re.findall(r"rank \d got \w+", stdout)) == ["rank 0 got SIGUSR1", "rank 1 got SIGUSR1"]
    assert stderr.splitlines() == [
        "rank 1 was ended by SIGKILL; the system kills processes if memory runs out"
    ]


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    process = driver(tmp_path, OUTLIVES)
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.communicate()


def test_a_signal_that_comes_while_a_command_starts_ends_it(monkeypatch):
    """The process exists already, and the caller does not have it yet."""

    def start(*args, popen=subprocess.Popen, **more) -> subprocess.Popen:
        process = popen(*args, **more)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    commands = ChildCommands()
    with commands.signals_forwarded():
        assert commands.run(["--help"]) == EXIT_PREEMPTED
        assert commands.run(["--help"]) == EXIT_PREEMPTED  # does not start
    assert commands.received == [signal.SIGTERM]


@pytest.mark.parametrize("command", [train, evaluate])
def test_one_of_several_ranks_starts_no_others(command, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert command(["--nproc-per-node", "2"]) == EXIT_USAGE
    assert reported_codes(capsys.readouterr().err)[0].startswith("remove-flag")


def test_launchers_are_known_by_their_variables():
    assert not is_started_by_launcher({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})  # the batch script itself
    assert not is_started_by_launcher({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"})
    assert is_started_by_launcher({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"})
    assert is_started_by_launcher({"RANK": "0"}) and is_started_by_launcher({"OMPI_COMM_WORLD_SIZE": "2"})
