"""Build the page: one HTML file with its styles, scripts and data, which opens without a network.

The tables are plain HTML and need no script. The scripts are allowed by their hashes alone, so that text
from a run can never become one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mkd.errors import UsageError
from mkd.log.records import TRAIN
from mkd.operations.event_log import FAILURE, RESUME, SAVE, SKIP, SPIKE, STOP
from mkd.report import findings
from mkd.report.columns import plot_data
from mkd.report.run_folder import Event, RunFolder, require_records
from mkd.report.sample_fields import shown_sample
from mkd.version import __version__

ASSETS = Path(__file__).resolve().parent / "assets"
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "controls.js")
STYLES = ("uPlot.min.css", "report.css")
SUFFIXES = (".html", ".htm")
MAX_VALUES = 350_000  # numbers in the plots: with some 9 bytes each about 3 MB
MAX_POINTS = (50, 2000)  # limits of the points of one curve
MAX_EVENTS = (100, 200)  # a longer table keeps the first and the last ones
MAX_MARKS = 300  # of one run in a plot
MAX_SAMPLES = 20
MARKED = (RESUME, SAVE, SKIP, SPIKE, STOP, FAILURE)
GROUPS = (  # name, keys, and those of them that are shown at first
    ("Losses", ("loss", "ce_loss", "kd_loss", "auxiliary_loss"), ("loss", "ce_loss", "kd_loss")),
    (
        "Agreement with the teacher",
        ("top1_agreement", "gap_closed", "teacher_ce", "teacher_entropy"),
        ("top1_agreement", "gap_closed"),
    ),
    (
        "The student's own text",
        (
            "rollout/length",
            "rollout/truncated",
            "rollout/teacher_nll",
            "rollout/entropy",
            "rollout/repetition",
        ),
        ("rollout/length", "rollout/truncated", "rollout/teacher_nll"),
    ),
    ("Optimizer", ("grad_norm", "learning_rate"), ("grad_norm", "learning_rate")),
    (
        "Speed and memory",
        ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "teacher_share", "peak_memory_gib"),
        ("tokens_per_s_per_gpu", "peak_memory_gib"),
    ),
)
EACH_TEACHER, TASKS, OTHER = "Each teacher", "Held-out tasks", "Other"


@dataclass(frozen=True)
class Panel:
    """The plot of one key."""

    key: str
    group: str
    unit: str
    help: str
    shown: bool


def build_page(runs: Sequence[RunFolder], title: str = "") -> str:
    """Return the report of `runs` as HTML. Raises DataError if no run has a record."""
    require_records(runs)
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": findings.number, "json": _readable_json}
    scripts = [_asset(name) for name in SCRIPTS]
    panels, data = panels_of(runs), chart_data(runs)
    return environment.get_template("report.html.j2").render(
        title=title or f"mkd: {', '.join(run.title for run in runs[:4])}{' ...' if len(runs) > 4 else ''}",
        version=__version__,
        made=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        policy=_policy(scripts),
        styles=[Markup(_asset(name)) for name in STYLES],
        scripts=[Markup(script) for script in scripts],
        license=_asset("uPlot.LICENSE").splitlines()[2],
        data=embedded_json({**data, "panels": [vars(panel) for panel in panels]}),
        groups={group: [one for one in panels if one.group == group] for group in _groups(panels)},
        buckets=[(runs[one["run"]].name, one["split"], one["bucket"]) for one in data["splits"]],
        runs=runs,
        summaries=[findings.summary(run) for run in runs],
        changes=findings.changes(runs),
        figures=findings.figures(runs),
        cards=_cards(runs),
        settings=findings.compare_settings(runs),
        with_settings=[run for run in runs if run.settings],
        events=[_shortened(run.events) for run in runs],
        samples=[[shown_sample(one) for one in run.samples[-MAX_SAMPLES:]] for run in runs],
        unit_of=findings.unit_of,
        help_of=findings.help_of,
        train=TRAIN,
    )


def check_file(file: Path) -> None:
    """Raise UsageError unless the page can be written to `file`, before any run is read."""
    if file.suffix not in SUFFIXES:
        raise UsageError(
            f"{file} is not the name of a page",
            "another file of a run could be overwritten, and browsers go by the suffix",
            f"give a name with {' or '.join(SUFFIXES)} to --out",
            code="value-not-valid",
        )
    if not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _not_writable(file, "the folder does not exist, or you may not write there")


def write_page(text: str, file: Path) -> None:
    """Write the page. Raises UsageError if that fails."""
    try:
        file.write_text(text, encoding="utf-8", errors="replace")  # JSON and file names may hold surrogates
    except OSError as error:
        raise _not_writable(file, error.strerror or str(error)) from error


def _not_writable(file: Path, reason: str) -> UsageError:
    return UsageError(
        f"{file} cannot be written: {reason}",
        "",
        "name a file in a folder that exists and that you may write to with --out",
        code="not-writable",
    )


def panels_of(runs: Sequence[RunFolder]) -> list[Panel]:
    """Return a panel for each key that some run has, sorted by group."""
    keys = dict.fromkeys(key for run in runs for split in run.splits.values() for key in split.keys)
    panels = [Panel(key, *_place(key), findings.help_of(key), _is_shown(key)) for key in keys]
    order = [*(name for name, _, _ in GROUPS), EACH_TEACHER, TASKS, OTHER]
    known = [key for _, keys, _ in GROUPS for key in keys]

    def rank(panel: Panel) -> tuple[int, int]:
        return order.index(panel.group), known.index(panel.key) if panel.key in known else len(known)

    return sorted(panels, key=rank)


def chart_data(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return curves and marks as JSON values. Long runs are thinned out so that the file stays small."""
    splits = [(place, name, split) for place, run in enumerate(runs) for name, split in run.splits.items()]
    lowest, highest = MAX_POINTS
    num_series = sum(3 * len(split.keys) + 2 for _, _, split in splits)
    points = max(lowest, min(highest, MAX_VALUES // max(1, num_series)))
    return {
        "runs": [run.name for run in runs],
        "splits": [
            {"run": place, "split": name, **plot_data(split, points)} for place, name, split in splits
        ],
        "marks": [[place, *mark] for place, run in enumerate(runs) for mark in _marks(run.events)],
    }


def embedded_json(value: Any) -> Markup:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _marks(events: Sequence[Event]) -> Iterator[tuple[int, str]]:
    marks = dict.fromkeys(
        (one.iteration, one.kind) for one in events if one.kind in MARKED and one.iteration is not None
    )
    yield from list(marks)[-MAX_MARKS:]


def _place(key: str) -> tuple[str, str]:
    """Return (group, unit) of a key."""
    unit = findings.unit_of(key)
    if key.startswith("eval/"):
        return TASKS, unit
    name, has_teacher, _ = key.partition("/")
    group = next((group for group, keys, _ in GROUPS if name in keys or key in keys), OTHER)
    return EACH_TEACHER if has_teacher and name not in ("auxiliary_loss", "rollout") else group, unit


def _is_shown(key: str) -> bool:
    if key.startswith("eval/"):
        return key.count("/") == 2 and findings.direction_of(key) != 0
    return key.startswith("kd_loss/") or any(key in shown for _, _, shown in GROUPS)


def _groups(panels: Sequence[Panel]) -> list[str]:
    return list(dict.fromkeys(panel.group for panel in panels))


def _cards(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Return (card, names of the runs that have it)."""
    cards: dict[str, list[str]] = {}
    for run in runs:
        if run.loss_card:
            cards.setdefault(run.loss_card, []).append(run.name)
    return list(cards.items())


def _shortened(events: Sequence[Event]) -> tuple[list[Event], int, list[Event]]:
    """Return (first events, number of events left out, last events)."""
    first, last = MAX_EVENTS
    if len(events) <= first + last:
        return list(events), 0, []
    return list(events[:first]), len(events) - first - last, list(events[-last:])


def _readable_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy: no network, and no script but these."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
