from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from mkd.config.schema import LogConfig
from mkd.log.loggers.known_loggers import LOGGERS, is_installed, missing_packages, start_loggers
from mkd.log.loggers.logger import LoggerStart, numbers_of
from tests.reported import refused

ALL = replace(LogConfig(), **{logger.setting: "somewhere" for logger in LOGGERS.values()})


def test_missing_packages_are_known_before_anything_is_loaded(monkeypatch):
    for logger in LOGGERS.values():
        monkeypatch.setitem(sys.modules, logger.package, None)  # as Python marks what cannot be imported
    errors = list(missing_packages(ALL))
    flags = ["--tensorboard-dir", "--wandb-project", "--mlflow-experiment", "--trackio-project"]
    assert [error.what.split()[0] for error in errors] == flags
    assert {error.code for error in errors} == {"package-missing"}
    assert all(
        f"pip install {name.package}" in e.do for name, e in zip(LOGGERS.values(), errors, strict=True)
    )
    assert list(missing_packages(LogConfig())) == []


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_that_cannot_be_imported_says_what_to_install(name, tmp_path, monkeypatch):
    logger = LOGGERS[name]
    for module in [one for one in sys.modules if one.split(".")[0] == logger.package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, logger.package, None)
    start = LoggerStart(replace(LogConfig(), **{logger.setting: "x"}), tmp_path, {}, resumes=False)
    with refused(f"package-missing: {logger.flag()} is set and {logger.package} is not installed") as caught:
        start_loggers(start)
    assert f"pip install {logger.package}" in caught.value.do and not list(tmp_path.iterdir())


def test_a_logger_that_does_not_start_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    start = LoggerStart(LogConfig(tensorboard_dir=str(tmp_path / "file")), tmp_path, {}, resumes=False)
    with refused("logger-not-started: TensorBoard did not start") as caught:
        start_loggers(start)
    assert "leave --tensorboard-dir out" in caught.value.do


def test_the_folder_that_wandb_leaves_is_no_installation(tmp_path, monkeypatch):
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("left_behind") and is_installed("json") and not is_installed("no_such_package")


def test_numbers_of_a_record():
    record = {"iteration": 3, "split": "tasks", "arc/accuracy": 0.5, "loss": float("nan")}
    assert numbers_of(record) == {"tasks/arc/accuracy": 0.5}
    assert numbers_of({"iteration": 3, "loss": 2}) == {"train/loss": 2}
