"""Recorded checks of each model family and each recipe: tests, their outcomes, and when they ran.

tools/record_checks.py runs the tests and replaces their rows in checks.csv. The cards in docs/cards are made
of these rows alone.
"""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

FILE = Path(__file__).resolve().parent / "checks.csv"
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
CHECKS = {  # test -> what it verifies of a family
    "tests/models/test_hf_parity.py::test_logits_equal_transformers": (
        "logits of packs equal those of transformers in fp32, at TP 1 and TP 2, with and without SP"
    ),
    "tests/families/test_further_families.py::test_logits_equal_transformers": (
        "logits of packs equal those of transformers in fp32, at TP 1, and at TP 2 with SP"
    ),
    "tests/models/test_hf_parity.py::test_gradients_equal_transformers": (
        "gradients of all weights equal those of transformers"
    ),
    "tests/families/test_further_families.py::test_gradients_are_as_exact_as_those_of_transformers": (
        "gradients of all weights are as close to float64 as those of transformers in fp32"
    ),
    "tests/families/test_further_families.py::test_a_step_has_the_gradients_of_transformers": (
        "a distillation step of several processes has the gradients of transformers in float64"
    ),
    "tests/checkpoint/hf/test_hf_writer.py::test_round_trip_is_bitwise_and_independent_of_the_layout": (
        "an export has the bits of its source, at every tested layout"
    ),
    "tests/families/test_further_families.py::test_an_export_has_the_bytes_of_its_source": (
        "an export has the bits of its source"
    ),
    "tests/checkpoint/hf/test_hf_tower.py::test_export_is_bitwise_the_model_that_was_read": (
        "an export has the bits of its source, the vision tower too, and transformers loads it"
    ),
    "tests/models/vision/test_vision_parity.py::test_logits_and_gradients_equal_transformers": (
        "logits and gradients of packs with images equal those of transformers"
    ),
    "tests/families/test_released_gemma4.py::test_an_export_is_the_released_model_again": (
        "the released class of transformers has the same logits; its export has the same bits"
    ),
    "tests/families/test_released_qwen3_5.py::test_logits_equal_those_of_the_released_class": (
        "the released class of transformers has the same logits"
    ),
    "tests/families/test_released_qwen3_5.py::test_an_export_is_the_released_model_again": (
        "an export is the released model again, bit by bit"
    ),
    "tests/kinds/sampled/test_decoding.py::"
    "test_completions_are_those_of_transformers_and_of_the_packed_forward": (
        "greedy completions are those of transformers, and log-probabilities those of the packed forward"
    ),
}
RECIPE_CHECKS = {  # test -> what it verifies of a recipe
    "tests/config/test_load.py::test_examples_are_valid": "its settings are read, and pass the checks"
}


@dataclass(frozen=True)
class Check:
    """The outcome of one case of one test, or of one command, for one subject."""

    date: str  # YYYY-MM-DD
    machine: str
    commit: str
    subject: str  # `model_type` of a family, or NAME.yaml of a recipe
    test: str  # FILE::FUNCTION, or a command
    case: str  # parameters of the test, or what a command has printed
    outcome: str


def read_checks(file: Path = FILE) -> list[Check]:
    """Return all rows."""
    with file.open(encoding="utf-8", newline="") as stream:
        return [Check(**row) for row in csv.DictReader(stream)]


def replace_checks(new: Iterable[Check], file: Path = FILE) -> None:
    """Write rows in place of the earlier ones of the same tests, sorted by subject."""
    new = [*new]
    tests = {check.test for check in new}
    kept = [check for check in (read_checks(file) if file.exists() else []) if check.test not in tests]
    _write([*kept, *new], file)


def add_check(check: Check, file: Path = FILE) -> None:
    """Write the row of a command in place of that of the same command for the same subject."""
    key = check.subject, check.test
    kept = [one for one in read_checks(file) if (one.subject, one.test) != key]
    _write([*kept, check], file)


def _write(checks: Sequence[Check], file: Path) -> None:
    rows = sorted(checks, key=lambda check: (check.subject, check.test, check.case))
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([field.name for field in fields(Check)])
        writer.writerows(map(astuple, rows))


def outcomes(junit: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (FILE::FUNCTION, parameters, outcome) of every test case in a JUnit file of pytest."""
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        function, _, rest = case.attrib["name"].partition("[")
        file = case.attrib["classname"].replace(".", "/") + ".py"
        tags = {child.tag for child in case}
        outcome = FAILED if tags & {"failure", "error"} else SKIPPED if "skipped" in tags else PASSED
        yield f"{file}::{function}", rest.removesuffix("]"), outcome
