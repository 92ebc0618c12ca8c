"""Check that docs/errors.md holds every code in the sources, with all texts that can be read there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest

from tools.docs.errors_page import SOURCES, error_classes, page_of, raised_errors

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture(scope="module")
def found():
    return list(raised_errors(ROOT))


def test_every_code_has_a_section(found):
    """Codes are the headings, so that docs/errors.md#CODE is a link; they are sorted."""
    written = {
        word.value.value
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for word in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(word, ast.keyword) and word.arg == "code" and isinstance(word.value, ast.Constant)
    }
    headings = re.findall(r"^## (.*)$", page_of(found), re.M)
    assert headings == sorted(written) and len(written) > 250
    assert not [code for code in headings if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+|preempted", code)]


def test_a_code_has_one_exit_code(found):
    exit_codes = defaultdict(set)
    for error in found:
        exit_codes[error.code].add(error.exit_code)
    assert not {code: seen for code, seen in exit_codes.items() if len(seen) > 1}
    assert {seen for codes in exit_codes.values() for seen in codes} == {
        cls.exit_code for cls in error_classes().values()
    }


def test_the_order_of_errors_is_that_of_their_texts(found):
    """Errors that differ only in their fix must be ordered too: the order of a set differs by process."""
    twins = [(a, b) for a, b in combinations(found, 2) if (a.code, a.what) == (b.code, b.what) and a != b]
    assert twins and all((a < b) != (b < a) for a, b in twins)


def test_texts_beside_the_raise_are_found(found):
    (divisible,) = [error for error in found if error.code == "batch-not-divisible"]
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
    (missing,) = [error for error in found if error.code == "checkpoint-metadata-missing"]
    assert missing.do == "choose another checkpoint with --ckpt-step N"  # a constant of the file
    (memory,) = [error for error in found if error.code == "out-of-gpu-memory"]
    assert memory.why.startswith("planned for") and memory.do.startswith("one of")
    for error in found:
        assert "\n" not in error.entry().replace("  \n", "") and "......" not in error.entry()


def test_reasons_and_fixes_of_every_branch_are_listed(found):
    (replicas,) = [error for error in found if error.code == "world-not-divisible"]
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
    raised = {error.what: (error.why, error.do.splitlines()) for error in raised_errors(tmp_path)}
    assert raised == {
        "first": ("A", ["also b", "of the first"]),
        "second": ("B", ["also b", "of the second"]),
        "third": ("C", ["also b", "of none"]),
    }
