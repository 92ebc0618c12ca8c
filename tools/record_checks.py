"""Run the tests behind the cards of docs/cards, and record their outcomes in tools/docs/checks.csv.

python tools/record_checks.py              # all of them, on two cores half an hour; then make_docs.py
python tools/record_checks.py FILE ...     # those of these test files
python tools/record_checks.py --ran "mkd train ..." --subject quickstart.yaml --result "what it has printed"
python tools/record_checks.py --junit F.xml ...    # outcomes of tests that have run already
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.families.registry import FAMILIES  # noqa: E402
from mkd.families.vision import VISION_FAMILIES  # noqa: E402
from tools.docs.recorded_checks import (  # noqa: E402
    CHECKS,
    PASSED,
    RECIPE_CHECKS,
    Check,
    add_check,
    outcomes,
    replace_checks,
)

WHOLE_MODELS = ("test_hf_tower", "test_released_qwen3_5")
"""Test files of models with images, whose tiny models have names of text families too."""


def model_types() -> dict[str, str]:
    """Return name of a tiny model of the tests -> `model_type` of its family."""
    from tests import tiny_models
    from tests.tiny_families import FURTHER

    found = {name: name for name in VISION_FAMILIES}
    for name in tiny_models.FAMILIES | tiny_models.VARIANTS | FURTHER:
        kind = tiny_models.config_of(name)["model_type"]
        found[name] = name if name in FAMILIES else kind
    return found


def subject_of(test: str, case: str, types: dict[str, str]) -> str | None:
    """Return the family or the recipe of a test case; None if it is of none."""
    if test in RECIPE_CHECKS:
        return case if case.endswith(".yaml") else None
    if "/vision/" in test or Path(test.partition("::")[0]).stem in WHOLE_MODELS:
        types = types | {name: name for name in VISION_FAMILIES}  # not their text models
    words = case.split("-")
    names = ("-".join(words[start:end]) for end in range(len(words), 0, -1) for start in range(end))
    name = next((name for name in names if name in types), None)
    alone = {"test_released_gemma4": "gemma4"}  # files of one family
    return types[name] if name else alone.get(Path(test.partition("::")[0]).stem)


def checks_in(junit: Path, machine: str, commit: str) -> Iterator[Check]:
    """Yield the rows of a JUnit file."""
    types, today = model_types(), date.today().isoformat()
    for test, case, outcome in outcomes(junit):
        if test in CHECKS or test in RECIPE_CHECKS:
            subject = subject_of(test, case, types)
            if subject is not None:
                yield Check(today, machine, commit, subject, test, case, outcome)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="test files (default: all that the cards are made of)")
    parser.add_argument("--junit", nargs="+", type=Path, metavar="F.xml", help="results instead of a run")
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores", help="name of this machine")
    parser.add_argument("--ran", metavar="COMMAND", help="record a command that has run and passed")
    parser.add_argument("--subject", help="family or NAME.yaml of --ran")
    parser.add_argument("--result", help="figures that --ran has printed")
    parser.add_argument("--commit", help="commit that ran (default: the present one)")
    args = parser.parse_args(argv)
    words = ["git", "rev-parse", "--short", args.commit or "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    if args.ran:
        if not (args.subject and args.result):
            parser.error("--ran needs --subject and --result")
        today = date.today().isoformat()
        add_check(Check(today, args.machine, commit, args.subject, args.ran, args.result, PASSED))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = args.junit or [Path(folder) / "results.xml"]
        if not args.junit:
            files = args.files or sorted({test.partition("::")[0] for test in (*CHECKS, *RECIPE_CHECKS)})
            command = [sys.executable, "-m", "pytest", "-q", *files, "--junitxml", str(results[0])]
            subprocess.run(command, cwd=ROOT, check=False)
        rows = [row for junit in results for row in checks_in(junit, args.machine, commit)]
    replace_checks(rows)
    print(f"recorded {len(rows)} outcomes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
