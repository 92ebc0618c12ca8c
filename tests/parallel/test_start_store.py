"""torchrun --max-restarts: the processes of a second attempt meet each other, and not those that are gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal
from datetime import timedelta
import torch
import torch.distributed as dist
from mkd.operations.rendezvous import Rendezvous
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


def test_a_restart_by_torchrun_meets_itself(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "--monitor-interval", "0.1", str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}, attempt 1: 2.0" for rank in (0, 1)]
