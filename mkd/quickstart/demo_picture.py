"""Pictures of the demonstrations: the curves of the run, and the models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mkd.log.records import curve, read_records
from mkd.quickstart.known_lines import KnownLines
from mkd.report.curves import draw, new_figure, save_figure

PANELS = (
    ("kd_loss", "KL to the teacher, nats per token"),
    ("top1_agreement", "top-1 agreement with the teacher"),
)
COLORS = ("C7", "C1", "C0")
ON_POLICY = (("rollout/kl_quarter_1", "first quarter"), ("rollout/kl_quarter_4", "last quarter"))


def draw_off_policy(
    folder: Path, models: Mapping[str, Mapping[str, float]], written: Mapping[str, KnownLines]
) -> Path:
    """Draw curves, and for each model the cross entropy and the probability of the expected ends of lines."""
    picture = folder / "quickstart.png"
    figure = new_figure(picture, "--folder")
    figure.set_size_inches(16, 3.8)
    axes = figure.subplots(1, 4)
    records = {"quickstart": read_records(folder)}
    for axis, (key, title) in zip(axes, PANELS, strict=False):
        draw(axis, key, records)
        axis.set_title(title)
        axis.lines[0].set_alpha(0.4)  # one batch is noisy: the held-out values are what counts
    heights = [values["ce_loss"] for values in models.values()]
    _bars(axes[2], list(models), heights, "cross entropy of held-out text, nats", "{:.2f}")
    probabilities = [one.probability for one in written.values()]
    _bars(axes[3], list(written), probabilities, "probability of a line's expected end", "{:.2f}")
    save_figure(figure, picture, "--folder")
    return picture


def draw_on_policy(
    folder: Path, figures: Sequence[Mapping[str, float]], rows: Sequence[tuple[str, str]]
) -> Path:
    """Draw the KL of the student's own text step by step, and each figure before and after."""
    picture = folder / "quickstart_on_policy.png"
    figure = new_figure(picture, "--folder")
    figure.set_size_inches(13, 3.8)
    axes = figure.subplots(1, 2)
    records = read_records(folder)
    for key, label in ON_POLICY:
        points = curve(records, "train", key)
        axes[0].plot(list(points), list(points.values()), label=label)
    axes[0].set(
        title="KL(student || teacher) of the student's own text", xlabel="step", ylabel="nats per token"
    )
    axes[0].legend(title="of a completion")
    places = range(len(rows))
    for offset, name, values in zip((-0.2, 0.2), ("before", "after"), figures, strict=True):
        heights = [values[key] for key, _ in rows]
        bars = axes[1].bar([place + offset for place in places], heights, width=0.4, label=name)
        axes[1].bar_label(bars, [f"{height:.2f}" for height in heights], padding=2)
    axes[1].set_xticks(list(places), [label for _, label in rows])
    axes[1].set(title="held-out functions, nats per token")
    axes[1].legend()
    save_figure(figure, picture, "--folder")
    return picture


def _bars(axis: Any, names: Sequence[str], heights: Sequence[float], title: str, form: str) -> None:
    drawn = axis.bar(names, heights, color=COLORS, width=0.6)
    axis.bar_label(drawn, [form.format(height) for height in heights], padding=2)
    axis.set(title=title, ylim=(0, 1.15 * max(*heights, 1e-9)))
    axis.tick_params(axis="x", labelsize=8)
