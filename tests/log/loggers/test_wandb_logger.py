from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mkd.config.schema import LogConfig
from mkd.log.loggers.logger import LoggerStart, stored_name
from mkd.log.loggers.wandb_logger import RUN_ID
from tests.train.command import flags, make_files, read_metrics

ROOT = Path(__file__).resolve().parents[3]
_OFFLINE_RUN = """
import math, sys
from pathlib import Path
from mkd.config.schema import LogConfig
from mkd.log.loggers.logger import LoggerStart
from mkd.log.loggers.wandb_logger import WandbLogger
log = LogConfig(wandb_project="test", name="offline")
logger = WandbLogger(LoggerStart(log, Path(sys.argv[1]), {"kd.kd_ratio": 0.5}, resumes=False))
logger.write({"iteration": 1, "loss": 2.5, "ce_loss": math.nan})
logger.write({"iteration": 1, "split": "valid", "loss": 2.0})
logger.truncate_after(0)
logger.close()
"""


def run_id(folder: Path) -> str:
    return (folder / RUN_ID).read_text().strip()


def test_a_run_keeps_its_name_until_one_starts_anew(tmp_path):
    def name(new, resumes):
        return stored_name(LoggerStart(LogConfig(), tmp_path, {}, resumes), "name.txt", new)

    assert name("first", resumes=True) == "first"  # of a run whose first start wrote none
    assert name("second", resumes=True) == "first"
    assert name("third", resumes=False) == "third" and name("fourth", resumes=True) == "third"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_records_go_to_an_offline_run(tmp_path, monkeypatch):
    """Run in a separate process, because wandb leaves threads; the run's file has names and configuration."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    command = [sys.executable, "-c", _OFFLINE_RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert run_id(tmp_path) in file.name
    for name in (b"train/loss", b"valid/loss", b"kd.kd_ratio"):
        assert name in content
    assert b"train/ce_loss" not in content  # W&B has no NaN in a curve


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_a_run_with_every_logger(tmp_path, monkeypatch):
    """The loggers get the numbers of metrics.jsonl; a restart without --load is a new run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    more = ["--wandb-project", "real", "--tensorboard-dir", tmp_path / "events"]
    others = [name for name in ("mlflow", "trackio") if importlib.util.find_spec(name)]
    known = {"mlflow": ["--mlflow-experiment", "real"], "trackio": ["--trackio-project", "real"]}
    more += [part for name in others for part in known[name]]
    command = [sys.executable, str(ROOT / "pretrain_kd.py"), *flags(make_files(tmp_path), "run", *more)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "gets no more metrics" not in done.stdout + done.stderr
    records = read_metrics(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    for key in ("loss", "kd_loss", "teacher_ce", "grad_norm"):
        curve = [(record["iteration"], pytest.approx(record[key], rel=1e-6)) for record in records]
        assert [(one.step, one.value) for one in events.Scalars(f"train/{key}")] == curve
        if "mlflow" in others:
            from mlflow.tracking import MlflowClient

            client, stored = MlflowClient(), (tmp_path / "run" / "mlflow_run_id.txt").read_text().strip()
            points = client.get_metric_history(stored, f"train/{key}")
            assert sorted((one.step, one.value) for one in points) == curve
    (file,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    first = run_id(tmp_path / "run")
    assert first in file.name
    assert all(json.dumps(record["kd_loss"]).encode() in content for record in records)
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=240, check=True)
    assert run_id(tmp_path / "run") != first
