"""Draw the curves of runs in one picture: lines are training, dots are held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkd.errors import UsageError
from mkd.log.records import TRAIN, curve, read_records
from mkd.report.findings import unit_of
from mkd.report.run_folder import RunFolder, require_records

if TYPE_CHECKING:  # an optional package
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEYS = ("kd_loss", "ce_loss", "top1_agreement", "grad_norm")  # default; a run draws those that it has
PICTURES = (".png", ".jpg", ".svg", ".pdf")
STYLES = ((TRAIN, "-"), ("valid", "o--"))


def draw_curves(runs: Sequence[RunFolder], picture: Path, flag: str, keys: Sequence[str] = ()) -> None:
    """Write `picture`, which `flag` names, with one panel per key.

    Raises UsageError without matplotlib, for a key that no record has, or if the picture cannot be written.
    Raises DataError for runs without records.
    """
    figure = new_figure(picture, flag)
    require_records(runs)
    records = {run.name: read_records(run.path) for run in runs}
    keys = _recorded(keys, [record for of_run in records.values() for record in of_run])
    columns = min(len(keys), 2)
    height = -(-len(keys) // columns)
    figure.set_size_inches(5 * columns, 3.5 * height)
    axes = figure.subplots(height, columns, squeeze=False)
    for axis, key in zip(axes.flat, keys, strict=False):
        draw(axis, key, records)
    for axis in axes.flat[len(keys) :]:
        axis.set_visible(False)
    save_figure(figure, picture, flag)


def _recorded(keys: Sequence[str], records: list[dict[str, Any]]) -> Sequence[str]:
    """Return `keys`; by default those of KEYS that have a number in some record."""
    present = {
        key: None for record in records for key, value in record.items() if isinstance(value, (int, float))
    }
    chosen = keys or [key for key in KEYS if key in present] or KEYS
    if missing := [key for key in chosen if key not in present]:
        others = ", ".join(key for key in present if key != "iteration")
        raise UsageError(
            f"no record has a number for {', '.join(missing)}",
            "",
            f"name some of {others} with --keys",
            code="value-unknown",
        )
    return chosen


def new_figure(picture: Path, flag: str) -> Figure:
    """Return an empty matplotlib figure for the file that `flag` names.

    Raises UsageError without matplotlib, or for an unknown suffix.
    """
    if picture.suffix not in PICTURES:
        why = "the suffix decides the format"
        raise UsageError(
            f"{picture} is not the name of a picture",
            why,
            f"give one with {', '.join(PICTURES)} to {flag}",
            code="value-not-valid",
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        why = f"the import failed with: {error}"
        raise UsageError(
            "matplotlib is not installed", why, "pip install matplotlib", code="package-missing"
        ) from error
    return Figure(layout="constrained")


def save_figure(figure: Figure, picture: Path, flag: str) -> None:
    """Write the figure. Raises UsageError if the file cannot be written."""
    try:
        figure.savefig(picture, dpi=110)
    except OSError as error:
        what = f"{picture} cannot be written: {error.strerror or error}"
        raise UsageError(
            what, "", f"name a file in a folder that exists with {flag}", code="not-writable"
        ) from error


def draw(axis: Axes, key: str, records: Mapping[str, list[dict[str, Any]]]) -> None:
    """Draw the curves of one key; a run has the same colour in every panel."""
    for index, (name, of_run) in enumerate(records.items()):
        for split, style in STYLES:
            points = curve(of_run, split, key)
            if points:
                label = f"{name} {split}" if len(records) > 1 else split
                axis.plot(list(points), list(points.values()), style, color=f"C{index}", label=label)
    unit = unit_of(key)
    axis.set(title=f"{key} ({unit})" if unit else key, xlabel="iteration")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize="small")
