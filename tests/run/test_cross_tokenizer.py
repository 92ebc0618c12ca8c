"""Check cross-tokenizer teachers through the command: impossible settings are refused, others work."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mkd.tokenizers.load import open_tokenizer
from mkd.xtoken import build_projection
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import STUDENT, TEACHER, flags, read_metrics, run_main, write_records
from tests.train.test_errors import DATA, USAGE, assert_refused
from tests.xtoken.small_tokenizers import train_byte_level

XTOKEN = ("--xtoken-loss", "partition_kl")
PP2 = ("--pipeline-model-parallel-size", 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a student, a teacher with its tokenizer (`teacher`), one with another (`cross`), and texts."""
    folder = tmp_path_factory.mktemp("cross_tokenizer")
    add_tokenizer(make_model(folder / "student", **STUDENT))
    add_tokenizer(make_model(folder / "teacher", **TEACHER))
    train_byte_level(vocab_size=290).save_pretrained(make_model(folder / "cross", **TEACHER))
    texts = [f"{i}: " + "the quick brown fox jumps " * (i % 7 + 1) for i in range(60)]
    write_records(folder / "text.jsonl", *({"text": text} for text in texts))
    return folder


def cross(files, run, *more, **paths):
    return flags(files, run, *more, **{"teacher_hf": "cross"} | paths)


def metrics(ranks, files, argv, run):
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    return read_metrics(files / run), result


def test_another_tokenizer_needs_xtoken(files, ranks):
    texts = ("has another tokenizer than the student", "id by id", "--xtoken-loss partition_kl")
    assert_refused(ranks, cross(files, "plain"), USAGE, *texts)


@pytest.mark.parametrize(
    "weights, text", [((0, 0), "the weights of all 2 teachers are 0"), ((1, 0), "teachers[1].weight 0")]
)
def test_teachers_without_weight(weights, text, files, ranks):
    teachers = [
        {"hf": str(files / name), "weight": weight}
        for name, weight in zip(("teacher", "cross"), weights, strict=True)
    ]
    teachers[1]["xtoken"] = {}
    (files / "weights.yaml").write_text(json.dumps({"teachers": teachers}))
    argv = flags(files, "weights", "--config", files / "weights.yaml", teacher_hf=None)
    assert_refused(ranks, argv, USAGE, text, "weight", "do:  give")


def test_tokenizers_that_share_nothing(files, ranks):
    for name, source, letters in (("vowels", "student", "aeiou"), ("consonants", "cross", "bcdfg")):
        backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        tokenizer.save_pretrained(shutil.copytree(files / source, files / name))
    argv = cross(files, "strangers", *XTOKEN, "--no-append-eod", student_hf="vowels", teacher_hf="consonants")
    texts = "the tokenizers have no token in common", "do:  check the tokenizers of student and teacher"
    assert_refused(ranks, argv, USAGE, *texts, world_size=2)


def test_projection_of_other_tokenizers(files, ranks):
    path = files / "projection.npz"
    build_projection(
        open_tokenizer(str(files / "student")),
        open_tokenizer(str(files / "teacher")),
        cache_dir=files / "made",
    )
    (made,) = (files / "made").iterdir()
    shutil.copy(made, path)
    argv = cross(files, "projection", *XTOKEN, "--xtoken-projection", path)
    assert_refused(ranks, argv, USAGE, "projection-does-not-fit: does not fit this run", str(path))
    for name in ("nowhere.npz", "made"):  # a folder
        argv = cross(files, "projection", *XTOKEN, "--xtoken-projection", files / name, "--dry-run")
        assert_refused(ranks, argv, USAGE, f"{name} is not a file")
    (files / "damaged.npz").write_bytes(b"no archive")
    argv = cross(files, "projection", *XTOKEN, "--xtoken-projection", files / "damaged.npz")
    assert_refused(ranks, argv, USAGE, "damaged.npz does not fit this run", "it cannot be read", world_size=2)


def test_half_of_a_surrogate_pair(files, ranks):
    write_records(files / "half.jsonl", {"text": "the quick fox"}, '{"text": "the \\ud83d fox"}')
    argv = cross(files, "half", *XTOKEN, data_path="half.jsonl")
    assert_refused(ranks, argv, DATA, "half.jsonl", "half of a surrogate pair", world_size=2)


@pytest.mark.parametrize(
    "more", [(), ("--kd-divergence", "reverse_kl", "--kd-temperature", 2)], ids=["forward", "reverse T2"]
)
def test_the_same_tokenizer_gives_the_plain_loss(more, files, ranks):
    """Every token is one aligned chunk; every row of the heads has a token."""
    size = len(PreTrainedTokenizerFast.from_pretrained(files / "student"))
    paths = {}
    for name, settings in (("student", STUDENT), ("teacher", TEACHER)):
        add_tokenizer(make_model(files / f"{name} exact", **settings, vocab_size=size))
        paths[f"{name}_hf"] = f"{name} exact"
    plain, _ = metrics(ranks, files, flags(files, "plain run", *more, **paths), "plain run")
    own, _ = metrics(ranks, files, flags(files, "own run", *XTOKEN, *more, **paths), "own run")
    assert all(record["num_aligned/teacher-exact"] > 0 for record in own)
    for ours, reference in zip(own, plain, strict=True):
        # The KL is a difference of terms as large as the entropy: it may differ by one of their roundings.
        rounding = {"kd_loss": float(np.finfo(np.float32).eps) * reference["teacher_entropy"]}
        for key in ("loss", "grad_norm", "kd_loss", "teacher_ce", "teacher_entropy"):
            assert ours[key] == pytest.approx(reference[key], rel=1e-6, abs=rounding.get(key, 0)), key


def test_a_pack_too_short_for_the_text_still_trains(files, ranks):
    full, _ = metrics(ranks, files, cross(files, "full", *XTOKEN), "full")
    short, result = metrics(ranks, files, cross(files, "short", *XTOKEN, "--xtoken-seq-length", 16), "short")
    for ours, reference in zip(short, full, strict=True):
        assert 0 < ours["num_aligned/cross"] < reference["num_aligned/cross"]
        assert np.isfinite([ours["loss"], ours["grad_norm"], ours["kd_loss"]]).all() and ours["kd_loss"] > 0
    (line,) = (line for line in result.stdout.splitlines() if "cross: packs of 16 tokens" in line)
    assert float(line.rpartition("share of teacher tokens without room ")[2]) > 0.2


def test_two_teachers_never_see_conversations_that_are_too_long(files, ranks):
    """`drop` equals a file without them: for a student, and for teachers that need more or fewer tokens."""
    answers = [" fox jumps" * (i % 3 + 1) for i in range(40)]
    short = [{"prompt": f"{i}: quick", "completion": text} for i, text in enumerate(answers)]
    long = [{"prompt": "the quick brown fox " * 12, "completion": " fox"}, dict(short[0])]
    long[1]["completion"] = " brown fox jumps" * 30
    write_records(files / "short.jsonl", *short)
    write_records(files / "mixed.jsonl", *short[:7], long[0], *short[7:30], long[1], *short[30:])
    teachers = [{"hf": str(files / "teacher"), "weight": 0.6}, {"hf": str(files / "cross"), "weight": 0.4}]
    teachers[1]["xtoken"] = {}
    (files / "two.yaml").write_text(json.dumps({"teachers": teachers}))
    more = ("--config", files / "two.yaml", "--no-shuffle")
    found = {}
    for name, world, layout in (("short", 1, ()), ("mixed", 2, (*PP2, "--pipeline-layout", "auto"))):
        paths = dict(teacher_hf=None, data_path=f"{name}.jsonl")
        results = run_main(ranks, flags(files, f"two {name}", *more, *layout, **paths), world)
        assert {one.exit_code for one in results} == {0}, results[0].stderr
        keys = ("loss", "ce_loss", "kd_loss", "grad_norm", "num_loss_tokens")
        found[name] = [[record[key] for key in keys] for record in read_metrics(files / f"two {name}")]
        if name == "mixed":
            assert "2 conversations" in results[0].stdout + results[0].stderr
    for own, other in zip(*found.values(), strict=True):
        assert own == pytest.approx(other, rel=1e-5)
