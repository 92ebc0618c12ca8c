"""Run the whole measurement of `vlm_distillation_pays.py` with a tiny model and random pictures."""

from __future__ import annotations

import json

import pytest

from tests.tools.vlm.small_pictures import make_tiny, write_pictures
from tools.benchmarks import vlm_distillation_pays as benchmark
from tools.vlm.emoji_pictures import LIST
from tools.vlm.small_vlm import VLMSizes


@pytest.mark.slow
def test_both_arms_are_trained_and_examined(tmp_path, capsys):
    named = write_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / LIST).write_text(json.dumps([vars(one) for one in named]))
    sizes = VLMSizes(benchmark.SIZES.text_layers, 290, benchmark.SIZES.tower_layers, 64, patch=8)
    make_tiny(tmp_path, sizes).rename(tmp_path / "base")
    argv = ["--folder", str(tmp_path), "--flags=", "--workers", "1", "--seeds", "1", "--jobs", "2"]
    argv += ["--batch", "2", "--steps", "3", "--teacher-steps", "3", "--pretraining-batch", "8"]
    argv += ["--matched", "16", "--captions", "16", "--copies", "2"]
    benchmark.measure(benchmark.parser().parse_args(argv))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures) == [benchmark.TEACHER, benchmark.BEFORE, *benchmark.ARMS]
    (teacher,), *others = figures.values()
    assert teacher[benchmark.RIGHT]["kl"] == 0 < teacher[benchmark.SWAPPED]["kl"]
    assert all(one[benchmark.RIGHT]["kl"] > 0 for each in others for one in each)
    printed = capsys.readouterr().out
    assert printed.count("swapped pictures, drawing style not trained on") == 2
    assert "distilled, seed 1: KL" in printed
