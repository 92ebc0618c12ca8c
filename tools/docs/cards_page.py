"""Make the cards: what was verified of each family and recipe, by which command, when, and what was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mkd.config.load import load_config
from mkd.families.registry import FAMILIES
from mkd.families.vision import VISION_FAMILIES
from tools.benchmarks import results
from tools.benchmarks.shapes import SHAPES
from tools.docs.recorded_checks import CHECKS, FAILED, PASSED, RECIPE_CHECKS, SKIPPED, Check, read_checks

ROOT = Path(__file__).resolve().parents[2]
FIGURE_HEAD = ("benchmark", "case", "arm", "latest median", "date")
PEERS = ("transformers", "TRL")  # arms of other trainers
SERVED, RUN = "mkd serve-check", "mkd train"  # commands in the place of tests
LOGITS, GRADIENTS, EXPORT, SAMPLING = "logits", "gradients", "an export", "completions"
_KINDS: Mapping[str, str] = {  # what a family's checks should cover -> word of their texts
    "logits against transformers": LOGITS,
    "gradients against transformers": GRADIENTS,
    "bits of an export": EXPORT,
    "completions of a student": SAMPLING,
}
_INDEX = """# Cards: what was verified, and what was not

A card for each [family](../models.md) and each recipe of `configs/`: tests and commands that ran, their
outcomes and dates, and what no record shows. `python tools/record_checks.py` runs the tests and records
them in `tools/docs/checks.csv`; `python tools/make_docs.py` makes these pages. A test in the table passes on
tiny random models, unless its line says otherwise. TINY in a command is a model of `tests/tiny_models.py`
with `hidden_size` 128 and `head_dim` 32.

"""


def cards() -> dict[str, str]:
    """Return name of a file in docs/cards -> its text."""
    checks = read_checks()
    names = [*FAMILIES, *VISION_FAMILIES]
    recipes = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    pages = {f"family-{name}.md": _family(name, _of(checks, name)) for name in names}
    pages |= {f"recipe-{name.removesuffix('.yaml')}.md": _recipe(name, _of(checks, name)) for name in recipes}
    pages["index.md"] = _index(checks, names, recipes)
    return pages


def _of(checks: Sequence[Check], subject: str) -> list[Check]:
    return [check for check in checks if check.subject == subject]


def _index(checks: Sequence[Check], names: Sequence[str], recipes: Sequence[str]) -> str:
    head = ("card", "passed", "failed", "not run", "last date")
    families, files = [], []
    for rows, subjects, kind in ((families, names, "family"), (files, recipes, "recipe")):
        for subject in subjects:
            found, stem = _of(checks, subject), subject.removesuffix(".yaml")
            counts = [
                str(sum(one.outcome == outcome for one in found)) for outcome in (PASSED, FAILED, SKIPPED)
            ]
            day = max((one.date for one in found), default="never")
            rows.append((f"[`{subject}`]({kind}-{stem}.md)", *counts, day))
    parts = [_INDEX, "## Families\n\n", _table(head, families), "\n## Recipes\n\n", _table(head, files)]
    return "".join(parts)


def _family(name: str, checks: Sequence[Check]) -> str:
    figures = [row for row in _figures() if any(_is_of(shape, name) and shape in row[1] for shape in SHAPES)]
    parts = [f"# `{name}`\n\n", "## Verified\n\n", _verified(checks), _figure_section(figures)]
    return "".join([*parts, "## Not verified\n\n", *_missing_of_family(name, checks, figures)])


def _is_of(shape: str, name: str) -> bool:
    return not shape.startswith("tiny") and SHAPES[shape]["model_type"] == name


def _recipe(name: str, checks: Sequence[Check]) -> str:
    config = load_config(["--config", str(ROOT / "configs" / name)]).config
    models = [config.student.hf, *(teacher.hf for teacher in config.teachers)]
    student, *teachers = [(model or "none").rpartition("/")[2].lower() for model in models]
    student = student.removesuffix("-base")
    pairs = [f"{student} <- {teacher}" for teacher in teachers]
    figures = [row for row in _figures() if any(pair in row[1] for pair in pairs)]
    parts = [
        f"# `configs/{name}`\n\n",
        f"Models: {', '.join(f'`{model}`' for model in models if model)}.\n\n",
    ]
    parts += ["## Verified\n\n", _verified(checks), _figure_section(figures), "## Not verified\n\n"]
    missing = [] if _has_run(checks) else ["No record shows a whole run of this file."]
    missing.append("No record shows what its student can do, beyond the figures above.")
    if figures:
        missing.append("The figures above are of models of these sizes, not of this file's layout and batch.")
    else:
        missing.append("No benchmark of a pair of these sizes is recorded.")
    return "".join([*parts, *(f"- {line}\n" for line in missing)])


def _has_run(checks: Sequence[Check]) -> bool:
    return any(one.test.startswith(RUN) and one.outcome == PASSED for one in checks)


def _missing_of_family(name: str, checks: Sequence[Check], figures: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for everything that no passed check, and no figure, shows."""
    texts = [_text(one.test) for one in checks if one.outcome == PASSED]
    for kind, word in _KINDS.items():
        if not any(word in text for text in texts):
            yield f"- No passed test of this family covers: {kind}.\n"
    skipped = sorted({one.test for one in checks if one.outcome == SKIPPED})
    if skipped:
        yield f"- Cases that the recorded run left to the nightly tests: {', '.join(skipped)}.\n"
    if not figures:
        yield "- No benchmark on a GPU is recorded for a model of this family.\n"
    if not any(one.test.startswith(SERVED) for one in checks):
        yield "- No export of this family has been compared in vLLM.\n"
    yield "- Released weights and the quality of trained students: these records do not cover them.\n"


def _verified(checks: Sequence[Check]) -> str:
    """Return the table of what passed or failed, a line for each test or command."""
    rows = []
    for test in dict.fromkeys(one.test for one in checks):
        ran = [one for one in checks if one.test == test and one.outcome != SKIPPED]
        if not ran:
            continue
        passed = sum(one.outcome == PASSED for one in ran)
        outcome = f"passed {passed} of {len(ran)}" if test in CHECKS else "; ".join(one.case for one in ran)
        outcome = ran[0].outcome if test in RECIPE_CHECKS else outcome
        latest = max(ran, key=lambda one: one.date)
        command = test if test not in (*CHECKS, *RECIPE_CHECKS) else f"pytest {test}"
        rows.append((_text(test), outcome, latest.date, latest.commit, latest.machine, f"`{command}`"))
    if not rows:
        return "Nothing is recorded.\n\n"
    return _table(("what", "outcome", "date", "commit", "machine", "command"), rows) + "\n"


def _text(test: str) -> str:
    """Return what a test or a command verifies."""
    if test.startswith(RUN):
        return "a whole run of this file"
    if test.startswith(SERVED):
        return "greedy text and log-probabilities in vLLM are those of mkd"
    return CHECKS.get(test) or RECIPE_CHECKS.get(test) or test


def _figures() -> list[tuple[str, ...]]:
    """Return (benchmark, case, arm, latest median, date) of all recorded figures of mkd."""
    _, *rows = results.latest_medians()
    return [(*row[:4], row[6]) for row in rows if not row[2].startswith(PEERS)]


def _figure_section(figures: Sequence[Sequence[str]]) -> str:
    if not figures:
        return ""
    note = "Random weights. Machines, commits and commands are in `tools/benchmarks/results/`.\n\n"
    return f"## Recorded figures\n\n{note}{_table(FIGURE_HEAD, figures)}\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
