from __future__ import annotations

from mkd.config.schema import LogConfig
from mkd.log.loggers.logger import LoggerStart
from mkd.log.loggers.tensorboard_logger import TensorBoardLogger


def start(folder):
    return TensorBoardLogger(LoggerStart(LogConfig(tensorboard_dir=str(folder)), folder, {}, resumes=False))


def scalars(directory, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_splits_are_apart_and_what_a_resume_redoes_is_hidden(tmp_path):
    first = start(tmp_path)
    for iteration in (1, 2, 3):
        first.write({"iteration": iteration, "loss": float(iteration), "kd_loss/small": 0.5})
    first.write({"iteration": 2, "split": "valid", "loss": 9.0})
    first.close()
    resumed = start(tmp_path)
    resumed.truncate_after(1)
    resumed.write({"iteration": 2, "loss": 20.0})
    resumed.close()
    assert scalars(tmp_path, "train/loss") == {1: 1.0, 2: 20.0}
    assert scalars(tmp_path, "train/kd_loss/small") == {1: 0.5}


def test_an_evaluation_goes_to_its_own_split(tmp_path):
    logger = start(tmp_path)
    logger.write({"iteration": 2, "split": "valid", "loss": 9.0})
    logger.close()
    assert scalars(tmp_path, "valid/loss") == {2: 9.0}
