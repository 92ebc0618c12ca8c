"""What a run is refused for before anything is loaded: all of it at once, each with what to do."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.config.load import load_config
from mkd.errors import CheckpointError, DataError, ErrorList, UsageError
from mkd.operations import disk
from mkd.run.run_plan import plan_run
from tests.tiny_models import add_tokenizer, make_model
from tests.tokenizers.trained import spm_file, write_ranks  # noqa: F401
from tests.train.command import TEACHER, flags, make_files, run_main, write_records
from tools.preprocess_data import main as preprocess

NOBODY = 65534  # user id
TEXT, OTHER_TEXT = (
    "the quick brown fox jumps over the lazy dog. ",
    "pack my box with five dozen liquor jugs. ",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("preflight"))


def problems_of(argv: list[str], world_size: int = 1) -> list:
    """Every problem of a command line; none where it can run."""
    try:
        plan_run(load_config(argv).config, world_size)
    except ErrorList as error:
        return error.errors
    return []


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_eight_conflicts_are_reported_at_once_with_their_fixes(more, files, tmp_path, ranks):
    """Of models, flags, batch, layout, tokenizers, data twice and disk; on two ranks, said once."""
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
    first, second = run_main(ranks, argv, world_size=2)
    assert (first.exit_code, second.exit_code) == (64, 64), first.stderr
    assert "error: 8 problems:\n" in first.stderr and "error: " not in second.stderr and not first.stdout
    shown = re.split(r"^\[\d\] ", first.stderr.partition("problems:\n")[2], flags=re.M)[1:]
    planted = {
        f"'{tmp_path / 'nowhere'}' is neither a model folder nor": "check the path",
        "min-lr 1.0 is above lr 0.001": "lower --min-lr",
        "global-batch-size 4 is not divisible by micro-batch-size 3 x data-parallel 1": "use 3 or 6",
        "teacher stranger: 3 layers do not divide over 2 pipeline stages": "use --teacher-pipeline-layout 2,1",
        f"teacher {tmp_path / 'stranger'} has another tokenizer than the student": "use a teacher of the same tokenizer",
        f"--data-path {tmp_path / 'empty.jsonl'} is empty": "check how it was made",
        f"--valid-data-path {tmp_path / 'table.csv'}: .csv is not a known kind of file": "use one of .jsonl",
        f"cannot make {files / 'text.jsonl' / 'checkpoints'}: {files / 'text.jsonl'} is a file": "choose another --save",
    }
    assert len(shown) == len(planted) == 8
    for what, do in planted.items():
        text = next((text for text in shown if text.startswith(what)), f"nothing starts with {what}")
        assert f"do:  {do}" in text, first.stderr
    assert not (files / "refused").exists()


def test_a_good_run_has_no_problems_and_keeps_its_tokenizers(files):
    plan = plan_run(load_config(flags(files, "good", "--xtoken-loss", "partition_kl")).config, 1)
    assert plan.tokenizers.student.encode("the fox") and plan.tokenizers.teachers[0].encode("the fox")
    assert plan_run(load_config(flags(files, "good")).config, 1).tokenizers.teachers == (None,)


def test_a_teacher_without_tokenizer_is_said_to_be_unchecked(files, tmp_path):
    bare = make_model(tmp_path / "bare", **TEACHER)
    plan = plan_run(load_config(flags(files, "bare", teacher_hf=bare)).config, 1)
    assert f"note: the teacher's folder {bare} has no tokenizer" in plan.describe()
    assert "has no tokenizer" not in plan_run(load_config(flags(files, "good")).config, 1).describe()


def test_a_model_narrower_than_the_tokenizer(files, tmp_path):
    """Ids of ordinary text beyond the head are refused; a special token that no text makes is not."""
    narrow = add_tokenizer(make_model(tmp_path / "narrow", **TEACHER, vocab_size=280))
    last = load_vocabulary_size(narrow) - 1
    assert last >= 280
    (teacher,) = problems_of(flags(files, "narrow", teacher_hf=narrow))
    assert teacher.what == f"the tokenizer's ids go up to {last}, those of the teacher ({narrow}) to 279"
    (student,) = problems_of(flags(files, "narrow", "--kd-ratio", 0, student_hf=narrow, teacher_hf=None))
    assert f"those of the student ({narrow})" in student.what and "--tokenizer-model" in student.do
    padded = shutil.copytree(files / "teacher", tmp_path / "padded")
    add_special_token(padded, beyond=306)
    assert problems_of(flags(files, "padded", "--tokenizer-model", padded)) == []
    add_special_token(padded, beyond=306, is_padding=True)
    (padding,) = problems_of(
        flags(files, "padded", "--kd-ratio", 0, "--tokenizer-model", padded, teacher_hf=None)
    )
    assert "those of the student" in padding.what


def load_vocabulary_size(folder) -> int:
    return json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].__len__()


def add_special_token(folder, beyond: int, is_padding: bool = False) -> None:
    """One with an id above `beyond`, which no document becomes."""
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
    assert student.what == f"{bare} holds no tokenizer" and "--tokenizer-model" in student.do
    (own,) = problems_of(flags(files, "bare", "--xtoken-loss", "partition_kl", teacher_hf=bare))
    assert own.what == f"the teacher has no tokenizer in {bare}" and "copy tokenizer.json" in own.do
    (bare / "tokenizer.json").write_text("{")
    (damaged,) = problems_of(flags(files, "bare", "--xtoken-loss", "partition_kl", teacher_hf=bare))
    assert damaged.what.startswith(
        f"the teacher's tokenizer, {bare}: no Hugging Face tokenizer could be loaded"
    )


def test_an_export_destroys_nothing(files, tmp_path):
    """Of the folders that the run reads."""
    tokenizer = add_tokenizer(tmp_path / "tokenizer")
    argv = flags(files, "over", "--tokenizer-model", tokenizer)
    for read in (files / "student", files / "teacher", tokenizer):
        (error,) = problems_of([*argv, "--export-hf", str(read)])
        assert (error.exit_code, error.what) == (64, f"--export-hf {read} is a folder that this run reads")


def test_where_the_tokenizer_of_exports_comes_from(files, tmp_path, spm_file):  # noqa: F811
    """What a user should know of it is said: it is another one than the student's, or comes without all its files."""
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
                f"note: exports get {spm_file} as tokenizer.model alone: ",
            ],
        ),
        ("--tokenizer-type", "TiktokenTokenizer", "--tokenizer-model", ranks_file): (
            None,
            [f"note: --tokenizer-model {ranks_file} is not", "note: exports get no tokenizer: "],
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
        assert plan.assets == HFAssets(wide, source)
        assert len(plan.tokenizers.notes) == len(notes)
        assert all(note.startswith(start) for note, start in zip(plan.tokenizers.notes, notes, strict=True))
        assert plan.describe().endswith("\n".join(plan.tokenizers.notes))
    unwritten = flags(files, "source", "--kd-ratio", 0, *more, student_hf=wide, teacher_hf=None)
    assert len(plan_run(load_config(unwritten).config, 1).tokenizers.notes) == 1


def test_folders_without_checkpoints_are_named_with_their_flag(files, tmp_path):
    (student,) = problems_of(flags(files, "empty", "--student-load", tmp_path))
    assert student.what == f"the student's folder {tmp_path} holds no checkpoint" and student.do.endswith(
        ": --student-load"
    )
    (tmp_path / "run.yaml").write_text(
        json.dumps({"teachers": [{"hf": str(files / "teacher")}, {"load": str(tmp_path)}]})
    )
    (teacher,) = problems_of(flags(files, "empty", "--config", tmp_path / "run.yaml", teacher_hf=None))
    assert (
        teacher.what.startswith("the teacher test_folders")
        and "--teacher-load, or load: of a teacher" in teacher.do
    )


def test_conversations_for_a_tokenizer_without_chat_template(files, tmp_path):
    """The models of these tests have none: each that reads the text itself is named."""
    chat = {"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]}
    path = write_records(tmp_path / "chat.jsonl", chat, chat)
    (student,) = problems_of(flags(files, "chat", data_path=path))
    assert (
        student.what == "the student's tokenizer has no chat template" and "--tokenizer-model" in student.do
    )
    assert student.why.startswith(f"--data-path {path} has conversations")
    student, teacher = problems_of(flags(files, "chat", "--xtoken-loss", "partition_kl", data_path=path))
    assert (
        teacher.what == "the teacher's tokenizer has no chat template"
        and "--tokenizer-model" not in teacher.do
    )
    assert problems_of(flags(files, "chat", "--max-bad-records", 2, data_path=path)) == []


def test_conversations_after_other_records(files, tmp_path):
    chat = {"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]}
    path = write_records(tmp_path / "mixed.jsonl", {"text": "fox"}, chat)
    (student,) = problems_of(flags(files, "mixed", data_path=path))
    assert student.what == "the student's tokenizer has no chat template"


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
    assert refused.what.startswith(
        f"--data-path {tmp_path / 'corpus'} is a tokenised corpus of conversations"
    )
    assert problems_of(flags(files, "same tokens", data_path=tmp_path / "corpus")) == []


def test_a_tokenizer_without_eos(files, tmp_path):
    folder = shutil.copytree(files / "student", tmp_path / "endless")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            content = json.loads((folder / name).read_text())
            (folder / name).write_text(
                json.dumps({key: value for key, value in content.items() if key != "eos_token"})
            )
    (endless,) = problems_of(flags(files, "endless", student_hf=folder, teacher_hf=folder))
    assert endless.what == "the tokenizer has no end-of-sequence token" and "--no-append-eod" in endless.do
    assert problems_of(flags(files, "endless", "--no-append-eod", student_hf=folder, teacher_hf=folder)) == []


@pytest.mark.parametrize(
    ("records", "text"),
    [
        (["{"] * 20, ":1: not valid JSON"),
        ([{"txt": "a"}] * 3, ":1: no known keys (found: 'txt')"),
        ([], " is empty"),
        ([{"txt": "a"}] * 15 + [{"text": "a"}], None),  # for those who read all to count
        ([{"txt": "a"}] * 16 + [{"text": "a"}], ":1: no known keys"),
    ],
)
def test_the_first_records_are_looked_at(records, text, files, tmp_path):
    path = write_records(tmp_path / "data.jsonl", *records)
    found = problems_of(flags(files, "records", data_path=path))
    assert [type(error) for error in found] == [DataError] * (text is not None)
    assert all(error.what.startswith(f"--data-path {path}{text}") for error in found)
    if records == [{"txt": "a"}] * 16 + [{"text": "a"}]:
        assert problems_of(flags(files, "records", "--max-bad-records", 16, data_path=path)) == []


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
    assert other.what == f"--data-path {tmp_path / 'corpus'} was tokenised with another tokenizer"
    (tmp_path / "corpus.idx").write_bytes(b"")
    (damaged,) = problems_of(flags(files, "corpus", data_path=tmp_path / "corpus"))
    assert "corpus.idx" in damaged.what


Usage = namedtuple("Usage", "total used free")


def test_everything_that_goes_to_one_disk_must_fit_there(files, tmp_path, monkeypatch):
    """The tiny student's checkpoint is 0.0x GiB and the text less: what is free decides, with what is cached left out."""
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
    assert isinstance(full, UsageError) and full.what.startswith(f"the disk of {tmp_path / 'a' / 'b'} has ")
    assert full.do == "make room, or choose another --save and --data-cache-path"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "text-0123.idx").touch()
    assert problems_of(argv) == []


def test_one_path_in_the_way_is_one_problem(files):
    """Checkpoints, metrics and tokenised text all go to --save here."""
    argv = flags(files, "x", "--save", files / "text.jsonl" / "below", data_cache_path=None)
    at = argv.index("--log-dir")
    (blocked,) = problems_of(argv[:at] + argv[at + 2 :])
    assert blocked.why == "the run writes a checkpoint and metrics and tokenised text there"
    assert blocked.do == "choose another --save"


def test_a_folder_that_this_user_may_not_write_to(tmp_path):
    """In a process that is not root's, for whom permissions do not count."""
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
    assert error.what.startswith(f"cannot write to {folder}: ")


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
