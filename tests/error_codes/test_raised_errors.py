"""Check that every error of the sources is found with its texts, and that every code has a meaning."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest

from mkd.error_codes.code_meanings import MEANINGS
from mkd.error_codes.former_codes import NEW_NAMES
from mkd.error_codes.raised_errors import error_classes, exit_codes, raised_errors, source_folders

ROOT = Path(__file__).resolve().parents[2]
CODES = [code for codes in MEANINGS.values() for code in codes]
DECISION = ROOT / "docs" / "decisions" / "2026-11-26-codes-by-remedy.md"


@pytest.fixture(scope="module")
def found():
    return list(raised_errors(source_folders()))


def test_every_code_has_a_meaning_and_a_text(found):
    """A code stands for a remedy: a new one needs a meaning, and an old one goes with its last error."""
    written = {
        word.value.value
        for folder in source_folders()
        for path in folder.rglob("*.py")
        for word in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(word, ast.keyword) and word.arg == "code" and isinstance(word.value, ast.Constant)
    }
    assert {folder.name for folder in source_folders()} == {"mkd", "tools", "launch"}
    assert sorted(CODES) == sorted(written) == sorted({error.code for error in found})
    assert not [code for code in CODES if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+|preempted", code)]
    assert not [text for codes in MEANINGS.values() for text in codes.values() if not text.endswith(".")]


def test_there_are_few_codes():
    """One for each remedy, not for each sentence."""
    assert 100 < len(CODES) <= 160


def test_a_code_has_one_exit_code(found):
    exit_codes_of = defaultdict(set)
    for error in found:
        exit_codes_of[error.code].add(error.exit_code)
    assert exit_codes_of == {code: {exit_code} for exit_code, codes in MEANINGS.items() for code in codes}
    assert set(MEANINGS) == set(exit_codes()) == {cls.exit_code for cls in error_classes().values()}


def test_former_names_lead_to_codes():
    assert not set(NEW_NAMES) & set(CODES) and set(NEW_NAMES.values()) <= set(CODES)
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", DECISION.read_text(encoding="utf-8"), re.M))
    assert {old: new for new, names in rows.items() for old in re.findall("[a-z0-9-]+", names)} == NEW_NAMES


def test_pages_name_no_former_code():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path != DECISION]
    named = {(page.name, word) for page in pages for word in re.findall(r"`([a-z0-9-]+)`", page.read_text())}
    assert not [(page, word) for page, word in named if word in NEW_NAMES]


def test_the_errors_that_people_meet_are_codes():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = text.split("## The 20 errors that people meet\n")[1].split("\n## ")[0]
    named = re.findall(r"^\* \*\*`([a-z0-9-]+)`\*\*: ", section, re.M)
    assert len(set(named)) == 20 and set(named) <= set(CODES)


def test_the_order_of_errors_is_that_of_their_texts(found):
    """Errors that differ only in their fix must be ordered too: the order of a set differs by process."""
    twins = [(a, b) for a, b in combinations(found, 2) if (a.code, a.what) == (b.code, b.what) and a != b]
    assert twins and all((a < b) != (b < a) for a, b in twins)


def test_texts_beside_the_raise_are_found(found):
    (divisible,) = [error for error in found if error.what.startswith("global-batch-size")]
    assert divisible.file == "mkd/plan/batch.py" and divisible.do == "use ..."
    assert re.search(r"is not divisible by .* = \.\.\.$", divisible.what) and divisible.why


def test_texts_elsewhere_are_found(found):
    """Texts are found in variables, branches, functions of the file, and callers of the raising function."""
    places = {(error.file, error.what) for error in found}
    for file, what in (
        ("mkd/operations/profiling.py", "--profile-ranks ... do not exist"),
        ("mkd/checkpoint/hf/hf_hub.py", "the folder ... does not exist"),
        ("mkd/operations/disk.py", "cannot make ...: ... is a file"),
        ("mkd/operations/disk.py", "cannot write to ...: ... is read-only for this user"),
        ("mkd/train/nonfinite.py", "...; logits that are not finite: ..."),
        ("mkd/xtoken/loss_settings.py", "xtoken top-k is ..."),
        ("mkd/checkpoint/verifying.py", "... is missing"),
        ("mkd/pruning/sizes.py", "... ... is more than the teacher's ..."),
        ("launch/submit.py", "--time ... is not a time that Slurm reads"),
    ):
        assert (file, what) in places
    pickles = {error.do for error in found if error.file == "mkd/checkpoint/pickles.py"}
    assert "choose another checkpoint with --ckpt-step N" in pickles  # a constant of the file
    of_runs = [error for error in found if error.file == "mkd/operations/out_of_memory.py"]
    (memory,) = [error for error in of_runs if error.code == "out-of-gpu-memory"]
    assert memory.why.startswith("planned for") and memory.do.startswith("one of")
    for error in found:
        lines = [error.first_line, *error.other_lines]
        assert not [line for line in lines if "\n" in line or "......" in line]


def test_reasons_and_fixes_of_every_branch_are_listed(found):
    (replicas,) = [error for error in found if "cannot be divided into replicas" in error.what]
    started, planned = replicas.do.splitlines()
    assert started.startswith("start a multiple of") and planned.startswith("plan a multiple of")
    (turn,) = [error for error in found if error.what.startswith("message ...: mkd cannot find its turn")]
    assert [" marks " in line for line in turn.do.splitlines()] == [False, True]
    (hub,) = [error for error in found if error.what.startswith("there is no folder ...")]
    assert len(hub.why.splitlines()) == 4


def test_reasons_and_fixes_of_other_branches_are_not_listed(tmp_path):
    """A text keeps the reasons and fixes that its own branch or later lines set."""
    (tmp_path / "mkd").mkdir()
    (tmp_path / "mkd" / "some.py").write_text(
        "def check(a, b):\n"
        "    why, do = 'never', 'of none'\n"
        "    if a:\n"
        "        what, why, do = 'first', 'A', 'of the first'\n"
        "    elif b:\n"
        "        what, why, do = 'second', 'B', 'of the second'\n"
        "    else:\n"
        "        what, why = 'third', 'C'\n"
        "    do = 'also b' if b else do\n"
        "    raise UsageError(what, why, do, code='a-code')\n"
    )
    raised = {error.what: (error.why, error.do.splitlines()) for error in raised_errors([tmp_path / "mkd"])}
    assert raised == {
        "first": ("A", ["also b", "of the first"]),
        "second": ("B", ["also b", "of the second"]),
        "third": ("C", ["also b", "of none"]),
    }


def test_only_the_errors_of_one_code_are_read_if_it_is_given(found):
    alone = list(raised_errors(source_folders(), "already-exists"))
    assert len(alone) > 2 and alone == [error for error in found if error.code == "already-exists"]
