"""Read a checkpoint's contents, to compare two runs bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mkd.checkpoint.manifest import MANIFEST_FILE

COMMON = "common.pt"


def saved_state(folder: Path) -> dict[str, str]:
    """Return {file: SHA-256} of parameters, moments, random states and position, and COMMON's exact values.

    The bytes of COMMON, a pickle, depend on which of its strings are one object. They therefore differ if the
    run has loaded them.
    """
    files = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]
    state = {name: entry["sha256"] for name, entry in files.items() if name != COMMON}
    common = torch.load(folder / COMMON, weights_only=False)
    assert len(state) > 5 and "optimizer" in common
    return state | {COMMON: json.dumps(common, sort_keys=True, default=torch.Tensor.tolist)}
