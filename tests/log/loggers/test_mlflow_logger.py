"""The real MLflow with a file as its store."""

from __future__ import annotations

import math

import pytest

from mkd.config.schema import LogConfig
from mkd.log.loggers.known_loggers import start_loggers
from mkd.log.loggers.logger import LoggerStart
from mkd.log.loggers.mlflow_logger import RUN_ID, mlflow_name

LOG = LogConfig(mlflow_experiment="pair", name="small")
SETTINGS = {"kd.kd_ratio": 0.5, "teachers[0].hf": "t" * 900, **{f"data.key{i}": None for i in range(150)}}


def test_names_have_the_characters_that_mlflow_allows():
    assert mlflow_name("teachers[0].hf") == "teachers.0.hf"
    assert mlflow_name("train/kd_loss/a teacher (8B)") == "train/kd_loss/a teacher _8B_"


def test_a_resumed_run_extends_the_same_curves(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client = MlflowClient()

    def run(resumes, settings, *records):
        (logger,) = start_loggers(LoggerStart(LOG, tmp_path, settings, resumes))
        for record in records:
            logger.write(record)
        logger.close()
        return (tmp_path / RUN_ID).read_text().strip()

    valid = {"iteration": 2, "split": "valid", "loss": 2.0}
    first = run(False, SETTINGS, {"iteration": 1, "loss": 2.5, "kd_loss/8B (b)": math.nan}, valid)
    again = run(True, {"kd.kd_ratio": 0.9}, {"iteration": 2, "loss": 2.25})
    fresh = run(False, SETTINGS, {"iteration": 1, "loss": 9.0})
    assert first == again != fresh
    stored = client.get_run(first)
    assert (stored.info.run_name, stored.info.status) == ("small", "FINISHED")
    assert stored.data.params["kd.kd_ratio"] == "0.5" and len(stored.data.params) == len(SETTINGS)
    assert set(stored.data.metrics) == {"train/loss", "valid/loss"}  # what is not finite is no point
    history = client.get_metric_history(first, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.5), (2, 2.25)]
    experiment = client.get_experiment_by_name("pair")
    assert len(client.search_runs([experiment.experiment_id])) == 2
