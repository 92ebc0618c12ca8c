"""A logger that fails in a run costs one warning; metrics.jsonl and the other loggers get every record."""

from __future__ import annotations

import json
import threading
import time

import pytest

from mkd.log.loggers import guarded
from mkd.log.loggers.guarded import Guarded
from mkd.log.loggers.logger import Logger
from mkd.log.writers import JsonlWriter, MetricLogger


class Service(Logger):
    """Fail in the methods of `failing`, or after record `last`. `gate` holds `write` back until it is set."""

    package, setting = "json", "name"

    def __init__(self, failing=(), last=99, gate=None):
        self.failing, self.last, self.gate, self.seen, self.closed = failing, last, gate, [], False

    def _may_fail(self, name):
        if name in self.failing:
            raise ConnectionError(f"no {name}\nand more")

    def write(self, record):
        if self.gate:
            self.gate.wait()
        if record["iteration"] > self.last:
            raise ConnectionError("the server is gone\nand more")
        self.seen.append(record["iteration"])

    def truncate_after(self, iteration):
        self._may_fail("truncation")

    def close(self):
        self._may_fail("close")
        self.closed = True


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


@pytest.mark.parametrize("in_background", [False, True])
def test_one_warning_and_the_others_go_on(tmp_path, caplog, in_background):
    broken, fine = Service(last=2), Service()
    loggers = [Guarded("MLflow", broken, in_background), Guarded("trackio", fine, in_background)]
    logger = MetricLogger(JsonlWriter(tmp_path / "metrics.jsonl"), loggers)
    for iteration in range(1, 7):
        logger.write({"iteration": iteration})
        time.sleep(0.05 * in_background)
    logger.close()
    lines = [json.loads(line)["iteration"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (broken.seen, fine.seen, lines) == ([1, 2], [*range(1, 7)], [*range(1, 7)])
    assert fine.closed and not broken.closed
    (warning,) = warnings(caplog)
    assert "MLflow failed" in warning and "the server is gone" in warning and "and more" not in warning


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("failing", ["truncation", "close"])
def test_failures_beside_records_are_a_warning_too(caplog, failing, in_background):
    one = Guarded("W&B", Service(failing=(failing,)), in_background)
    one.truncate_after(3)
    one.write({"iteration": 4})
    one.close()
    (warning,) = warnings(caplog)
    assert f"W&B failed and gets no more metrics of this run: no {failing}." in warning


def test_a_service_that_never_answers_holds_up_neither_steps_nor_the_end(caplog, monkeypatch):
    monkeypatch.setattr(guarded, "PATIENCE_S", 0.1)
    monkeypatch.setattr(guarded, "MOST_WAITING", 5)
    for count in (3, 9):  # the queue has room, or is full
        one, gate = Service(gate=threading.Event()), time.monotonic()
        logger = Guarded("MLflow", one, in_background=True)
        for iteration in range(count):
            logger.write({"iteration": iteration})
        logger.close()
        assert time.monotonic() - gate < 5 and one.seen == []
        one.gate.set()
    waiting, full = warnings(caplog)
    assert "could not be sent within" in waiting and "5 records wait" in full
