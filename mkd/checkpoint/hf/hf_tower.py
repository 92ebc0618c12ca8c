"""The vision tower of a Hugging Face folder: names on disk, and its tensors in and out whole.

A model with images has its text model under other names than a model of text alone. Everything else in this
package calls the text tensors as a model of text alone does, and the tower's `tower.` + the module's name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mkd.errors import CheckpointError, ErrorList
from mkd.families.vision import VISION_FAMILIES
from mkd.families.vision_shape import VisionFamily
from mkd.plan.model_shape import ModelShape

if TYPE_CHECKING:
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint

TOWER = "tower."
"""Start of the names of the tower's parameters in a model part, and of its tensors in an open folder."""


@dataclass(frozen=True)
class DiskNames:
    """Translates the names of one folder; without a family they are the same."""

    family: VisionFamily | None = None

    @classmethod
    def of_folder(cls, directory: Path) -> DiskNames:
        """Return the names in a folder by its config.json; a missing or broken one counts as text alone."""
        try:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            return cls(VISION_FAMILIES.get(config["model_type"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    @classmethod
    def of_shape(cls, shape: ModelShape) -> DiskNames:
        """Return the names of a model."""
        return cls(None if shape.vision is None else VISION_FAMILIES[shape.vision.family])

    def ours(self, tensor: str) -> str:
        """Return our name of a tensor on disk."""
        if self.family is None:
            return tensor
        in_tower = self.family.tower_name(tensor)
        return self.family.text_name(tensor) if in_tower is None else TOWER + in_tower

    def on_disk(self, name: str) -> str:
        """Return the name on disk of one of our names."""
        return name if self.family is None else self.family.disk_name(name.removeprefix(TOWER))


def tower_of(model_part: nn.Module) -> dict[str, Tensor]:
    """Return our name -> parameter of the part's tower; empty if it has none."""
    return {name: one for name, one in model_part.named_parameters() if name.startswith(TOWER)}


@torch.no_grad()
def load_tower(model_part: nn.Module, checkpoint: HFCheckpoint) -> None:
    """Fill the part's tower, whole on every rank.

    Raises `ErrorList` for tensors that are missing, not expected or of another shape.
    """
    tower = tower_of(model_part)
    if not tower:
        return
    where, problems = checkpoint.directory, []
    why = "config.json and transformers' module of this family call for it"
    for name in sorted(tower.keys() ^ checkpoint.tower.keys()):
        is_missing = name in tower
        text = "is missing" if is_missing else "is not expected"
        code = "hf-tensor-missing" if is_missing else "hf-tensor-unexpected"
        what = f"{where}: tensor {checkpoint.names.on_disk(name)} {text}"
        problems.append(CheckpointError(what, why, "check config.json against the weights", code=code))
    for name in sorted(tower.keys() & checkpoint.tower.keys()):
        found, full = checkpoint.tower[name].shape, tuple(tower[name].shape)
        if found != full:
            what = f"{where}: tensor {checkpoint.names.on_disk(name)} has shape {list(found)}"
            do = "check config.json against the weights"
            problems.append(CheckpointError(what, f"expected {list(full)}", do, code="hf-tensor-shape"))
    if problems:
        raise ErrorList(problems)
    for name, parameter in tower.items():
        parameter.copy_(checkpoint.read(name, (slice(None),) * parameter.dim()))
