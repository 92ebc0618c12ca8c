"""Checkpoints of adapters (LoRA): the weights that they change are elsewhere, in the base of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mkd.checkpoint.folders import read_state
from mkd.errors import CheckpointError
from mkd.plan.models.lora_shape import LoRAShape
from mkd.run_command import quoted

if TYPE_CHECKING:  # it loads torch
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint

ADAPTERS = "adapters"
"""Entry of a checkpoint's state: rank, alpha, targets, and the base; a whole model's has none."""
BASE = "student.base"
"""Name of the base among the fingerprints of a run."""
OF_HF = "hf-"
"""Start of the fingerprint of a base in a Hugging Face folder."""
_RESUME = "repeat the command of the run with --load and --export-hf NEW"
SAMPLES, SAMPLE_BYTES = 256, 1 << 14  # evenly spaced pieces of a file: 4 MiB


def samples_fingerprint(files: Iterable[Path]) -> str:
    """Return `samples-sha256:...` over name, size and evenly spaced pieces of each file.

    A model whose layers have been trained differs in most pieces. A change of few weights may go unnoticed.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        last = max(0, size - SAMPLE_BYTES)
        digest.update(f"{path.name}:{size}:".encode())
        with open(path, "rb") as file:
            for number in range(SAMPLES):
                file.seek(last * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"samples-sha256:{digest.hexdigest()}"


def saved_adapters(folder: Path) -> LoRAShape | None:
    """Return the adapters in a checkpoint; None if it holds a whole model."""
    saved = read_state(folder).get(ADAPTERS)
    if saved is None:
        return None
    precision = saved.get("precision", "bf16")  # absent in earlier checkpoints
    return LoRAShape(saved["rank"], saved["alpha"], tuple(saved["targets"]), precision)


def saved_base(folder: Path) -> str:
    """Return the folder or hub id of the base of the adapters in a checkpoint."""
    return str(read_state(folder)[ADAPTERS]["base"])


def require_whole_model(folder: Path) -> None:
    """Raise CheckpointError if a checkpoint holds adapters alone."""
    if saved_adapters(folder) is None:
        return
    what, base = f"{folder} holds adapters (LoRA), not a model", saved_base(folder)
    why = f"the weights that they change are those of {base}"
    raise CheckpointError(what, why, f"make a whole model and name that: {_whole(folder)}", code="hf-adapter")


def start_anew(folder: Path) -> str:
    """Return how a run starts from the weights in a checkpoint, without the rest of it, for an error."""
    if saved_adapters(folder) is None:
        return (
            f"start anew from its weights: --student-load {quoted(folder)} without --load, and another --save"
        )
    return (
        f"start anew from a whole model: {_whole(folder)}; then --student-hf NEW without --load, and another "
        "--save"
    )


def _whole(folder: Path) -> str:
    """Return what makes a whole model of the adapters in a checkpoint."""
    base = quoted(saved_base(folder))
    export = f"mkd export --load {quoted(folder)} --hf-out NEW --reference-hf {base}"
    return _RESUME if _changes_checkpoint(folder) else export


def require_base(folder: Path, reference: Path) -> None:
    """Raise CheckpointError unless `reference` holds the weights that the adapters in `folder` change."""
    from mkd.checkpoint.hf.hf_carried import has_weights
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint

    base = saved_base(folder)
    if _changes_checkpoint(folder):
        what = f"the adapters in {folder} change the weights of a checkpoint, not those of {reference}"
        why = "the run started from --student-load, and the sum of both would be a third model"
        raise CheckpointError(what, why, _RESUME, code="hf-adapter")
    do = f"name the model that the run started from: --reference-hf {base}"
    if not has_weights(reference):
        what = f"{folder} holds adapters (LoRA), and {reference} has no weights to add them to"
        raise CheckpointError(what, f"their base is {base}", do, code="hf-adapter")
    saved = _base_fingerprint(folder)
    if saved and saved != hf_base_fingerprint(HFCheckpoint(reference)):
        what = f"{reference} is not the model whose weights the adapters in {folder} change"
        raise CheckpointError(what, "the sum of both would be a third model", do, code="hf-adapter")


def _base_fingerprint(folder: Path) -> str:
    """Return the fingerprint of the base of the adapters in a checkpoint; "" if it has none."""
    found: str = read_state(folder).get("fingerprints", {}).get(BASE, "")
    return found


def _changes_checkpoint(folder: Path) -> bool:
    """Return True if the base of the adapters in `folder` is a checkpoint, not a Hugging Face folder."""
    saved = _base_fingerprint(folder)
    return bool(saved) and not saved.startswith(OF_HF)


def hf_base_fingerprint(checkpoint: HFCheckpoint) -> str:
    """Return the fingerprint of a base in a Hugging Face folder."""
    headers = (*checkpoint.headers.values(), *checkpoint.tower.values())
    names = sorted({header.file for header in headers})
    return OF_HF + samples_fingerprint(checkpoint.directory / name for name in names)
