"""Vision towers in a plan: parameters, work and memory. They are on the first stage, whole on every process.

How many images a run has is in its data, so that a plan assumes `--image-token-share` and `IMAGE_PATCHES`.
The images of a pack are dealt to the processes that share it, tensor x context parallel ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mkd.config.schema import Config
from mkd.families.vision_shape import VisionShape
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.times.layer_time import Rates, WorkTime, milliseconds

IMAGE_PATCHES = 1600
"""Assumed patches of an image of free size, which attend to each other: 560 x 560 pixels of Qwen2.5-VL."""


class TowerParameters(NamedTuple):
    """Parameters of a vision tower, and of the projector behind it."""

    tower: int
    projector: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.tower + self.projector

    def trained(self, parts: Sequence[str]) -> int:
        """Count those of the named parts."""
        return self.tower * ("tower" in parts) + self.projector * ("projector" in parts)


def tower_parameters(shape: ModelShape) -> TowerParameters:
    """Count the parameters of a model's tower and projector; zeros for a model of text alone."""
    vision = shape.vision
    if vision is None:
        return TowerParameters(0, 0)
    hidden, is_tiled = vision.hidden_size, vision.image_size > 0
    biased = not vision.gated_mlp  # Qwen2.5-VL: RMSNorm, and patches without bias
    norm = hidden * (1 + biased)
    patch = hidden * vision.channels * vision.frames * vision.patch_size**2 + hidden * biased
    ffn = vision.block_parts * hidden * vision.ffn_hidden_size
    ffn += (vision.block_parts - 1) * vision.ffn_hidden_size + hidden
    block = 4 * (hidden**2 + hidden) + ffn + 2 * norm
    tower = patch + vision.num_positions * hidden + vision.depth * block + norm * is_tiled
    return TowerParameters(tower, _projector(vision, shape.hidden_size))


def _projector(vision: VisionShape, out: int) -> int:
    wide = vision.hidden_size * vision.merge**2
    if vision.image_size:
        return wide * out
    linears = wide**2 + wide + wide * out + out
    if vision.gated_mlp:
        return linears + vision.hidden_size
    return linears * (1 + vision.deepstack) + 2 * vision.hidden_size + 2 * wide * vision.deepstack


class TowerWork(NamedTuple):
    """Forward work of a tower and its projector."""

    products: float  # FLOPs of matrix products
    attention: float  # FLOPs
    moved: float  # bytes that elementwise kernels read and write

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.products + self.attention

    def forward_ms(self, rates: Rates) -> float:
        """Return the time of the forward. transformers' blocks fuse nothing, so that the parts add up."""
        products = milliseconds(self.products, rates.tower_matmul)
        return products + milliseconds(self.attention, rates.attention) + milliseconds(self.moved, rates.copy)


def tower_work(shape: ModelShape, features: float, element: int = 2) -> TowerWork:
    """Count the forward work of a model's tower and projector for that many image tokens.

    FLOPs are 2 for each matrix element and patch, and 4 h for each patch that a patch attends to. Tensors
    have `element` bytes a value.
    """
    vision = shape.vision
    if vision is None:
        return TowerWork(0.0, 0.0, 0.0)
    hidden, patches = vision.hidden_size, features * vision.merge**2
    patch = hidden * vision.channels * vision.frames * vision.patch_size**2
    block = 4 * hidden**2 + vision.block_parts * hidden * vision.ffn_hidden_size
    keys = (vision.image_size // vision.patch_size) ** 2 if vision.image_size else IMAGE_PATCHES
    of_window = (vision.window_size // vision.patch_size) ** 2 if vision.window_size else keys
    whole = len(vision.full_attention_blocks) if vision.window_size else vision.depth
    attended = whole * keys + (vision.depth - whole) * of_window
    return TowerWork(
        products=2
        * (patches * (vision.depth * block + patch) + features * _projector(vision, shape.hidden_size)),
        attention=4 * patches * hidden * attended,
        moved=patches * vision.depth * _moved_bytes(vision, element),
    )


def _moved_bytes(vision: VisionShape, element: int) -> int:
    """Count what the elementwise kernels of a block move for a patch, from transformers 5.17's code.

    Qwen2.5-VL's norms are six kernels, partly in fp32, other norms one. Qwen's rotary embedding is seven
    kernels in fp32 for queries and as many for keys. Two additions and the activation come on top.
    """
    fp32 = 4
    norm = 6 * fp32 + 6 * element if vision.gated_mlp else 2 * element
    rotary = 0 if vision.image_size else 2 * (12 * fp32 + 2 * element)
    activation = (5 if vision.gated_mlp else 2) * element
    return vision.hidden_size * (2 * norm + rotary + 6 * element) + vision.ffn_hidden_size * activation


def image_tokens(config: Config) -> float:
    """Return the assumed image tokens of a micro-batch on each process that shares it."""
    training, ranks = config.training, Sizes.of(config.parallel).row
    return config.data.image_token_share * training.micro_batch_size * training.seq_length / ranks


def towers_time(
    config: Config, student: ModelShape, teachers: Sequence[ModelShape], rates: Rates
) -> WorkTime:
    """Return the time of all towers for a micro-batch. They run in turn on the first stage.

    A trained tower costs its forward again, because its blocks are recomputed, and twice it in backward; a
    projector alone costs next to nothing.
    """
    features, element = image_tokens(config), 2 if config.training.bf16 else 4
    own_ms, *frozen_ms = (
        tower_work(one, features, element).forward_ms(rates) for one in (student, *teachers)
    )
    return WorkTime(own_ms + sum(frozen_ms), 3 * own_ms if "tower" in config.student.train_parts else 0.0)


def tower_activation_bytes(config: Config, shape: ModelShape, element: int) -> tuple[int, int]:
    """Return the bytes that a student's tower keeps of a micro-batch, and its peak besides.

    A trained tower keeps the inputs of its blocks; the peak is one block's backward or forward.
    """
    vision = shape.vision
    if vision is None:
        return 0, 0
    patches = image_tokens(config) * vision.merge**2
    kept = vision.depth * vision.hidden_size * ("tower" in config.student.train_parts)
    block = 8 * vision.hidden_size + (vision.block_parts + 1) * vision.ffn_hidden_size
    return round(patches * kept * element), round(patches * block * element)
