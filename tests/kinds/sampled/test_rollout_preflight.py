"""Check problems of prompts and stop tokens before anything is loaded."""

from __future__ import annotations

import json
import shutil

import pytest

from mkd.config.load import load_config
from mkd.errors import ErrorList
from mkd.run.plan_run import plan_run
from mkd.run.plan_text import plan_text
from tests.reported import reports
from tests.train.command import write_records
from tests.train.rollout_run import argv, make_files

NAMES = "student", "teacher"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("preflight"))


def codes(arguments: list[str]) -> list[str]:
    try:
        plan_run(load_config(arguments).config, 1)
    except ErrorList as error:
        return reports(error.errors)
    return []


def with_stops(source, folder, ids, files=("generation_config.json", "config.json")):
    """Copy a model whose texts end with `ids`; None: nothing says so."""
    shutil.copytree(source, folder)
    for name in files:
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "eos_token_id": ids}))
    return folder


def test_a_sound_run(files):
    assert codes(argv(files, "sound")) == []


@pytest.mark.parametrize(
    "student, teacher, is_refused",
    [(0, 5, True), (0, [0, 5], True), (0, [0], False), (0, None, False), ([5, 0], 5, False)],
)
def test_a_teacher_that_ends_texts_elsewhere_is_refused(student, teacher, is_refused, files, tmp_path):
    pair = {
        f"--{name}-hf": with_stops(files / name, tmp_path / name, ids)
        for name, ids in (("student", student), ("teacher", teacher))
    }
    flags = [str(word) for flag in pair.items() for word in flag]
    assert (
        codes([*argv(files, "stops"), *flags])
        == ["stop-ids-not-valid: but completions of the student end"] * is_refused
    )


def test_a_student_without_a_stop_token_is_refused(files, tmp_path):
    folder = with_stops(files / "student", tmp_path / "student", None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert codes([*argv(files, "none"), "--student-hf", str(folder)]) == ["stop-ids-not-valid"]


def test_stored_texts_that_end_otherwise_are_named(files, tmp_path):
    def notes(ids, *more):
        pair = {name: with_stops(files / name, tmp_path / f"{name}-{sum(ids)}", ids) for name in NAMES}
        flags = [word for name in NAMES for word in (f"--{name}-hf", str(pair[name]))]
        plan = plan_run(load_config([*argv(files, "ends"), *flags, *more]).config, 1)
        return [
            line for line in plan_text(plan).splitlines() if "completions end at" in line
        ], plan.tokenizers.student

    (text,), tokenizer = notes([5, 7])
    ends = f"{tokenizer.decode([5])!r} or id 7 {tokenizer.decode([7])!r}"
    assert f" id 5 {ends}, but plain texts of --data-path end with id 0 '<|endoftext|>', the EOS" in text
    (text,), _ = notes([*range(1, 100)])
    assert " or 96 others, but" in text and len(text) < 500
    assert notes([5, 0])[0] == []
    assert notes([5, 9], "--no-append-eod")[0] == []


@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("ids", [[0, 99999], [0, 295], 400])
def test_stop_tokens_that_are_never_sampled_are_refused(ids, role, files, tmp_path):
    """The student has 307 rows, the teacher 300, the tokenizer 289 ids."""
    folder = with_stops(files / role, tmp_path / role, ids)
    wanted = ["stop-ids-not-valid: eos_token_id"]
    if role == "teacher" and ids == [0, 295]:
        wanted = [
            "stop-ids-not-valid: but completions of the student end"
        ]  # a row of the teacher, for which the student has no text
    assert codes([*argv(files, "ids"), f"--{role}-hf", str(folder)]) == wanted


@pytest.mark.parametrize("ids", ["2", [-1], True, [0, 1.5], {}])
def test_stop_tokens_that_are_no_ids_are_refused(ids, files, tmp_path):
    folder = with_stops(files / "student", tmp_path / "student", ids, ["generation_config.json"])
    assert codes([*argv(files, "ids"), "--student-hf", str(folder)]) == ["stop-ids-not-valid: eos_token_id"]


@pytest.mark.parametrize(
    "records, code",
    [
        ((), "data-file-empty: --prompt-data-path"),
        (({"text": "a"},), "record-incomplete"),
        (({"messages": [{"role": "user", "content": "a"}]},), "chat-template-missing"),
        (None, "data-path-not-found: nothing found"),
    ],
)
def test_prompts_are_looked_at(records, code, files, tmp_path):
    path = tmp_path / "p.jsonl"
    if records is not None:
        write_records(path, *records)
    assert codes([*argv(files, "prompts"), "--prompt-data-path", str(path)]) == [code]
