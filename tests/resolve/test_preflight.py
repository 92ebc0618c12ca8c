"""Check problems that stop a run before anything is loaded: all at once, each with its fix."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest

from mkd.commands.preprocess import main as preprocess
from mkd.config.load import load_config
from mkd.errors import CheckpointError, DataError, ErrorList
from mkd.operations import disk
from mkd.run.plan_run import plan_run
from mkd.run.plan_text import plan_text
from tests.reported import Reported, assert_all_reported
from tests.tiny_models import add_tokenizer, make_model
from tests.tokenizers.trained import spm_file, write_ranks  # noqa: F401
from tests.train.command import TEACHER, flags, make_files, run_main, write_records

NOBODY = 65534  # user id
TEXT, OTHER_TEXT = (
    "the quick brown fox jumps over the lazy dog. ",
    "pack my box with five dozen liquor jugs. ",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("preflight"))


def problems_of(argv: list[str], world_size: int = 1) -> list:
    """Return every problem of a command line."""
    try:
        plan_run(load_config(argv).config, world_size)
    except ErrorList as error:
        return error.errors
    return []


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_eight_conflicts_are_reported_in_two_lists_with_their_fixes(more, files, tmp_path, ranks):
    """First those of models, flags, layout and folders, without torch; then those of tokenizers and data.

    One rank reports them.
    """
    add_tokenizer(make_model(tmp_path / "stranger", **TEACHER), text=OTHER_TEXT)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "table.csv").write_text("a,b\n")
    argv = flags(
        files,
        "refused",
        "--config",
        tmp_path / "run.yaml",
        "--save",
        files / "text.jsonl" / "checkpoints",
        *more,
        student_hf=None,
        teacher_hf=None,
        data_path=tmp_path / "empty.jsonl",
    )
    settings = {
        "student": {"hf": str(files / "student")},
        "teachers": [{"hf": str(tmp_path / "stranger")}, {"hf": str(tmp_path / "nowhere")}],
        "parallel": {"pipeline_model_parallel_size": 2},
        "optimizer": {"min_lr": 1.0},
        "training": {"micro_batch_size": 3, "eval_interval": 1},
        "data": {"valid_data_path": [str(tmp_path / "table.csv")]},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    early = {
        "hf-model-not-found": tmp_path / "nowhere",
        "numbers-contradict: is above lr": "lr 0.001",
        "batch-not-divisible: is not divisible by": "use 3 or 6",
        "layers-not-divisible: layers do not divide over": "use --teacher-pipeline-layout 2,1",
        "not-writable": files / "text.jsonl" / "checkpoints",
    }
    assert_all_reported(run_main(ranks, argv, world_size=2), early)
    settings["teachers"].pop()
    settings |= {"optimizer": {}, "training": {"micro_batch_size": 2, "eval_interval": 1}}
    settings["teachers"][0]["pipeline_layout"] = "2,1"
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    late = {
        "tokenizers-differ: has another tokenizer than the": tmp_path / "stranger",
        "data-file-empty: is empty": tmp_path / "empty.jsonl",
        "data-file-kind-unknown: is not a known kind of file": tmp_path / "table.csv",
    }
    argv[argv.index("--save") + 1] = str(files / "checkpoints")
    assert_all_reported(run_main(ranks, argv, world_size=2), late)
    assert not (files / "refused").exists()


def test_a_good_run_has_no_problems_and_keeps_its_tokenizers(files):
    plan = plan_run(load_config(flags(files, "good", "--xtoken-loss", "partition_kl")).config, 1)
    assert plan.tokenizers.student.encode("the fox") and plan.tokenizers.teachers[0].encode("the fox")
    assert plan_run(load_config(flags(files, "good")).config, 1).tokenizers.teachers == (None,)


def test_a_note_says_that_a_teacher_without_tokenizer_is_not_checked(files, tmp_path):
    bare = make_model(tmp_path / "bare", **TEACHER)
    plan = plan_run(load_config(flags(files, "bare", teacher_hf=bare)).config, 1)
    assert f"note: the teacher's folder {bare} has no tokenizer" in plan_text(plan)
    assert "has no tokenizer" not in plan_text(plan_run(load_config(flags(files, "good")).config, 1))


def test_a_model_narrower_than_the_tokenizer(files, tmp_path):
    """Ids of ordinary text beyond the head are refused; an unused special token is not."""
    narrow = add_tokenizer(make_model(tmp_path / "narrow", **TEACHER, vocab_size=280))
    last = load_vocabulary_size(narrow) - 1
    assert last >= 280
    (teacher,) = problems_of(flags(files, "narrow", teacher_hf=narrow))
    assert Reported.of(teacher) == "tokenizer-of-another-model: the tokenizer's ids go up to"
    assert all(text in teacher.what for text in (f" {last}", f"teacher ({narrow})", " 279"))
    (student,) = problems_of(flags(files, "narrow", "--kd-ratio", 0, student_hf=narrow, teacher_hf=None))
    assert student.code == "tokenizer-of-another-model" and "--tokenizer-model" in student.do
    assert f"student ({narrow})" in student.what
    padded = shutil.copytree(files / "teacher", tmp_path / "padded")
    add_special_token(padded, beyond=306)
    assert problems_of(flags(files, "padded", "--tokenizer-model", padded)) == []
    add_special_token(padded, beyond=306, is_padding=True)
    padded_flags = flags(files, "padded", "--kd-ratio", 0, "--tokenizer-model", padded, teacher_hf=None)
    assert problems_of(padded_flags) == [], "padding is never read, so another id takes its place"
    tokenizer = plan_run(load_config(padded_flags).config, 1).tokenizers.student
    assert tokenizer.pad_id > 306 and tokenizer.padding_id(307) == tokenizer.eos_id


def load_vocabulary_size(folder) -> int:
    return json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].__len__()


def add_special_token(folder, beyond: int, is_padding: bool = False) -> None:
    """Add a special token with an id above `beyond`, which no document contains."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    while max(tokenizer.get_vocab().values()) <= beyond:
        tokenizer.add_tokens([f"<|{len(tokenizer)}|>"], special_tokens=True)
    if is_padding:
        tokenizer.pad_token = max(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokenizer.save_pretrained(folder)


def test_a_model_without_tokenizer(files, tmp_path):
    bare = make_model(tmp_path / "bare", **TEACHER)
    (student,) = problems_of(flags(files, "bare", student_hf=bare))
    assert student.code == "tokenizer-missing" and "--tokenizer-model" in student.do
    (own,) = problems_of(flags(files, "bare", "--xtoken-loss", "partition_kl", teacher_hf=bare))
    assert own.code == "tokenizer-missing" and own.what.startswith("the teacher ")
    (bare / "tokenizer.json").write_text("{")
    (damaged,) = problems_of(flags(files, "bare", "--xtoken-loss", "partition_kl", teacher_hf=bare))
    assert Reported.of(damaged) == "tokenizer-missing: no Hugging Face tokenizer could be"
    assert damaged.what.startswith("the teacher's tokenizer: ") and str(bare) in damaged.what


def test_a_configuration_that_transformers_refuses(files, tmp_path):
    """mkd reads a limit without decimals; transformers loads neither tokenizer nor export of this folder."""
    folder = add_tokenizer(make_model(tmp_path / "student", "gpt_oss", num_hidden_layers=2))
    assert problems_of(flags(files, "good", student_hf=folder)) == []
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"swiglu_limit": 7}))
    (error,) = problems_of(flags(files, "refused", student_hf=folder))
    assert (
        error.code == "tokenizer-file-not-valid" and str(path) in error.what and "swiglu_limit" in error.why
    )


def test_an_export_destroys_nothing(files, tmp_path):
    """Every folder that the run reads is protected."""
    tokenizer = add_tokenizer(tmp_path / "tokenizer")
    argv = flags(files, "over", "--tokenizer-model", tokenizer)
    for read in (files / "student", files / "teacher", tokenizer):
        (error,) = problems_of([*argv, "--export-hf", str(read)])
        assert (error.exit_code, Reported.of(error)) == (
            64,
            "choose-another-folder: is a folder that this run reads",
        ) and str(read) in error.what


def test_source_of_the_tokenizer_of_exports(files, tmp_path, spm_file):  # noqa: F811
    """Notes say that the tokenizer is not the student's, or that some of its files are missing."""
    stranger, same = (
        add_tokenizer(tmp_path / name, text=text) for name, text in (("b", OTHER_TEXT), ("a", TEXT))
    )
    wide = add_tokenizer(make_model(tmp_path / "wide", "qwen3", vocab_size=50257, num_hidden_layers=1))
    ranks_file = write_ranks(tmp_path)
    given = {  # flags -> source, start of each note
        (): (wide, []),
        ("--tokenizer-model", same): (same, []),
        ("--tokenizer-model", stranger): (
            stranger,
            [f"note: --tokenizer-model {stranger} is not the tokenizer in "],
        ),
        ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", spm_file): (
            Path(spm_file),
            [
                f"note: --tokenizer-model {spm_file} is not",
                f"note: exports contain {spm_file} as tokenizer.model, without settings",
            ],
        ),
        ("--tokenizer-type", "TiktokenTokenizer", "--tokenizer-model", ranks_file): (
            None,
            [f"note: --tokenizer-model {ranks_file} is not", "note: exports contain no tokenizer, because"],
        ),
    }
    for more, (source, notes) in given.items():
        argv = flags(
            files,
            "source",
            "--kd-ratio",
            0,
            "--export-hf",
            tmp_path / "hf",
            *more,
            student_hf=wide,
            teacher_hf=None,
        )
        plan = plan_run(load_config(argv).config, 1)
        assert (plan.assets.model, plan.assets.tokenizer) == (wide, source)
        assert len(plan.tokenizers.notes) == len(notes)
        assert all(note.startswith(start) for note, start in zip(plan.tokenizers.notes, notes, strict=True))
        assert "\n".join(plan.tokenizers.notes) in plan_text(plan)
    unwritten = flags(files, "source", "--kd-ratio", 0, *more, student_hf=wide, teacher_hf=None)
    assert len(plan_run(load_config(unwritten).config, 1).tokenizers.notes) == 1


def test_folders_without_checkpoints_are_named_with_their_flag(files, tmp_path):
    (student,) = problems_of(flags(files, "empty", "--student-load", tmp_path))
    assert student.code == "checkpoint-missing" and student.what.startswith("the student")
    assert student.do.endswith(" --student-load")
    (tmp_path / "run.yaml").write_text(
        json.dumps({"teachers": [{"hf": str(files / "teacher")}, {"load": str(tmp_path)}]})
    )
    (teacher,) = problems_of(flags(files, "empty", "--config", tmp_path / "run.yaml", teacher_hf=None))
    assert teacher.code == "checkpoint-missing" and teacher.what.startswith("the teacher test_folders")
    assert "--teacher-load" in teacher.do


def test_conversations_for_a_tokenizer_without_chat_template(files, tmp_path):
    """The models of these tests have no template; each one that reads the text itself is named."""
    chat = {"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]}
    path = write_records(tmp_path / "chat.jsonl", chat, chat)
    (student,) = problems_of(flags(files, "chat", data_path=path))
    assert student.code == "chat-template-missing" and student.what.startswith("the student")
    assert "--tokenizer-model" in student.do and student.why.startswith(f"--data-path {path} ")
    student, teacher = problems_of(flags(files, "chat", "--xtoken-loss", "partition_kl", data_path=path))
    assert teacher.code == "chat-template-missing" and teacher.what.startswith("the teacher")
    assert "--tokenizer-model" not in teacher.do
    assert problems_of(flags(files, "chat", "--max-bad-records", 2, data_path=path)) == []


def test_conversations_after_other_records(files, tmp_path):
    chat = {"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]}
    path = write_records(tmp_path / "mixed.jsonl", {"text": "fox"}, chat)
    (student,) = problems_of(flags(files, "mixed", data_path=path))
    assert student.code == "chat-template-missing" and student.what.startswith("the student")


def test_tokenised_conversations_of_a_teacher_with_its_own_tokens(files, tmp_path):
    argv = [
        "--input",
        files / "text.jsonl",
        "--output-prefix",
        tmp_path / "corpus",
        "--tokenizer-model",
        files / "student",
    ]
    assert preprocess([*map(str, argv)]) == 0
    own = flags(files, "own tokens", "--xtoken-loss", "partition_kl", data_path=tmp_path / "corpus")
    assert problems_of(own) == []
    meta = json.loads((tmp_path / "corpus.meta.json").read_text())
    assert meta["kinds"] == ["text"]
    (tmp_path / "corpus.meta.json").write_text(json.dumps(meta | {"kinds": ["messages", "text"]}))
    (refused,) = problems_of(own)
    assert Reported.of(refused) == "corpus-of-another-model: is a tokenised corpus of"
    assert refused.what.startswith(f"--data-path {tmp_path / 'corpus'} ")
    assert problems_of(flags(files, "same tokens", data_path=tmp_path / "corpus")) == []


def test_a_tokenizer_without_eos(files, tmp_path):
    """Text needs it, conversations do not: those of preference pairs only need the missing template."""
    folder = shutil.copytree(files / "student", tmp_path / "endless")
    for path in folder.glob("*token*_*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in content.items() if key != "eos_token"}))
    models = dict(student_hf=folder, teacher_hf=folder)
    (endless,) = problems_of(flags(files, "endless", **models))
    assert endless.code == "tokenizer-without-eos" and "--no-append-eod" in endless.do
    assert problems_of(flags(files, "endless", "--no-append-eod", **models)) == []
    pair = {"prompt": [{"role": "user", "content": "fox?"}]}
    pair |= {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    path = write_records(tmp_path / "pairs.jsonl", pair)
    argv = flags(files, "pairs", "--dpo-beta", 0.1, "--kd-ratio", 0, data_path=path, **models)
    assert {one.code for one in problems_of(argv)} == {"chat-template-missing"}


def test_a_corpus_of_another_tokenizer_and_a_damaged_one(files, tmp_path):
    stranger = add_tokenizer(tmp_path, text=OTHER_TEXT)
    argv = [
        "--input",
        files / "text.jsonl",
        "--output-prefix",
        tmp_path / "corpus",
        "--tokenizer-model",
        stranger,
    ]
    assert preprocess([*map(str, argv)]) == 0
    (other,) = problems_of(flags(files, "corpus", data_path=tmp_path / "corpus"))
    assert Reported.of(other) == "corpus-of-another-model: with another tokenizer"
    assert other.what.startswith(f"--data-path {tmp_path / 'corpus'} ")
    (tmp_path / "corpus.idx").write_bytes(b"")
    (damaged,) = problems_of(flags(files, "corpus", data_path=tmp_path / "corpus"))
    assert damaged.code == "corpus-damaged" and "corpus.idx" in damaged.what


Usage = namedtuple("Usage", "total used free")


def test_all_writes_to_one_disk_must_fit(files, tmp_path, monkeypatch):
    """The check compares the sum of all writes with the free space; cached text is not written again."""
    argv = flags(files, "full", "--save", tmp_path / "a" / "b", data_cache_path=tmp_path / "cache")
    writes = {
        write.what: write
        for write in disk.writes_of(load_config(argv).config, None, [str(files / "text.jsonl")])
    }
    text_bytes = writes["tokenised text"].num_bytes
    assert text_bytes == (files / "text.jsonl").stat().st_size // 3
    config = load_config(argv).config
    shape = plan_run(config, 1).student.shape
    needed = sum(write.num_bytes for write in disk.writes_of(config, shape, [str(files / "text.jsonl")]))
    assert needed > text_bytes + 12 * 2 * 307 * 48  # more than the moments and weights of the embedding
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: Usage(0, 0, needed))
    assert problems_of(argv) == []
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: Usage(0, 0, needed - 1))
    (full,) = problems_of(argv)
    assert full.code == "disk-too-small" and str(tmp_path / "a" / "b") in full.what
    assert "--save and --data-cache-path" in full.do
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "text-0123.idx").touch()
    assert problems_of(argv) == []


def test_one_path_in_the_way_is_one_problem(files):
    """Checkpoints, metrics and tokenised text all go to --save here."""
    argv = flags(files, "x", "--save", files / "text.jsonl" / "below", data_cache_path=None)
    at = argv.index("--log-dir")
    (blocked,) = problems_of(argv[:at] + argv[at + 2 :])
    assert blocked.code == "not-writable" and blocked.do.endswith(" --save")
    assert all(text in blocked.why for text in ("checkpoint", "metrics", "tokenised text"))


def test_a_folder_that_this_user_may_not_write_to(tmp_path):
    """Check in a process without root's rights, because root ignores permissions."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    process = multiprocessing.get_context("spawn").Process(target=check_as_nobody, args=(folder / "below",))
    process.start()
    process.join()
    assert process.exitcode == 0


def check_as_nobody(folder):
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    (error,) = disk.disk_problems([disk.Written("a checkpoint", "--save", folder)])
    assert error.code == "not-writable" and str(folder) in error.what


def test_problems_of_one_kind_keep_its_exit_code():
    data, checkpoint = DataError("a", code="example"), CheckpointError("b", code="example")
    assert ErrorList([data, data]).exit_code == 65 and ErrorList([checkpoint]).exit_code == 66
    assert ErrorList([data, checkpoint]).exit_code == 64
    assert ErrorList([ErrorList([data, data]), data]).exit_code == 65


def test_the_checks_take_little_time(files):
    config = load_config(flags(files, "time")).config
    plan_run(config, 1)
    start = time.process_time()
    plan_run(config, 1)
    assert time.process_time() - start < 1.0
