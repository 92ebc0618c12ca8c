"""Run and agent are killed 20 times: every record is trained on once, in the order of an unbroken run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fault_injection import environment
from tests.train.command import read_metrics
from tests.train.record_run import GROUPS, MEMBERS, argv, make_files

ROOT = Path(__file__).parents[2]
POINTS = "in_rollout", "in_step", "in_optimizer", "before_pointer"
KILLS, STEPS = 20, 22
GAME = ROOT / "tests" / "kinds" / "sampled" / "tool_game.py"


def start_agent(folder: Path) -> subprocess.Popen:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(GAME), str(folder), str(STEPS * GROUPS)], env=variables)


@pytest.mark.slow
def test_twenty_kills_lose_and_repeat_nothing(tmp_path):
    """Nothing is stale here, so that all records must be taken. Every second kill also kills the agent."""
    files, folder = make_files(tmp_path), tmp_path / "killed in"
    folder.mkdir()
    words = argv(
        files, "killed", "--save", files / "killed", "--load", files / "killed", "--save-interval", 1
    )
    words += ["--train-iters", str(STEPS), "--max-staleness", "1000"]
    command = [sys.executable, str(ROOT / "pretrain_kd.py"), *words]
    agent, agents_killed = start_agent(folder), 0
    try:
        for step in [*range(2, KILLS + 2), None]:
            fault = environment(f"kill@{POINTS[step % len(POINTS)]}::{step}" if step else "")
            variables = {**os.environ, **fault, "OMP_NUM_THREADS": "1"}
            run = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if step and step % 2 and agent.poll() is None:
                time.sleep(1 + step % 5)
                agent.send_signal(signal.SIGKILL)
                agent.wait()
                agents_killed += 1
                agent = start_agent(folder)
            output, _ = run.communicate(timeout=600)
            assert run.returncode == (-9 if step else 0), output[-3000:].decode()
    finally:
        agent.kill()
        agent.wait()
    assert agents_killed >= 5
    lines = [line for line in read_metrics(files / "killed") if "split" not in line]
    assert [line["consumed_prompts"] for line in lines] == [GROUPS * step for step in range(1, STEPS + 1)]
    assert all(line["rollout/stale"] == line["rollout/bad_records"] == 0 for line in lines)
    assert all(line["rollout/logp_gap"] < 1e-4 for line in lines if line["rollout/version_lag"] == 0)
    taken = [
        json.loads(line)["record"]["id"]
        for path in sorted((files / "killed" / "rollouts").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()[1:]
    ]
    expected = [f"game-{group}-{member}" for group in range(STEPS * GROUPS) for member in range(MEMBERS)]
    assert taken == expected
