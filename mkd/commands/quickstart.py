"""Distil a real small model on this machine's CPU: `mkd quickstart`, six minutes on two idle cores.

    mkd quickstart                # cut 6 of SmolLM2's 30 layers and distil the rest on text
    mkd quickstart --on-policy    # then let that student learn from its own text

It needs a network for pip, which downloads the model (93 MB), and about 6 GiB of memory, but no GPU.
Everything is written to --folder: models, checkpoints, metrics, a picture and a report with samples.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mkd.busy_machine import share_cores
from mkd.commands.one_process import require_one_process
from mkd.config.flags import FlagParser
from mkd.errors import UsageError, returns_exit_code

OFF_POLICY, ON_POLICY = Path("runs/quickstart"), Path("runs/quickstart-on-policy")
PACKAGES = ("gguf", "accelerate", "matplotlib")  # of the extra `quickstart`


@returns_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration and return its exit code."""
    parser = FlagParser("mkd quickstart", __doc__)
    parser.add_argument(
        "--on-policy", action="store_true", help="let the quickstart's student learn from its own text"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help=f"folder to write everything to (default: {OFF_POLICY}, or {ON_POLICY} with --on-policy)",
    )
    parser.add_argument(
        "--parallel",
        choices=("tp", "pp"),
        default="tp",
        help="tensor or pipeline parallelism over 2 ranks (default: tp)",
    )
    args = parser.parse_args(argv)
    require_one_process("quickstart")
    folder = args.folder or (ON_POLICY if args.on_policy else OFF_POLICY)
    require_packages()
    begin = time.perf_counter()
    share_cores()
    if args.on_policy:
        from mkd.quickstart.on_policy_demo import quickstart_on_policy

        first = Path(str(folder).removesuffix("-on-policy"))  # as the quickstart proposes it
        code = quickstart_on_policy(folder, first if first != folder else OFF_POLICY)
    else:
        from mkd.quickstart.off_policy_demo import quickstart

        code = quickstart(folder, args.parallel)
    print(f"quickstart took {time.perf_counter() - begin:.0f} s")
    return code


def require_packages() -> None:
    """Raise UsageError if a package is missing that the demonstration needs."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            "gguf and accelerate read the model, matplotlib draws the picture",
            f"pip install {' '.join(missing)}",
            code="package-missing",
        )
