"""Test distillation of a tiny model with images by command, against the exam in transformers."""

from __future__ import annotations

import pytest

from mkd.log.records import read_records, split_of
from tests.tools.vlm.small_pictures import SIZES, make_tiny, write_pictures
from tools.vlm import vlm_training
from tools.vlm.emoji_pictures import STYLES, read_pixels, write_held_out, write_training
from tools.vlm.picture_answers import Examiner, PictureExam
from tools.vlm.small_vlm import cut_vlm


def run_distillation(tmp_path, steps: int):
    """Distil a cut of a tiny model; return its folder, the teacher's, the log folder and an exam."""
    named = write_pictures(tmp_path / "pictures")
    corpus = vlm_training.Corpus(
        tmp_path / "pictures", tmp_path / "train.jsonl", tmp_path / "held_out.jsonl", tmp_path / "cache"
    )
    write_training(corpus.image_root, corpus.train, named, 2, seed=1)
    write_held_out(corpus.held_out, named)
    teacher, student, log_dir = make_tiny(tmp_path), tmp_path / "student", tmp_path / "log"
    cut_vlm(teacher, student, SIZES.text_layers - 1, SIZES.tower_layers - 1)
    flags = dict(teacher=teacher, train_iters=steps, eval_interval=steps, eval_iters=100, lr=1e-3)
    words = vlm_training.command(corpus, log_dir, student=student, export=tmp_path / "out", **flags)
    vlm_training.run(words, log_dir, is_quiet=True)
    exam = PictureExam.of(read_pixels(corpus.image_root, STYLES[1], named), named)
    return student, tmp_path / "out", log_dir, Examiner(teacher).examine(exam)[1], exam


def test_held_out_figures_are_those_of_the_exam(tmp_path):
    """The exam runs transformers on Pillow's pictures; mkd tokenises, packs and runs its own layers."""
    before, after, log_dir, of_teacher, exam = run_distillation(tmp_path, 6)
    logged = [record for record in read_records(log_dir) if split_of(record) == "valid"]
    for folder, record in ((before, logged[0]), (after, logged[-1])):
        result, _ = Examiner(folder).examine(exam, teacher=of_teacher)
        assert record["kd_loss"] == pytest.approx(result.kl, rel=1e-3)
        assert record["ce_loss"] == pytest.approx(result.ce, rel=1e-4)
        assert record["top1_agreement"] == pytest.approx(result.top1, abs=0.02)
    changed = Examiner(before).model.state_dict(), Examiner(after).model.state_dict()
    parts = ("vision_model", "connector", "text_model")
    moved = [name for name in changed[0] if bool((changed[0][name] != changed[1][name]).any())]
    assert all(any(part in name for name in moved) for part in parts)


def test_the_output_of_a_failed_run_is_shown(tmp_path, capsys):
    corpus = vlm_training.Corpus(
        tmp_path, tmp_path / "none.jsonl", tmp_path / "none.jsonl", tmp_path / "cache"
    )
    words = vlm_training.command(
        corpus, tmp_path / "log", student=tmp_path, export=tmp_path / "out", train_iters=1
    )
    with pytest.raises(vlm_training.subprocess.CalledProcessError):
        vlm_training.run(words, tmp_path / "log", is_quiet=True)
    assert "config.json" in capsys.readouterr().err
