"""Check the ratchet of mypy's errors: packages are told apart, numbers never rise, strict ones have none."""

from __future__ import annotations

from tests.test_repository import ROOT
from tools.check_types import ALWAYS_STRICT, RATCHET, package_of, problems, ratchet_text, read_ratchet


def test_the_package_of_a_line():
    assert package_of("mkd/log/records.py:13: error: Missing type arguments  [type-arg]") == "log"
    assert package_of("mkd/plan/checks/validate.py:3: error: no  [misc]") == "plan"
    assert package_of("mkd/errors.py:97: error: no  [has-type]") == "errors"
    assert package_of("mkd/errors.py:97: note: see above") is None
    assert package_of("Found 3 errors in 2 files (checked 240 source files)") is None


def test_numbers_may_fall_and_not_rise():
    allowed = {"data": 2, "run": 1}
    assert problems({"data": 2}, allowed) == [] == problems({"data": 1, "run": 1}, allowed)
    assert problems({"data": 3}, allowed) == ["data: 3 errors, 2 allowed"]
    assert problems({"log": 1}, allowed) == ["log: 1 errors, 0 allowed"]


def test_the_ratchet_is_read_as_it_is_written():
    allowed = {"run": 3, "data": 12}
    assert read_ratchet(ratchet_text(allowed)) == allowed


def test_the_ratchet_of_this_repository_names_packages_that_may_have_errors():
    allowed = read_ratchet(RATCHET.read_text(encoding="utf-8"))
    known = {path.stem for path in (ROOT / "mkd").iterdir()}
    assert known >= ALWAYS_STRICT >= {"plan", "tokenizers"}
    assert allowed.keys() <= known - ALWAYS_STRICT
