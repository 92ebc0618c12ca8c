"""The real trackio, with files on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_RUNS = """
import json, math, sys
from pathlib import Path
from mkd.config.schema import LogConfig
from mkd.log.loggers.known_loggers import start_loggers
from mkd.log.loggers.logger import LoggerStart
folder = Path(sys.argv[1])

def run(resumes, *records):
    log = LogConfig(trackio_project="pair", name="small")
    (logger,) = start_loggers(LoggerStart(log, folder, {"kd.kd_ratio": 0.5}, resumes))
    for record in records:
        logger.write(record)
    logger.close()
    return (folder / "trackio_run_name.txt").read_text().strip()

valid = {"iteration": 2, "split": "valid", "loss": 2.0}
names = [run(False, {"iteration": 1, "loss": 2.5, "ce_loss": math.nan}, valid)]
names += [run(True, {"iteration": 2, "loss": 2.25}), run(False, {"iteration": 1, "loss": 9.0})]
from trackio.sqlite_storage import SQLiteStorage

def curve(name, key):
    return [[point["step"], point[key]] for point in SQLiteStorage.get_logs("pair", name) if key in point]

curves = {name: curve(name, "train/loss") for name in names}
held_out = curve(names[0], "valid/loss")
print(json.dumps([names, curves, held_out]))
"""


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_a_resumed_run_extends_the_same_curves(tmp_path):
    """Run in a separate process, because trackio leaves threads."""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _RUNS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names, curves, held_out = json.loads(done.stdout)  # the banners of trackio are not in the output
    assert names[0] == names[1] != names[2] and names[0].startswith("small-")
    assert curves == {names[0]: [[1, 2.5], [2, 2.25]], names[2]: [[1, 9.0]]} and held_out == [[2, 2.0]]
