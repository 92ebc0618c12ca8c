"""Vision towers in a plan: parameters, work and memory. They are on the first stage, whole on every process.

How many images a run has is in its data, so that a plan assumes `IMAGE_SHARE` and `IMAGE_PATCHES`. The
images of a pack are dealt to the processes that share it, tensor x context parallel ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mkd.config.schema import Config
from mkd.families.vision_shape import VisionShape
from mkd.plan.layer_time import Rates, WorkTime, milliseconds
from mkd.plan.model_shape import ModelShape

IMAGE_SHARE = 0.5
"""Assumed proportion of a pack's tokens that are image tokens."""
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


def tower_flops(shape: ModelShape, features: float) -> float:
    """Count the forward FLOPs of a model's tower and projector for that many image tokens.

    They are 2 for each matrix element and patch, and 4 h for each patch that a patch attends to.
    """
    vision = shape.vision
    if vision is None:
        return 0.0
    hidden, patches = vision.hidden_size, features * vision.merge**2
    block = 4 * hidden**2 + vision.block_parts * hidden * vision.ffn_hidden_size
    patch = hidden * vision.channels * vision.frames * vision.patch_size**2
    keys = (vision.image_size // vision.patch_size) ** 2 if vision.image_size else IMAGE_PATCHES
    of_window = (vision.window_size // vision.patch_size) ** 2 if vision.window_size else keys
    whole = len(vision.full_attention_blocks) if vision.window_size else vision.depth
    attended = whole * keys + (vision.depth - whole) * of_window
    projected = 2 * _projector(vision, shape.hidden_size) * features
    return patches * (2 * (vision.depth * block + patch) + 4 * hidden * attended) + projected


def image_tokens(config: Config) -> float:
    """Return the assumed image tokens of a micro-batch on each process that shares it."""
    parallel, training = config.parallel, config.training
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return IMAGE_SHARE * training.micro_batch_size * training.seq_length / ranks


def towers_time(
    config: Config, student: ModelShape, teachers: Sequence[ModelShape], rates: Rates
) -> WorkTime:
    """Return the time of all towers for a micro-batch. They run in turn on the first stage.

    A trained tower costs its forward again, because its blocks are recomputed, and twice it in backward; a
    projector alone costs next to nothing.
    """
    features = image_tokens(config)
    own_ms = milliseconds(tower_flops(student, features), rates.student_matmul)
    frozen = sum(tower_flops(one, features) for one in teachers)
    forward_ms = own_ms + milliseconds(frozen, rates.teacher_matmul)
    return WorkTime(forward_ms, 3 * own_ms if "tower" in config.student.train_parts else 0.0)


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
