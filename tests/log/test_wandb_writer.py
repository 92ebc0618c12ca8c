from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mkd.config.schema import LogConfig
from mkd.log.wandb_writer import WandbWriter, run_id
from mkd.log.writers import is_installed, missing_packages
from tests.reported import refused
from tests.train.command import flags, make_files, read_metrics

ROOT = Path(__file__).resolve().parents[2]
LOG = LogConfig(wandb_project="test", name="offline")
_OFFLINE_RUN = """
import math, sys
from mkd.config.schema import LogConfig
from mkd.log.wandb_writer import WandbWriter
writer = WandbWriter(LogConfig(wandb_project="test", name="offline"), sys.argv[1], {"kd.kd_ratio": 0.5})
writer.write({"iteration": 1, "loss": 2.5, "ce_loss": math.nan})
writer.write({"iteration": 1, "split": "valid", "loss": 2.0})
writer.truncate_after(0)
writer.close()
"""


def test_missing_wandb_says_what_to_install(tmp_path, monkeypatch):
    # Python itself marks a module that cannot be imported like this.
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused("package-missing: --wandb-project is set and wandb") as caught:
        WandbWriter(LOG, tmp_path, {})
    assert "pip install wandb" in caught.value.do and not list(tmp_path.iterdir())


def test_missing_writers_are_known_before_anything_is_loaded(monkeypatch):
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    errors = missing_packages(LogConfig(wandb_project="p", tensorboard_dir="d"))
    assert [error.what.split()[0] for error in errors] == ["--tensorboard-dir", "--wandb-project"]
    assert list(missing_packages(LogConfig())) == []


def test_the_folder_that_wandb_leaves_is_no_installation(tmp_path, monkeypatch):
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("left_behind") and is_installed("json") and not is_installed("no_such_package")


def test_a_run_keeps_its_id_until_one_starts_anew(tmp_path):
    first = run_id(tmp_path, resumes=True)  # of a run whose first start wrote none
    assert run_id(tmp_path, resumes=True) == first and len(first) == 8
    fresh = run_id(tmp_path, resumes=False)
    assert fresh != first and run_id(tmp_path, resumes=True) == fresh


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_records_go_to_an_offline_run(tmp_path, monkeypatch):
    """Run in a separate process, because wandb leaves threads; the run's file has names and configuration."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    command = [sys.executable, "-c", _OFFLINE_RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert run_id(tmp_path, resumes=True) in file.name
    for name in (b"train/loss", b"valid/loss", b"kd.kd_ratio"):
        assert name in content
    assert b"train/ce_loss" not in content  # W&B has no NaN in a curve


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_a_run_with_every_writer(tmp_path, monkeypatch):
    """W&B and TensorBoard get the numbers of metrics.jsonl; a restart without --load is a new run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    argv = flags(
        make_files(tmp_path), "run", "--wandb-project", "real", "--tensorboard-dir", tmp_path / "events"
    )
    command = [sys.executable, str(ROOT / "pretrain_kd.py"), *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    records = read_metrics(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    for key in ("loss", "kd_loss", "teacher_ce", "grad_norm"):
        assert [(one.step, one.value) for one in events.Scalars(f"train/{key}")] == [
            (record["iteration"], pytest.approx(record[key], rel=1e-6)) for record in records
        ]
    (file,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert run_id(tmp_path / "run", resumes=True) in file.name
    assert all(json.dumps(record["kd_loss"]).encode() in content for record in records)
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=True)
    assert run_id(tmp_path / "run", resumes=True) not in file.name
