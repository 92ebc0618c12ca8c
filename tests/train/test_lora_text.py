"""Run LoRA students on pairs of answers and on their own text; the base is the reference, for no memory."""

from __future__ import annotations

import math

import pytest

from tests.train import preference_run, reward_run, rollout_run
from tests.train.command import read_metrics, run_main

LORA = ("--lora-rank", "4", "--no-save")


def test_dpo_with_the_base_as_reference(ranks, tmp_path):
    files = preference_run.make_files(tmp_path)
    pipeline = "--pipeline-model-parallel-size", "2"
    results = run_main(ranks, preference_run.argv(files, "run", *LORA, *pipeline, reference=None), 2)
    assert results[0].exit_code == 0, results[0].stderr
    first, *_, last = read_metrics(files / "run")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-12) and first["dpo/margin"] == 0
    assert last["loss"] < first["loss"] and last["dpo/accuracy"] > 0.5


def test_grpo_with_the_base_as_reference(ranks, tmp_path):
    """Sampled by the student with its adapters, in front of which the reference stays."""
    files = rollout_run.make_files(tmp_path)
    tensor = "--tensor-model-parallel-size", "2", "--sequence-parallel"
    argv = reward_run.argv(files, "run", *LORA, *tensor, "--train-iters", 2)
    argv[argv.index("--teacher-hf") + 1] = "student-base"
    results = run_main(ranks, argv, 2)
    assert results[0].exit_code == 0, results[0].stderr
    first, *_, last = read_metrics(files / "run")
    assert first["kd_loss"] == 0 and last["kd_loss"] > 0
    assert (files / "run/loss_card.txt").read_text(encoding="utf-8").count("rank 4") == 1
