"""Check that cards say what is recorded, and name what is not."""

from __future__ import annotations

from mkd.families.registry import FAMILIES
from mkd.families.vision import VISION_FAMILIES
from tools.docs import cards_page
from tools.docs.recorded_checks import (
    CHECKS,
    FAILED,
    PASSED,
    RECIPE_CHECKS,
    SKIPPED,
    Check,
    add_check,
    outcomes,
    read_checks,
    replace_checks,
)
from tools.record_checks import ROOT, subject_of

LOGITS = "tests/models/test_hf_parity.py::test_logits_equal_transformers"
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.models.test_hf_parity" name="test_logits_equal_transformers[qwen3-windows]"/>
<testcase classname="tests.models.test_hf_parity" name="test_logits_equal_transformers[qwen3]"><failure/>
</testcase>
<testcase classname="tests.config.test_load" name="test_nothing"><skipped/></testcase>
</testsuite></testsuites>"""


def test_recorded_tests_exist_and_belong_to_a_card():
    for test in (*CHECKS, *RECIPE_CHECKS):
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), test
    recipes = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert {check.subject for check in read_checks()} <= {*FAMILIES, *VISION_FAMILIES, *recipes}


def test_outcomes_are_those_of_pytest(tmp_path):
    (tmp_path / "r.xml").write_text(JUNIT)
    assert [*outcomes(tmp_path / "r.xml")] == [
        (LOGITS, "qwen3-windows", PASSED),
        (LOGITS, "qwen3", FAILED),
        ("tests/config/test_load.py::test_nothing", "", SKIPPED),
    ]
    types = {"qwen3": "qwen3", "qwen3-windows": "qwen3", "llama3.2": "llama"}
    assert subject_of(LOGITS, "qwen3-windows", types) == "qwen3"
    assert subject_of(LOGITS, "llama3.2-tp2_pp2-4-x", types) == "llama"
    assert subject_of(LOGITS, "unknown", types) is None
    towers = "tests/checkpoint/hf/test_hf_tower.py::test_export_is_bitwise_the_model_that_was_read"
    assert subject_of(towers, "qwen3_5", {"qwen3_5": "qwen3_5_text"}) == "qwen3_5"


def test_a_newer_run_replaces_the_rows_of_its_tests(tmp_path):
    file, (recipe,) = tmp_path / "checks.csv", RECIPE_CHECKS
    old = Check("2026-01-01", "m", "a", "qwen3", LOGITS, "qwen3", PASSED)
    kept = Check("2026-01-01", "m", "a", "x.yaml", recipe, "x.yaml", PASSED)
    replace_checks([old, kept], file)
    new = Check("2026-01-02", "m", "b", "qwen3", LOGITS, "qwen3", FAILED)
    replace_checks([new], file)
    assert read_checks(file) == [new, kept]
    runs = [
        Check("2026-01-02", "m", "b", "x.yaml", "mkd train", text, PASSED) for text in ("loss 2", "loss 1")
    ]
    for run in runs:
        add_check(run, file)
    assert read_checks(file) == [new, runs[1], kept]
    assert "| a whole run of this file | loss 1 |" in cards_page._verified([runs[1]])


def test_a_card_names_what_is_missing():
    """Text is given for what passed alone: a failed test verifies nothing."""
    rows = [Check("2026-01-02", "m", "b", "smollm3", LOGITS, case, FAILED) for case in "ab"]
    text = cards_page._family("smollm3", rows)
    assert "passed 0 of 2" in text and "No passed test of this family covers: logits" in text
    assert "compared in vLLM" in text and "No benchmark on a GPU" in text
    assert "Nothing is recorded." in cards_page._family("smollm3", [])
