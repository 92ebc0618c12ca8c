"""Width: which channels and attention groups stay, by the activations of the teacher on text.

The score of an input channel of a linear layer is E[x^2] ||w||^2, the squared size of what the channel adds
to the output; w is its column of the weight. It is the square of Wanda's score, summed over a column (Sun et
al. 2023, "A Simple and Effective Pruning Approach for Large Language Models", section 3). An attention group
has the sum over its channels. The score of a hidden channel is its mean square behind a norm, summed over all
norms, as in Minitron (Muralidharan et al. 2024, "Compact Language Models via Pruning and Knowledge
Distillation", section 2.2), which takes other means of the same activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mkd.data.batch import PackedBatch
from mkd.families.registry import FAMILIES
from mkd.families.weight_rules import FUSED_NORMS, MODEL_TABLE
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.cut import Cut
from mkd.pruning.probe import Probe

FINAL_NORM = "decoder.final_layernorm.weight"
LAYER_NORMS = ("input_layernorm", "pre_mlp_layernorm")


@dataclass
class MeanSquare:
    """Running sum of squares of activations by channel."""

    total: Tensor | None = None  # [channels] fp64

    def add(self, activations: Tensor) -> None:
        """Add activations [t, 1, channels]."""
        squares = activations.detach().float().square().sum(dim=(0, 1)).double()
        self.total = squares if self.total is None else self.total + squares


def choose_width(
    probe: Probe,
    batches: Sequence[PackedBatch],
    cut: Cut,  # the layers that stay
    *,
    ffn_hidden_size: int,
    num_query_groups: int,
    hidden_size: int,
) -> Cut:
    """Return `cut` with the channels and groups of these numbers that have the highest scores."""
    shape = probe.model.shape
    sums = _activation_sums(probe, batches, cut.layers)
    narrower = cut
    if ffn_hidden_size < shape.layers[0].ffn_hidden_size:
        ffn = [_column_scores(sums[layer, "ffn"], probe.layers[layer].mlp.linear_fc2) for layer in cut.layers]
        narrower = replace(narrower, ffn=tuple(_highest(scores, ffn_hidden_size) for scores in ffn))
    if num_query_groups < shape.num_query_groups:
        groups = []
        for layer in cut.layers:
            projection = probe.layers[layer].self_attention.linear_proj
            scores = _column_scores(sums[layer, "heads"], projection)
            groups.append(scores.view(shape.num_query_groups, -1).sum(dim=1))
        narrower = replace(narrower, groups=tuple(_highest(one, num_query_groups) for one in groups))
    if hidden_size < shape.hidden_size:
        norms = {name: _share(sums[name]) for name in _norm_names(shape, cut.layers)}
        scores = sum(share * _norm_weight(probe, name).square() for name, share in norms.items())
        hidden = _highest(scores, hidden_size)
        factors = {
            tensor: (norms[name][list(hidden)].sum().item() * shape.hidden_size / hidden_size) ** 0.5
            for name, tensor in _norm_names(shape, cut.layers).items()
        }
        narrower = replace(narrower, hidden=hidden, norm_factors=factors)
    return narrower


def _activation_sums(
    probe: Probe, batches: Sequence[PackedBatch], layers: Sequence[int]
) -> dict[tuple[int, str] | str, Tensor]:
    """Run `layers` on the text and return sums of squares by channel.

    Keys are (layer, "ffn" or "heads") for the inputs of the output projections, and mkd's name of a norm's
    weight for its input, with every token divided by its size: [channels] each.
    """
    sums: dict[tuple[int, str] | str, MeanSquare] = {}
    with ExitStack() as stack:

        def watch(module: nn.Module, key: tuple[int, str] | str, change: Callable[[Tensor], Tensor]) -> None:
            sums[key] = MeanSquare()
            hook = module.register_forward_pre_hook(lambda _, inputs: sums[key].add(change(inputs[0])))
            stack.callback(hook.remove)

        for layer in layers:
            module = probe.layers[layer]
            watch(module.mlp.linear_fc2, (layer, "ffn"), _unchanged)
            watch(module.self_attention.linear_proj, (layer, "heads"), _unchanged)
            for norm in LAYER_NORMS:
                watch(getattr(module, norm), f"decoder.layers.{layer}.{norm}.weight", _unit_size)
        watch(probe.model.decoder.final_layernorm, FINAL_NORM, _unit_size)
        for batch in batches:
            row = probe.enter(batch)
            probe.logits(row, probe.run(row, layers))
    return {key: one.total for key, one in sums.items() if one.total is not None}


def _unchanged(activations: Tensor) -> Tensor:
    return activations


def _unit_size(activations: Tensor) -> Tensor:
    """Divide every token [.., h] by its norm, so that long ones do not count more."""
    return torch.nn.functional.normalize(activations.float(), dim=-1)


def _column_scores(sums: Tensor, linear: nn.Module) -> Tensor:
    """Return E[x^2] ||w||^2 up to a constant, for every input channel, [channels]."""
    return sums * linear.weight.float().square().sum(dim=0).double()


def _share(sums: Tensor) -> Tensor:
    """Return each channel's mean share of a token's squared size, [h], with sum 1."""
    return sums / sums.sum()


def _highest(scores: Tensor, count: int) -> tuple[int, ...]:
    """Return the indices of the `count` highest scores, ascending."""
    return tuple(scores.topk(count).indices.sort().values.tolist())


def _norm_names(shape: ModelShape, layers: Sequence[int]) -> dict[str, str]:
    """Return mkd's name -> Hugging Face name of the norm weights that read the hidden states."""
    table = FAMILIES[shape.family].tensors
    names = {
        f"decoder.layers.{layer}.{norm}.weight": table[f"{norm}.weight"].tensors[0].format(layer=layer)
        for layer in layers
        for norm in LAYER_NORMS
    }
    return names | {FINAL_NORM: MODEL_TABLE[FINAL_NORM].tensors[0]}


def _norm_weight(probe: Probe, name: str) -> Tensor:
    """Return the norm's weight [h] fp64, also where Transformer Engine keeps it in the next linear layer."""
    parameters = dict(probe.model.named_parameters())
    prefix, _, norm = name.partition(".layers.")
    if name not in parameters:
        layer, _, norm = norm.partition(".")
        fused = next(inside for inside, outside in FUSED_NORMS.items() if outside == norm)
        name = f"{prefix}.layers.{layer}.{fused}"
    return parameters[name].double()
