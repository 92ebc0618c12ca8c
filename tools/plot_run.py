"""Draw the curves of a run's metrics.jsonl: losses, agreement, gradient norm and learning rate, as one PNG."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

PANELS = (
    ("kd_loss", "KD loss (nats/token)"),
    ("ce_loss", "cross entropy (nats/token)"),
    ("top1_agreement", "top-1 agreement with the teacher"),
    ("grad_norm", "gradient norm"),
)


def read_records(path: Path) -> tuple[list[dict], list[dict]]:
    """Training and evaluation records of a metrics.jsonl."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [r for r in records if "split" not in r], [r for r in records if r.get("split") == "valid"]


def plot(metrics: Path, png: Path) -> None:
    """Write `png`; training as a line, evaluations as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train, valid = read_records(metrics)
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    for axis, (key, title) in zip(axes.flat, PANELS, strict=True):
        for records, style, label in ((train, "-", "training"), (valid, "o--", "held out")):
            points = [(r["iteration"], r[key]) for r in records if r.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label)
        axis.set(title=title, xlabel="iteration")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(png, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run")
    parser.add_argument("--out", type=Path, help="PNG to write (default: beside the metrics)")
    args = parser.parse_args()
    out = args.out or args.metrics.with_suffix(".png")
    plot(args.metrics, out)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
