"""Rules that cut the parameters of mixers by blocks, see `MixerShape`."""

from __future__ import annotations

from collections.abc import Callable

from mkd.families.layer_shape import LayerShape
from mkd.families.mixer_shape import MixerShape
from mkd.families.weight_rules import ModelSizes, Rule


def mixer_of(layer: LayerShape | None) -> MixerShape:
    """Return the mixer of a layer that has one."""
    assert layer is not None and layer.mixer is not None, "the parameter belongs to a layer with a mixer"
    return layer.mixer


def by_block(
    parts: Callable[[MixerShape], tuple[int, ...]],
    other_dims: Callable[[ModelSizes, LayerShape | None], tuple[int, ...]] = lambda m, layer: (
        m.hidden_size,
    ),
    dim: int = 0,
) -> Rule:
    """Return the rule of a parameter of which each block has `parts`."""
    return Rule(
        lambda m, layer, ranks: mixer_of(layer).blocks,
        lambda m, layer, ranks: parts(mixer_of(layer)),
        dim=dim,
        other_dims=other_dims,
    )


def _none(model: ModelSizes, layer: LayerShape | None) -> tuple[int, ...]:
    return ()


def _of_block(mixer: MixerShape) -> tuple[int, ...]:
    return (mixer.output_width // mixer.blocks,)


PROJECTION = by_block(lambda mixer: mixer.projected_parts)
CONVOLUTION = by_block(lambda mixer: mixer.convolved_parts, lambda m, layer: (1, mixer_of(layer).kernel_size))
CONVOLUTION_BIAS = by_block(lambda mixer: mixer.convolved_parts, _none)
OF_HEADS = by_block(lambda mixer: (mixer.heads_per_block,), _none)
OF_CHANNELS = by_block(_of_block, _none)
OUTPUT = by_block(_of_block, dim=1)
