"""Copy the launch scripts for one machine and for Slurm out of an installed mkd.

    mkd launch-scripts DIR

writes DIR/launch/: local.sh, submit.py, slurm.sbatch and what they use. Start them as docs/slurm.md says,
with DIR in place of the repository. They run the mkd of the Python that env.sh chooses.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from mkd.config.flags import FlagParser
from mkd.config.packaged import packaged
from mkd.errors import UsageError, returns_exit_code


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> None:
    parser = FlagParser("mkd launch-scripts", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder in which to make the folder launch")
    target = parser.parse_args(argv).folder / "launch"
    if target.exists():
        raise UsageError(
            f"{target} already exists",
            "its scripts may have been changed",
            "remove it or name another folder",
            code="choose-another-folder",
        )
    try:
        shutil.copytree(
            packaged("launch"), target, ignore=shutil.ignore_patterns("__pycache__", "Dockerfile*")
        )
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {error}", "", "name another folder", code="not-writable"
        ) from error
    print(target)
