"""Write one HTML file that shows one or several runs, to send to a colleague.

    mkd report runs/qwen
    mkd report runs/a runs/b --out both.html

A run is its log folder or its metrics.jsonl. The file has curves, every evaluation before and after, the
loss, settings with their origins, planned and measured figures, events and samples. It opens from disk in
any browser and loads nothing from a network.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mkd.config.flags import FlagParser, add_overwrite, require_new_file
from mkd.errors import returns_exit_code

OUT = "report.html"


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with the flags `argv`."""
    parser = FlagParser(
        prog="mkd report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="log folder of a run, or its metrics.jsonl"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"file to write (default: {OUT} in the first run's folder, which is written anew every time)",
    )
    add_overwrite(parser, "--out")
    parser.add_argument("--title", default="", help="heading of the page (default: names of the runs)")
    args = parser.parse_args(argv)
    from mkd.report.page import build_page, check_file, write_page
    from mkd.report.run_folder import open_runs

    first = args.runs[0]
    out = args.out or (first if first.is_dir() else first.parent) / OUT
    check_file(out)
    require_new_file("--out", args.out, args.overwrite)
    runs = open_runs(args.runs)
    write_page(build_page(runs, args.title), out)
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
