"""Files that are part of mkd and no modules: example configurations, launch scripts, tested versions.

In a checkout they are the folders configs/ and launch/ and the file constraints.txt; an installed mkd has
copies in mkd/packaged (setup.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from mkd.errors import MkdError, UsageError

_PACKAGE = Path(__file__).resolve().parent.parent


def packaged(name: str) -> Path:
    """Return the path of `configs`, `launch` or `constraints.txt`.

    Raises MkdError if mkd was copied without it.
    """
    checkout = _PACKAGE.parent
    places = [_PACKAGE / "packaged" / name]
    if (checkout / "pretrain_kd.py").is_file():
        places.insert(0, checkout / name)
    for place in places:
        if place.exists():
            return place
    raise MkdError(
        f"this installation of mkd has no {name}",
        f"neither {' nor '.join(map(str, places))} exists",
        "install mkd again, from its wheel or its checkout",
        code="packaged-file-missing",
    )


def shown_path(path: str) -> str:
    """Return how to show a path to a person: that of an example that comes with mkd without its folder."""
    for place in (_PACKAGE / "packaged", _PACKAGE.parent):
        if path.startswith(f"{place}/configs/"):
            return path.removeprefix(f"{place}/")
    return path


def config_path(given: str) -> Path:
    """Return the file that `--config` names.

    A file that exists wins. Otherwise NAME and NAME.yaml, also below `configs/`, mean an example that comes
    with mkd. Raises UsageError if there is neither.
    """
    path = Path(given)
    if os.path.exists(path):  # also a pipe; reading a folder fails with the reason
        return path
    examples = {example.stem: example for example in sorted(packaged("configs").glob("*.yaml"))}
    name = path.name.removesuffix(".yaml")  # a name may have a dot of its own: llama3.1_8b_from_70b
    if path.parent in (Path(), Path("configs")) and name in examples:
        return examples[name]
    raise UsageError(
        f"--config {given} does not exist",
        "",
        f"check the path, or name an example that comes with mkd: {', '.join(examples)}",
        code="path-not-found",
    )
