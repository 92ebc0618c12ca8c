"""Print constraints for pip that keep the GPU libraries of this Python as they are.

    python tools/system_constraints.py > keep.txt            # then: PIP_CONSTRAINT=keep.txt pip install ...
    python tools/system_constraints.py --check keep.txt      # exit with 1 if one of them was replaced

NVIDIA's images have torch, Transformer Engine and apex that are built for each other; a torch from a registry
breaks the others. The lines name the installed versions of these libraries, and for all other packages the
tested versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

TESTED = Path(__file__).resolve().parent.parent / "constraints.txt"
KEPT = re.compile(
    r"torch|torch(vision|audio|ao|data)|(pytorch-)?triton|transformer-engine.*|nvidia-.*|cuda-.*|flash-attn.*|apex|numpy"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="earlier output to compare with what is installed now"
    )
    earlier = parser.parse_args(argv).check
    kept = installed()
    if earlier is None:
        print(*constraints(kept, TESTED.read_text(encoding="utf-8")), sep="\n")
        return 0
    lines, now = earlier.read_text(encoding="utf-8").splitlines(), pins(kept)
    replaced = [line for line in lines if KEPT.fullmatch(name_of(line)) and line not in now]
    for line in replaced:
        print(f"{line} was replaced or removed", file=sys.stderr)
    return 1 if replaced else 0


def installed() -> dict[str, str]:
    """Return name -> version of the GPU libraries of this Python, names as pip normalises them."""
    found = {normal(one.metadata["Name"]): one.version for one in distributions() if one.metadata["Name"]}
    return {name: version for name, version in sorted(found.items()) if KEPT.fullmatch(name)}


def constraints(kept: dict[str, str], tested: str) -> list[str]:
    """Return the installed versions, then the lines of constraints.txt about all other packages.

    A GPU library that is not installed has no line: its version depends on the installed torch.
    """
    lines = [line for line in tested.splitlines() if line and not line.startswith("#")]
    return [*pins(kept), *(line for line in lines if not KEPT.fullmatch(name_of(line)))]


def pins(versions: dict[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in versions.items()]


def name_of(line: str) -> str:
    """Return the normalised name of the package that a line of a constraints file is about."""
    return normal(re.split(r"[=<>!~ ;@\[]", line, maxsplit=1)[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
