"""The disk space that a run needs before it starts."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from mkd.config.schema import CheckpointConfig, Config, TrainingConfig
from mkd.human import size
from mkd.operations.disk import (
    Written,
    checkpoints_to_come,
    checkpoints_to_stay,
    disk_notes,
    disk_problems,
    writes_of,
)
from mkd.plan.advice.forecast_text import describe_totals
from mkd.plan.checks.vision_limits import PARTS
from mkd.plan.forecast import Forecast
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import checkpoint_bytes, model_parameters, weight_bytes
from mkd.plan.models.towers import tower_parameters
from tests.checkpoint.tiny_saves import small_disk
from tests.families.test_vision_configs import HUB_QWEN
from tests.plan.shapes import STUDENT
from tests.run_facts import facts_of


def settings(folder, train_iters=100, bf16=True, **checkpoint) -> Config:
    training = TrainingConfig(train_iters=train_iters, bf16=bf16)
    return Config(checkpoint=CheckpointConfig(save=str(folder), **checkpoint), training=training)


@pytest.mark.parametrize(
    ("present", "checkpoint", "count"),
    [
        (0, {}, 1),
        (0, {"save_interval": 10}, 1),  # all stay: it is unknown how often people delete some
        (0, {"save_interval": 10, "keep_checkpoints": 3}, 4),
        (2, {"save_interval": 10, "keep_checkpoints": 3}, 2),
        (3, {"save_interval": 10, "keep_checkpoints": 3}, 1),
        (7, {"save_interval": 10, "keep_checkpoints": 3}, 1),
        (0, {"save_interval": 50, "keep_checkpoints": 3}, 2),
        (0, {"keep_checkpoints": 3}, 1),
        (0, {"save_interval": 10, "save_retain_interval": 50}, 2),
    ],
)
def test_the_new_checkpoint_is_beside_those_that_stay(present, checkpoint, count, tmp_path):
    for iteration in range(present):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    config = settings(tmp_path, **checkpoint)
    assert checkpoints_to_come(config) == count
    write = next(iter(writes_of(config, STUDENT, [])))
    assert write.num_bytes == count * checkpoint_bytes(STUDENT, True, ())
    assert write.instead == "save nothing (--no-save)"
    assert write.what == ("a checkpoint" if count == 1 else f"{count} checkpoints")


@pytest.mark.parametrize(
    ("checkpoint", "start", "count"),
    [
        ({}, 0, 1),
        ({"save_interval": 10}, 0, 10),
        ({"save_interval": 30}, 0, 4),
        ({"save_interval": 30}, 45, 3),
        ({"save_interval": 10}, 90, 1),
        ({"save_interval": 10}, 100, 0),
        ({"save_interval": 10, "keep_checkpoints": 3}, 0, 0),
        ({"save_interval": 10, "save_retain_interval": 50}, 0, 2),
        ({"save_interval": 10, "save_retain_interval": 25, "keep_checkpoints": 4}, 0, 2),
        ({"save_interval": 10, "save_retain_interval": 50}, 50, 1),
        ({"save_interval": 10, "ckpt_step": 20}, 90, 8),
        ({"save_interval": 15, "save_retain_interval": 20}, 0, 2),  # 60, and the last
        ({"save_interval": 15, "save_retain_interval": 20}, 60, 1),
    ],
)
def test_checkpoints_to_stay(checkpoint, start, count, tmp_path):
    """A resumed run counts only checkpoints to come, however many there are already."""
    if start:
        (tmp_path / f"iter_{start:07d}").mkdir()
    assert checkpoints_to_stay(settings(tmp_path / "other", load=str(tmp_path), **checkpoint)) == count


@pytest.mark.parametrize(
    ("checkpoint", "text"),
    [
        ({"save_interval": 10}, "give --keep-checkpoints N"),
        ({"save_interval": 10, "save_retain_interval": 20}, "give a larger --save-retain-interval"),
        ({"save_interval": 10, "keep_checkpoints": 3}, None),
        ({}, None),
        ({"size": 2}, "up to 3 checkpoints"),
        ({"size": 2, "save_interval_in_mins": 1.0}, "saves after 1 minute without a save"),
        ({"size": 2, "save_interval_in_mins": 0.0}, None),
        ({"size": 2, "keep_checkpoints": 1}, None),
    ],
)
def test_a_disk_that_will_be_full_is_foretold(checkpoint, text, tmp_path, monkeypatch):
    """`size` is the room of the disk in checkpoints."""
    checkpoint = dict(checkpoint)
    room = checkpoint.pop("size", 4) * checkpoint_bytes(STUDENT, True, ())
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, room))
    (note,) = disk_notes(settings(tmp_path, **checkpoint), STUDENT) or [None]
    assert note is None if text is None else text in note and f"{room / 2**30:.2f} GiB left" in note


@pytest.mark.parametrize(("bf16", "width", "with_optimizer"), [(True, 2, 14), (False, 4, 12)])
def test_the_export_has_the_weights_alone(bf16, width, with_optimizer, tmp_path):
    config = settings(tmp_path, bf16=bf16, export_hf=str(tmp_path / "hf"))
    sizes = {write.flag: write.num_bytes for write in writes_of(config, STUDENT, []) if write.num_bytes}
    assert sizes["--export-hf"] == weight_bytes(STUDENT, bf16) > 1.7e9 * width
    assert sizes["--save"] / sizes["--export-hf"] == with_optimizer / width
    more = {write.flag: write.num_bytes for write in writes_of(config, STUDENT, [], 1000) if write.num_bytes}
    assert more == sizes | {"--export-hf": sizes["--export-hf"] + 1000}  # tensors that mkd does not train


@pytest.mark.parametrize("parts, states", [(("text", "projector"), "projector"), (PARTS, "tower projector")])
def test_a_model_with_images_has_one_size_in_the_plan_and_on_the_disk(parts, states, tmp_path):
    """Its tower counts; only what learns has an fp32 copy and moments."""
    config = settings(tmp_path, export_hf=str(tmp_path / "hf"), train_iters=1)
    config = replace(config, student=replace(config.student, train_parts=parts))
    shape = ModelShape.from_hf_config(HUB_QWEN)
    text, tower = model_parameters(replace(shape, vision=None)).total, tower_parameters(shape)
    learned = text + sum(getattr(tower, part) for part in states.split())
    weights = 2 * (text + tower.total)
    sizes = {write.flag: write.num_bytes for write in writes_of(config, shape, []) if write.num_bytes}
    assert sizes == {"--save": weights + 12 * learned, "--export-hf": weights}
    totals = describe_totals(Forecast(facts_of(config, 1, shape)))
    assert totals.startswith("1 step: ")
    assert f"takes about {size(sizes['--save'])}, " in totals and totals.endswith(f" {size(weights)}")


def test_little_room_is_said_in_mib(tmp_path):
    with small_disk(tmp_path / "disk", "512k") as disk:
        if disk is None:
            pytest.skip("mounting a tmpfs is not allowed here")
        for size, text in ((2**20, "1.00 MiB"), (3 * 2**29, "1.50 GiB")):
            (error,) = disk_problems([Written("a checkpoint", "--save", disk, size)])
            assert error.what == f"the disk of {disk} has 0.50 MiB left, the run writes {text} to it"
            assert error.why.endswith(f"a checkpoint {text}")


def test_a_run_without_an_end_is_counted_at_once(tmp_path):
    config = settings(tmp_path, save_interval=1)
    endless = replace(config, training=replace(config.training, train_iters=10**12))
    assert checkpoints_to_stay(endless) == 10**12
