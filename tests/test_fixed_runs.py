"""`python -m tests.fixed_runs` prints the hash of a run, and the same one again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fixed_runs import ROOT, digest


@pytest.mark.slow
def test_a_fixed_run_has_the_same_hash_again(tmp_path):
    command = [sys.executable, "-m", "tests.fixed_runs", "--work", str(tmp_path), "--only"]
    command.append("cross_tokenizer_gold")
    printed = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    metrics = tmp_path / "runs/cross_tokenizer_gold/metrics.jsonl"
    steps = [json.loads(line)["iteration"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert max(steps) == 4
    assert printed == [f"{digest(metrics)}  cross_tokenizer_gold\n"] * 2
