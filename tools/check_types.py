"""Check types with mypy: strict packages have no errors, others no more than the ratchet allows.

    python tools/check_types.py [--update]

tools/mypy_ratchet.txt lists the errors allowed in each package; a package that is not in it is strict. After
errors were fixed, `--update` writes the lower numbers. The exit code is 0 if every package keeps its limit,
1 if one does not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.config.flags import FlagParser  # noqa: E402
from mkd.errors import returns_exit_code  # noqa: E402

RATCHET = ROOT / "tools/mypy_ratchet.txt"
ERROR = re.compile(r"^mkd/(\w+)[./].*: error: ")
ALWAYS_STRICT = frozenset({"config", "errors", "log", "plan", "tokenizers"})


def package_of(line: str) -> str | None:
    """Return the package in which a line of mypy's output reports an error, or None."""
    match = ERROR.match(line)
    return match.group(1) if match else None


def read_ratchet(text: str) -> dict[str, int]:
    """Return package -> errors allowed."""
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {package: int(number) for number, package in rows}


def ratchet_text(errors: Mapping[str, int]) -> str:
    """Return the ratchet that allows exactly `errors`."""
    head = "# mypy errors allowed in each package; written by tools/check_types.py --update\n"
    return head + "".join(f"{errors[package]} {package}\n" for package in sorted(errors))


def problems(errors: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """Return one line for each package that has more errors than allowed."""
    return [
        f"{package}: {number} errors, {allowed.get(package, 0)} allowed"
        for package, number in sorted(errors.items())
        if number > allowed.get(package, 0)
    ]


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the ratchet for the code as it is")
    update = parser.parse_args(argv).update
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 2: mypy itself failed
        print(done.stdout + done.stderr, file=sys.stderr)
        return 1
    lines = done.stdout.splitlines()
    errors = Counter(package for package in map(package_of, lines) if package is not None)
    allowed = read_ratchet(RATCHET.read_text(encoding="utf-8"))
    if update:
        allowed = {package: number for package, number in errors.items() if package not in ALWAYS_STRICT}
        RATCHET.write_text(ratchet_text(allowed), encoding="utf-8")
    found = problems(errors, allowed)
    names = {problem.split(":")[0] for problem in found}
    print(
        "\n".join([*(line for line in lines if package_of(line) in names), *found]), end="\n" if found else ""
    )
    loose = sorted(package for package, number in allowed.items() if errors[package] < number)
    if loose:
        print(f"fewer errors than allowed in {', '.join(loose)}: run tools/check_types.py --update")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
