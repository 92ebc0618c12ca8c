"""Check problems of prompts and stop tokens before anything is loaded."""

from __future__ import annotations

import json
import shutil

import pytest

from mkd.config.load import load_config
from mkd.errors import ErrorList
from mkd.rollout.stop_ids import warn_of_unlisted_eos
from mkd.run.run_plan import plan_run
from tests.train.command import write_records
from tests.train.rollout_run import argv, make_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("preflight"))


def codes(arguments: list[str]) -> list[str]:
    try:
        plan_run(load_config(arguments).config, 1)
    except ErrorList as error:
        return [one.code for one in error.errors]
    return []


def with_stops(source, folder, ids):
    """Copy a model whose texts end with `ids`; None: nothing says so."""
    shutil.copytree(source, folder)
    for name in ("generation_config.json", "config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "eos_token_id": ids}))
    return folder


def test_a_sound_run(files):
    assert codes(argv(files, "sound")) == []


@pytest.mark.parametrize(
    "ids, expected", [(5, ["stop-ids-differ"]), ([0, 5], ["stop-ids-differ"]), ([0], []), (None, [])]
)
def test_a_teacher_with_other_stop_tokens_is_refused(ids, expected, files, tmp_path):
    with_stops(files / "teacher", tmp_path / "teacher", ids)
    assert codes([*argv(files, "stops"), "--teacher-hf", str(tmp_path / "teacher")]) == expected


def test_a_student_without_a_stop_token_is_refused(files, tmp_path):
    folder = with_stops(files / "student", tmp_path / "student", None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert codes([*argv(files, "none"), "--student-hf", str(folder)]) == ["stop-ids-missing"]


def test_stored_texts_that_end_otherwise_are_named(files, caplog):
    tokenizer = plan_run(load_config(argv(files, "ends")).config, 1).tokenizers.student
    warn_of_unlisted_eos({5, tokenizer.eos_id}, tokenizer)
    assert not caplog.messages
    warn_of_unlisted_eos({5, 7}, tokenizer)
    (text,) = caplog.messages
    assert text.startswith(f"completions end at 5 {tokenizer.decode([5])!r} or 7 ")
    assert f"stored texts end with {tokenizer.eos_id} '<|endoftext|>'" in text


@pytest.mark.parametrize(
    "records, code",
    [
        ((), "prompts-empty"),
        (({"text": "a"},), "prompt-missing"),
        (({"messages": [{"role": "user", "content": "a"}]},), "chat-template-missing"),
        (None, "data-path-not-found"),
    ],
)
def test_prompts_are_looked_at(records, code, files, tmp_path):
    path = tmp_path / "p.jsonl"
    if records is not None:
        write_records(path, *records)
    assert codes([*argv(files, "prompts"), "--prompt-data-path", str(path)]) == [code]
