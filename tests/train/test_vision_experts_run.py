"""Check runs of Qwen3.5 and Qwen3-VL with experts and images: teachers, layouts, resuming, exports."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from tests.checkpoint.saved_tensors import all_tensors
from tests.data.images.tiny_processors import make_qwen
from tests.tiny_models import make_model
from tests.train.command import read_metrics, run_main
from tests.train.test_resume import train_and_hash
from tests.train.test_vision_run import STEPS, argv, make_text_teacher
from tests.train.two_processors import with_text, with_weights

SLOW = pytest.mark.slow
TP2, EP2 = ("--tensor-model-parallel-size", 2), ("--expert-model-parallel-size", 2)
PP2 = ("--pipeline-model-parallel-size", 2)
FIGURES = "loss", "ce_loss", "kd_loss", "grad_norm", "kd_loss/alike", "kd_loss/finer"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a Qwen3.5 student with experts, a teacher that sees its images, and one that sees finer ones."""
    folder = tmp_path_factory.mktemp("vision_experts")
    with_text(with_weights(make_qwen(folder / "student", "Qwen3_5Moe", most_pixels=16 * 16), seed=1))
    with_weights(make_qwen(folder / "teacher", "Qwen3VLMoe", most_pixels=16 * 16), seed=2)
    with_weights(make_qwen(folder / "finer", "Qwen3_5", most_pixels=32 * 32), seed=3)
    teachers = [
        {"hf": str(folder / "teacher"), "name": "alike"},
        {"hf": str(folder / "finer"), "name": "finer", "xtoken": {"loss": "partition_kl"}},
    ]
    (folder / "both.yaml").write_text(json.dumps({"teachers": teachers}))
    return folder


def both(files, run, *more):
    """Return the command line of a run with both teachers of images."""
    return argv(files, run, "--config", files / "both.yaml", "--adam-eps", 1e-6, *more, teacher_hf=None)


def test_two_teachers_resume_at_another_layout(files, ranks):
    """One process, against two steps of EP2 and TP2, then two of PP2: the same figures."""
    short = ("--train-iters", 4)
    (whole,) = run_main(ranks, both(files, "whole", *short))
    assert whole.exit_code == 0, whole.stderr
    first = (*EP2, *TP2, "--sequence-parallel", "--exit-interval", 2)
    for name, more in (("first", first), ("rest", (*PP2, "--load", files / "first"))):
        done = run_main(ranks, both(files, name, *short, *more), 2)
        assert [one.exit_code for one in done] == [0, 0], done[0].stderr
    found = read_metrics(files / "first") + read_metrics(files / "rest")
    expected = read_metrics(files / "whole")
    assert len(found) == len(expected) == 4
    for own, other in zip(found, expected, strict=True):
        for name in FIGURES:
            assert own[name] == pytest.approx(other[name], rel=1e-5), (own["iteration"], name)


@pytest.mark.slow
def test_resume_is_bitwise_and_a_frozen_tower_keeps_its_bytes(files, ranks):
    def run(folder, *more):
        frozen = ("--student-train-parts", "text", "projector", *EP2, *more)
        return ranks.run(train_and_hash, 2, argv(files, folder, *frozen), files / f"{folder} hf")

    straight = run("straight")
    run("halves", "--exit-interval", STEPS // 2)
    assert run("halves", "--load", files / "halves") == straight
    before, after = all_tensors(files / "student"), all_tensors(files / "halves hf")
    towers = {name for name in before if "visual" in name and "merger" not in name}
    same = {name for name in towers if torch.equal(before[name], after[name])}
    assert towers and same == towers
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(
        files / "halves hf", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.slow
def test_student_and_teacher_may_be_texts(files, ranks):
    """A text teaches the student with images, and a teacher with images teaches a text."""
    make_text_teacher(files, "text teacher", "texts.jsonl")
    given = dict(teacher_hf="text teacher", image_root=None, data_path="texts.jsonl")
    (done,) = run_main(ranks, argv(files, "a text teaches", "--train-iters", 2, **given))
    assert done.exit_code == 0, done.stderr
    text = make_model(files / "text student", "qwen3_5_moe", seed=5, vocab_size=400)
    transformers.AutoTokenizer.from_pretrained(files / "student").save_pretrained(text)
    words = argv(
        files,
        "a text learns",
        "--train-iters",
        2,
        student_hf="text student",
        **given | dict(teacher_hf="teacher"),
    )
    place = words.index("--student-train-parts")
    del words[place : place + 4]
    done = run_main(ranks, [*words, *map(str, TP2), "--sequence-parallel"], 2)
    assert {one.exit_code for one in done} == {0}, done[0].stderr


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(*EP2, *TP2, "--sequence-parallel"), PP2], ids=["EP2 TP2 + SP", "PP2"])
def test_a_stored_teacher_teaches_as_the_teacher_that_runs(layout, files, ranks):
    pytest.importorskip("pyarrow")
    name, short = layout[0].strip("-"), ("--train-iters", 2, *layout)
    live = run_main(ranks, argv(files, f"live {name}", *short), 2)
    out = ("--out", files / f"topk {name}", "--k", 400, "--logprob-dtype", "float32")
    export = [str(word) for word in out] + argv(files, f"export {name}", *short)
    stored = run_main(ranks, export, 2, command="mkd.commands.topk")
    topk = ("--teacher-topk", files / f"topk {name}")
    trained = run_main(ranks, argv(files, f"offline {name}", *short, *topk, teacher_hf=None), 2)
    for results in (live, stored, trained):
        assert [one.exit_code for one in results] == [0, 0], results[0].stderr
    pairs = zip(read_metrics(files / f"offline {name}"), read_metrics(files / f"live {name}"), strict=True)
    for own, other in pairs:
        for metric in ("ce_loss", "kd_loss", "grad_norm"):
            assert own[metric] == pytest.approx(other[metric], rel=1e-5), metric
