"""Pictures of the demonstrations: the curves of the run, the models side by side, and what they write."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mkd.log.records import curve, read_records
from mkd.quickstart.function_bodies import SHOWN, Bodies, Body
from mkd.report.curves import draw, new_figure, save_figure

PANELS = (
    ("kd_loss", "KL to the teacher, nats per token"),
    ("top1_agreement", "top-1 agreement with the teacher"),
)
COLORS = ("C7", "C1", "C0")  # teacher, before, after
RIGHT, WRONG = "#15803d", "#b91c1c"
ON_POLICY = (("rollout/kl_quarter_1", "first quarter"), ("rollout/kl_quarter_4", "last quarter"))
LONGEST_LINE, MOST_LINES = 52, 8  # characters and lines of a body in a picture


def draw_off_policy(
    folder: Path, models: Mapping[str, Mapping[str, float]], written: Mapping[str, Bodies]
) -> Path:
    """Draw curves, and for each model cross entropy, and bodies of functions."""
    picture = folder / "quickstart.png"
    figure = new_figure(picture, "--folder")
    figure.set_size_inches(15, 7.2)
    above, below = figure.subfigures(2, 1, height_ratios=(3.6, 3.4))
    axes = above.subplots(1, 4)
    records = {"quickstart": read_records(folder)}
    for axis, (key, title) in zip(axes, PANELS, strict=False):
        draw(axis, key, records)
        axis.set_title(title)
        axis.lines[0].set_alpha(0.4)  # one batch is noisy: the held-out values are what counts
    heights = [values["ce_loss"] for values in models.values()]
    _bars(axes[2], list(models), heights, "cross entropy of held-out text, nats", "{:.2f}")
    _bars(axes[3], list(written), [one.num_right for one in written.values()], _title(written), "{:.0f}")
    _draw_bodies(below, written)
    save_figure(figure, picture, "--folder")
    return picture


def draw_on_policy(
    folder: Path,
    figures: Sequence[Mapping[str, float]],
    rows: Sequence[tuple[str, str]],
    written: Mapping[str, Bodies],
) -> Path:
    """Draw the KL of the student's own text step by step, figures before and after, and bodies."""
    picture = folder / "quickstart_on_policy.png"
    figure = new_figure(picture, "--folder")
    figure.set_size_inches(15, 7.2)
    above, below = figure.subfigures(2, 1, height_ratios=(3.6, 3.4))
    axes = above.subplots(1, 3, width_ratios=(1.3, 1.3, 1))
    records = read_records(folder)
    for key, label in ON_POLICY:
        points = curve(records, "train", key)
        axes[0].plot(list(points), list(points.values()), label=label)
    axes[0].set(title="KL(student || teacher) of own text, nats per token", xlabel="step")
    axes[0].grid(alpha=0.3)
    axes[0].legend(title="of a completion")
    places = range(len(rows))
    for offset, name, color, values in zip(
        (-0.2, 0.2), ("before", "after"), COLORS[1:], figures, strict=True
    ):
        heights = [values[key] for key, _ in rows]
        bars = axes[1].bar([place + offset for place in places], heights, 0.4, label=name, color=color)
        axes[1].bar_label(bars, [f"{height:.2f}" for height in heights], padding=2)
    axes[1].set_xticks(list(places), [label for _, label in rows])
    highest = max(values[key] for values in figures for key, _ in rows)
    axes[1].set(title="own text on held-out functions, nats per token", ylim=(0, 1.15 * max(highest, 1e-9)))
    axes[1].legend()
    _bars(axes[2], list(written), [one.num_right for one in written.values()], _title(written), "{:.0f}")
    _draw_bodies(below, written)
    save_figure(figure, picture, "--folder")
    return picture


def _bars(axis: Any, names: Sequence[str], heights: Sequence[float], title: str, form: str) -> None:
    drawn = axis.bar(names, heights, color=COLORS, width=0.6)
    axis.bar_label(drawn, [form.format(height) for height in heights], padding=2)
    axis.set(title=title, ylim=(0, 1.15 * max(*heights, 1e-9)))
    axis.tick_params(axis="x", labelsize=8)


def _title(written: Mapping[str, Bodies]) -> str:
    return f"bodies of functions that parse, of {next(iter(written.values())).num_all}"


def _draw_bodies(below: Any, written: Mapping[str, Bodies]) -> None:
    """Draw some functions, and the first body of each model."""
    axis = below.subplots()
    axis.set_axis_off()
    axis.set(xlim=(0, 1), ylim=(0, 1))
    heads = next(iter(written.values())).heads
    chosen = [number for number in SHOWN if number < len(heads)]
    for row, number in enumerate(chosen):
        top = 1 - row / len(chosen)
        axis.axhline(top, color="0.85", linewidth=0.8)
        head = _plain(heads[number].splitlines()[-1].strip(), 2 * LONGEST_LINE)
        style = dict(va="top", fontsize=9)
        axis.text(0, top - 0.02, head, family="monospace", weight="bold", **style)
        for place, (name, one) in enumerate(written.items()):
            left, body = place / len(written), one.of_heads[number][0]
            mark = "parses" if body.parses else "broken"
            color = RIGHT if body.parses else WRONG
            axis.text(left, top - 0.09, f"{name}: {mark}", color=color, **style)
            axis.text(left, top - 0.15, _lines_of(body), family="monospace", **{**style, "fontsize": 8})


def _lines_of(body: Body) -> str:
    """Return the beginning of a body, without the indentation that all lines have."""
    lines = [line for line in textwrap.dedent(body.text).splitlines() if line.strip()] or ["(nothing)"]
    more = ["..."] if len(lines) > MOST_LINES else []
    return "\n".join([*(_plain(line, LONGEST_LINE) for line in lines[:MOST_LINES]), *more])


def _plain(text: str, length: int) -> str:
    """Return printable text of at most `length` characters. A dollar sign would start mathematics."""
    text = "".join(one if one.isprintable() else "?" for one in text)
    return (text if len(text) <= length else f"{text[: length - 3]}...").replace("$", r"\$")
