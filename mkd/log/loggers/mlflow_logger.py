"""Send metrics to MLflow: to MLFLOW_TRACKING_URI, or to MLflow's default store in the current directory."""

from __future__ import annotations

import re
import time

from mkd.log.loggers.logger import Logger, LoggerStart, Record, numbers_of, stored_name

RUN_ID = "mlflow_run_id.txt"  # in the log folder: a resumed run extends the same curves
_NOT_IN_A_NAME = re.compile(r"[^/\w.\- :]+")
_LONGEST_VALUE = 500  # characters, in every version and store of MLflow
_PARAMS_AT_ONCE = 100  # in every version and store


class MlflowLogger(Logger):
    """Log every number of a record as `train/<key>` or `<split>/<key>` at its iteration.

    Settings are MLflow's parameters of the run. A parameter cannot change, so a resumed run leaves them as
    they were.
    """

    package = "mlflow"
    setting = "mlflow_experiment"
    advice = "set MLFLOW_TRACKING_URI to a server that answers, or to sqlite:///FILE"
    in_background = True

    def __init__(self, start: LoggerStart):
        """Start an MLflow run, or extend the folder's."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        found = self._client.get_experiment_by_name(start.log.mlflow_experiment)
        stored = start.folder / RUN_ID
        if start.resumes and stored.exists():
            self._run_id = stored.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment = (
            found.experiment_id if found else self._client.create_experiment(start.log.mlflow_experiment)
        )
        run = self._client.create_run(experiment, run_name=start.log.name)
        self._run_id = stored_name(start, RUN_ID, run.info.run_id)
        settings = [
            (mlflow_name(path), str(value)[:_LONGEST_VALUE]) for path, value in start.settings.items()
        ]
        params = [Param(name, value) for name, value in settings]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[first : first + _PARAMS_AT_ONCE])

    def write(self, record: Record) -> None:
        now_ms, step = int(1000 * time.time()), record["iteration"]
        numbers = numbers_of(record).items()
        metrics = [self._metric(mlflow_name(key), value, now_ms, step) for key, value in numbers]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id, "FINISHED")


def mlflow_name(key: str) -> str:
    """Return `key` with the characters that MLflow's names may have: teachers[0].hf becomes teachers.0.hf."""
    return _NOT_IN_A_NAME.sub("_", key.replace("[", ".").replace("]", ""))
