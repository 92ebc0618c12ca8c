"""A real run that is killed every seven steps logs each document of an epoch once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mkd.tokenizers.load import open_tokenizer
from tests.fault_injection import environment
from tests.train.command import flags, make_files, read_metrics, write_records

ROOT = Path(__file__).parents[2]
DOCUMENTS, CRASH_EVERY = 24, 7


@pytest.fixture
def files(tmp_path):
    """Each document has another number of loss tokens, so the log identifies the document of a step."""
    make_files(tmp_path)
    write_records(tmp_path / "text.jsonl", *({"text": "fox " * i} for i in range(1, DOCUMENTS + 1)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.fault(22)
def test_kill_9_every_seven_steps_of_an_epoch(files):
    more = ("--global-batch-size", 1, "--pack", "none", "--seq-length", 64, "--train-iters", DOCUMENTS)
    more += ("--save", files / "run", "--load", files / "run", "--save-interval", 3)
    command = [sys.executable, str(ROOT / "pretrain_kd.py"), *flags(files, "run", *more)]
    kills = range(CRASH_EVERY, DOCUMENTS, CRASH_EVERY)
    for step in [*kills, None]:
        fault = environment(f"kill@in_step::{step}" if step else "")
        variables = {**os.environ, **fault, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert result.returncode == (-9 if step else 0), result.stdout[-2000:] + result.stderr[-2000:]
    lines = read_metrics(files / "run")
    assert [line["iteration"] for line in lines] == list(range(1, DOCUMENTS + 1))
    assert [line["consumed_samples"] for line in lines] == list(range(1, DOCUMENTS + 1))
    tokenizer = open_tokenizer(str(files / "student"))
    documents = Counter(len(tokenizer.encode("fox " * i)) for i in range(1, DOCUMENTS + 1))
    assert max(documents.values()) == 1 and Counter(line["num_loss_tokens"] for line in lines) == documents
