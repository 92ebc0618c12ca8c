"""Check layouts of a benchmark: their words, and the rows of a step on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mkd.config.load import load_config
from mkd.errors import UsageError
from tools.benchmarks.layout_benchmark import MEMORY, TIMES, RankPeak, Row, wrong_losses
from tools.benchmarks.layout_words import arm_of
from tools.benchmarks.random_engine import PairSettings

PAIR = PairSettings("student", "teacher", 64, num_microbatches=8)
PEAK = RankPeak(peak=40.0, planned=50.0, reserved=44.0, graphs=2.0, outside=8.0, planned_outside=8.5)
ROW = Row(
    100.0, 80.0, int(4e14), 4000, 4, 1.5, (2, 3), 2.5, False, (PEAK, replace(PEAK, peak=45.0, reserved=47.0))
)


def config_of(words: str, world_size: int):
    settings = arm_of(words).settings(PAIR, world_size)
    data = world_size // (settings.tensor_parallel * settings.pipeline_parallel)
    return load_config(settings.argv(torch.bfloat16, data)).config


def test_words_become_flags_of_a_run():
    config = config_of("tp2,pp2,ahead3,fp8", 8)
    parallel, (teacher,) = config.parallel, config.teachers
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert parallel.sequence_parallel and parallel.teacher_prefetch == "3" and teacher.precision == "fp8"
    peers = config_of("peers4,distributed,block3", 4)
    assert (peers.teachers[0].residency, peers.teachers[0].peers) == ("peers", 4)
    assert peers.training.recompute_num_layers == 3 and peers.parallel.teacher_prefetch == "auto"
    assert (
        config_of("sft,eager", 1).kd.kd_ratio == 0
        and config_of("vp2,pp2", 2).parallel.num_virtual_stages_per_pipeline_rank == 2
    )


def test_every_layout_has_the_same_packs():
    for words, world_size in (("dp", 4), ("tp4", 4), ("tp2,pp2", 8), ("pp2", 2)):
        assert config_of(words, world_size).training.global_batch_size == 8
    for words, world_size in (("tp4", 6), ("dp", 3)):
        with pytest.raises(UsageError, match="cannot have"):
            arm_of(words).settings(PAIR, world_size)


def test_a_row_of_gpus_has_its_figures_beside_those_of_the_plan():
    times, memory = ROW.times("tp4"), ROW.memory("tp4")
    assert len(times) == len(TIMES) and len(memory) == len(MEMORY)
    assert times[1:7] == ["100.0", "80.0", "1.250", "10000", "12500", "1e+03"]
    assert memory[1:5] == ["45.000", "50.000", "0.940", "47.000"], "replayed graphs are in what is reserved"
    assert replace(PEAK, graphs=0.0).ratio == 0.8
    assert {one.quantity for one in ROW.others("case", "tp4")} >= {"MFU", "planned memory", "planned rate"}


def test_a_layout_with_another_loss_is_wrong():
    rounded, other = replace(ROW, loss=2.0, is_rounded=True), replace(ROW, loss=1.6)
    assert wrong_losses({"dp": ROW, "fp8": rounded, "tp4": replace(ROW, loss=1.501)}) == []
    assert wrong_losses({"dp": ROW, "tp4": other}) == ["tp4: loss 1.6, that of the first layout 1.5"]
