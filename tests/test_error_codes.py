"""Check the base of all errors: codes, reports, copies, lists."""

from __future__ import annotations

import pickle

import pytest

from mkd.data.quarantine import BadRecord
from mkd.errors import CheckpointError, DataError, ErrorList, UsageError, collect_error

ERROR = DataError("no text", "why not", "give some", code="text-missing")


def test_a_code_is_required():
    with pytest.raises(TypeError):
        UsageError("no text")


def test_a_report_starts_with_the_code():
    assert ERROR.report() == "error[text-missing]: no text\n  why: why not\n  do:  give some"
    assert str(ERROR) == "no text\n  why: why not\n  do:  give some"


def test_a_place_comes_before_the_text_of_a_copy():
    located = ERROR.located("a.jsonl:3")
    assert (type(located), located.what, located.code) == (DataError, "a.jsonl:3: no text", "text-missing")
    assert (located.why, located.do, ERROR.what) == (ERROR.why, ERROR.do, "no text")


@pytest.mark.parametrize(
    "error",
    [
        ERROR,
        BadRecord.from_row("a.jsonl", 3, b"{", ERROR),
        ErrorList([ERROR, CheckpointError("gone", code="file-gone")]),
        ErrorList([ERROR]),
    ],
)
def test_errors_travel_between_processes(error):
    """Worker processes and other ranks send their errors pickled; all fields arrive."""
    error.on_all_ranks = True
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error) and arrived.report() == error.report()
    assert (arrived.code, arrived.exit_code, arrived.on_all_ranks) == (error.code, error.exit_code, True)


def test_a_list_numbers_its_problems():
    problems = ErrorList([ErrorList([ERROR, ERROR]), CheckpointError("gone", code="file-gone")])
    assert problems.codes == ["text-missing", "text-missing", "file-gone"]
    assert problems.report().startswith("error: 3 problems:\n[1] error[text-missing]: no text\n")
    assert problems.report().endswith("\n[3] error[file-gone]: gone")
    assert ErrorList([ERROR]).report() == ERROR.report() and ErrorList([ERROR]).code == "text-missing"


def test_a_long_list_is_cut_and_keeps_one_of_every_code():
    """435 missing tensors do not hide the one problem that explains them."""
    missing = [CheckpointError(f"tensor {i} is missing", code="tensor-missing") for i in range(435)]
    cause = CheckpointError("config.json says 16 experts", code="experts-differ")
    text = ErrorList([*missing, cause]).report()
    assert text.startswith("error: 436 problems:\n[1] error[tensor-missing]: tensor 0 is missing\n")
    assert "\n[436] error[experts-differ]: config.json says 16 experts\n" in text
    assert text.endswith("\nand 416 more: 416 x tensor-missing")
    assert len(text.splitlines()) == 22


def test_an_error_is_collected():
    def fail():
        raise ERROR

    problems = []
    assert collect_error(problems, lambda: 3) == 3 and not problems
    assert collect_error(problems, fail) is None and problems == [ERROR]
