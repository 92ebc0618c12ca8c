"""`VisionShape`: the vision tower in front of a decoder, and what a family with images must say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a vision tower and of the projector that makes its features as wide as the text."""

    family: str  # key of `mkd.families.vision.VISION_FAMILIES`
    image_token_id: int  # each occurrence takes one feature
    depth: int  # blocks
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    patch_size: int  # pixels
    channels: int
    frames: int  # of one patch
    merge: int  # merge * merge patches make one feature
    gated_mlp: bool = False
    image_size: int = 0  # pixels of a tile's side; 0: images of any size
    num_positions: int = 0  # learned positions; 0: none
    window_size: int = 0  # pixels of an attention window's side; 0: attention to the whole image
    full_attention_blocks: tuple[int, ...] = ()  # blocks without windows
    deepstack: int = 0  # decoder layers, from the first on, that take further features of the tower

    @property
    def pixel_unit(self) -> tuple[int, ...]:
        """Shape of a row of `ImageRow.pixels`: a tile, or the values of one patch."""
        if self.image_size:
            return (self.channels, self.image_size, self.image_size)
        return (self.channels * self.frames * self.patch_size**2,)

    @property
    def block_parts(self) -> int:
        """Matrices of hidden x ffn in the MLP of a block."""
        return 3 if self.gated_mlp else 2


@dataclass(frozen=True)
class VisionFamily:
    """One `model_type` with images: where its text model is, and how its tensors are called."""

    model_type: str
    text_family: str | None  # key of FAMILIES; None: `text_config` names it
    text_prefix: str  # of the text model's tensors, in place of `model.`
    tower_names: Mapping[str, str]  # start of a tensor's name on disk -> start of its name in the tower
    projector: tuple[str, ...]  # starts of names in the tower that belong to the projector
    # None: mkd runs the text model alone. The tower is carried, see `Family.carried`.
    read_vision: Callable[[Mapping[str, Any]], VisionShape] | None
    # The values that transformers assumes for keys missing in the text model.
    text_defaults: Mapping[str, Any]
    # Channel pairs of a head that turn by time, height and width, if config.json does not say.
    sections: tuple[int, int, int] = (16, 24, 24)
    interleaved_sections: bool = False  # the three positions alternate over a head's channels
    ties_by_default: bool = False  # head and embedding are tied if config.json does not say
    ties_by_text: bool = False  # `tie_word_embeddings` counts in the text model's configuration too
    module_prefix: str | None = None  # of the text model's modules in transformers, if not `text_prefix`

    def tower_name(self, tensor: str) -> str | None:
        """Return the name in the tower of a tensor on disk; None if it belongs to no tower that mkd runs."""
        for start, own in self.tower_names.items():
            if self.read_vision is not None and tensor.startswith(start):
                return own + tensor.removeprefix(start)
        return None

    def disk_name(self, name: str) -> str:
        """Return the name on disk of a tensor of the tower, or of the text model under its own name."""
        for start, own in self.tower_names.items():
            if name.startswith(own):
                return start + name.removeprefix(own)
        return self.text_prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def module_name(self, name: str) -> str:
        """Return the name in transformers' model of a text tensor under its own name."""
        if self.module_prefix is None or not name.startswith("model."):
            return self.disk_name(name)
        return self.module_prefix + name.removeprefix("model.")

    def text_name(self, tensor: str) -> str:
        """Return the name in a model of text alone of a text tensor on disk."""
        if tensor.startswith(self.text_prefix):
            return "model." + tensor.removeprefix(self.text_prefix)
        return tensor
