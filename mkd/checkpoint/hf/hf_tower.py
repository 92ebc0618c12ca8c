"""The vision tower of a Hugging Face folder: names on disk, and its parameters in a model part.

A model with images has its text model under other names than a model of text alone. Everything else in this
package calls the text tensors as a model of text alone does, and the tower's `tower.` + the module's name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from mkd.families.vision import VISION_FAMILIES
from mkd.families.vision_shape import VisionFamily
from mkd.plan.models.model_shape import ModelShape

TOWER = "tower."
"""Start of the names of the tower's parameters in a model part, and of its tensors in an open folder."""


@dataclass(frozen=True)
class DiskNames:
    """Translates the names of one folder; without a family they are the same."""

    family: VisionFamily | None = None

    @classmethod
    def of_folder(cls, directory: Path) -> DiskNames:
        """Return the names in a folder by its config.json; a missing or broken one counts as text alone."""
        return cls(VISION_FAMILIES.get(model_type_of(directory)))

    @classmethod
    def of_shape(cls, shape: ModelShape) -> DiskNames:
        """Return the names of a model."""
        return cls(VISION_FAMILIES.get(shape.hf_config.get("model_type", "")))

    def ours(self, tensor: str) -> str:
        """Return our name of a tensor on disk."""
        if self.family is None:
            return tensor
        in_tower = self.family.tower_name(tensor)
        return self.family.text_name(tensor) if in_tower is None else TOWER + in_tower

    def on_disk(self, name: str) -> str:
        """Return the name on disk of one of our names."""
        return name if self.family is None else self.family.disk_name(name.removeprefix(TOWER))

    def in_transformers(self, name: str) -> str:
        """Return the name that one of our names has in the model that transformers builds."""
        if self.family is None or name.startswith(TOWER):
            return self.on_disk(name)
        return self.family.module_name(name)


def model_type_of(directory: Path) -> str:
    """Return `model_type` of a folder's config.json; "" if it says none or cannot be read."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def tower_of(model_part: nn.Module) -> dict[str, Tensor]:
    """Return our name -> parameter of the part's tower; empty if it has none."""
    return {name: one for name, one in model_part.named_parameters() if name.startswith(TOWER)}
