"""Draw the curves of runs, as `mkd report RUN --png FILE` does; by default into the first run's folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkd.config.flags import FlagParser, add_overwrite, require_new_file  # noqa: E402
from mkd.errors import returns_exit_code  # noqa: E402


@returns_exit_code
def main() -> None:
    parser = FlagParser(description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="log folder of a run, or its metrics.jsonl")
    add("--keys", nargs="+", default=(), metavar="KEY", help="metrics to draw (default: as mkd report)")
    add("--out", type=Path, metavar="FILE", help="picture to write (default: metrics.png, drawn anew)")
    add_overwrite(parser, "--out")
    args = parser.parse_args()
    from mkd.report.curves import draw_curves
    from mkd.report.run_folder import open_runs

    require_new_file("--out", args.out, args.overwrite)
    first = args.runs[0]
    out = args.out or (first if first.is_dir() else first.parent) / "metrics.png"
    draw_curves(open_runs(args.runs), out, "--out", args.keys)
    print(out)


if __name__ == "__main__":
    sys.exit(main())
