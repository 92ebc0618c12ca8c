"""Write one HTML file that shows one or several runs, to send to a colleague.

    mkd report runs/qwen
    mkd report runs/a runs/b --out both.html
    mkd report runs/a runs/b --png both.png --keys kd_loss grad_norm

A run is its log folder or its metrics.jsonl. The file has curves, every evaluation before and after, the
loss, settings with their origins, planned and measured figures, events and samples. It opens from disk in
any browser and loads nothing from a network. --png draws a picture of curves instead: lines are training,
dots are held-out data.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mkd.config.flags import FlagParser, add_overwrite, require_new_file
from mkd.errors import UsageError, returns_exit_code

OUT = "report.html"


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with the flags `argv`."""
    parser = FlagParser("mkd report", __doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="log folder of a run, or its metrics.jsonl"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"file to write (default: {OUT} in the first run's folder, which is written anew every time)",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="picture of curves to draw, in place of the HTML file"
    )
    add_overwrite(parser, "--out", "--png")
    parser.add_argument("--title", default="", help="heading of the page (default: names of the runs)")
    parser.add_argument(
        "--keys",
        nargs="+",
        default=(),
        metavar="KEY",
        help="metrics to draw with --png (default: kd_loss ce_loss top1_agreement grad_norm)",
    )
    args = parser.parse_args(argv)
    _require_one_form(args)
    if args.png:
        draw_picture(args)
    else:
        write_report(args)


def _require_one_form(args: argparse.Namespace) -> None:
    """Raise UsageError for a setting of the page beside --png, and for one of the picture without it."""
    given = {"--out": args.out, "--title": args.title} if args.png else {"--keys": args.keys}
    for flag, value in given.items():
        if value:
            why = "--png writes a picture alone" if args.png else "the page has all metrics"
            do = f"leave out {flag}" if args.png else "add --png FILE, or leave it out"
            raise UsageError(f"{flag} has no effect", why, do, code="remove-flag")


def draw_picture(args: argparse.Namespace) -> None:
    """Draw curves to the file of --png, and print its name."""
    from mkd.report.curves import draw_curves
    from mkd.report.run_folder import open_runs

    require_new_file("--png", args.png, args.overwrite)
    draw_curves(open_runs(args.runs), args.png, "--png", args.keys)
    print(args.png)


def write_report(args: argparse.Namespace) -> None:
    """Write the page, and print its name and size."""
    from mkd.report.page import build_page, check_file, write_page
    from mkd.report.run_folder import open_runs

    first = args.runs[0]
    out = args.out or (first if first.is_dir() else first.parent) / OUT
    check_file(out)
    require_new_file("--out", args.out, args.overwrite)
    runs = open_runs(args.runs)
    write_page(build_page(runs, args.title), out)
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
