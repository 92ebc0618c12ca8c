"""Search: measure every way to reach the sizes, without writing any of them, and choose the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mkd.data.batch import PackedBatch
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.cut import Cut, evenly_spaced
from mkd.pruning.depth import DepthCandidate, best, measure, measure_blocks, measure_one_by_one
from mkd.pruning.probe import Probe, Score
from mkd.pruning.sizes import WIDTH_FLAGS, StudentSizes, num_parameters
from mkd.pruning.width import choose_width

SEARCHES = {"block": measure_blocks, "one-by-one": measure_one_by_one}


@dataclass(frozen=True)
class Option:
    """One way to cut the teacher, and how well the result predicts without training."""

    cut: Cut
    score: Score  # of layers, FFN channels and attention groups; hidden channels are not part of it
    candidates: tuple[DepthCandidate, ...]  # among which its layers were chosen


def measure_option(probe: Probe, batches: Sequence[PackedBatch], sizes: StudentSizes, method: str) -> Option:
    """Choose the layers by `method` (block, one-by-one or even), then channels and groups. Score the cut."""
    everything = tuple(range(len(probe.layers)))
    if method == "even" or sizes.num_layers == len(everything):
        layers = evenly_spaced(len(everything), sizes.num_layers)
        candidates = [DepthCandidate(layers, tuple(sorted({*everything} - {*layers})))]
        measure(probe, batches, everything, candidates)
    else:
        candidates = SEARCHES[method](probe, batches, sizes.num_layers)
    chosen = candidates[-1] if method == "one-by-one" else best(candidates)
    cut, score = Cut(chosen.layers), chosen.score
    own = StudentSizes.of(probe.model.shape)
    if any(getattr(sizes, name) < getattr(own, name) for name in WIDTH_FLAGS):
        cut = choose_width(probe, batches, cut, **{name: getattr(sizes, name) for name in WIDTH_FLAGS})
        score = score_masked(probe, batches, cut)
    return Option(cut, score, tuple(candidates))


def score_masked(probe: Probe, batches: Sequence[PackedBatch], cut: Cut) -> Score:
    """Return the score of the kept layers with zeros for the removed channels and groups."""
    score = Score()
    for batch in batches:
        row = probe.enter(batch)
        teacher_logits = probe.logits(row, probe.run(row, range(len(probe.layers))))
        with masked(probe, cut):
            hidden = probe.run(row, cut.layers)
        probe.add_score(score, row, probe.logits(row, hidden), teacher_logits)
    return score


@contextmanager
def masked(probe: Probe, cut: Cut) -> Iterator[None]:
    """Set the removed FFN channels and attention groups to zero, where the output projections read them."""
    shape = probe.model.shape
    with ExitStack() as stack:
        for number, layer in enumerate(cut.layers):
            if cut.ffn:
                mask = _mask(shape.layers[layer].ffn_hidden_size, cut.ffn[number], probe.device)
                stack.callback(_masks_input(probe.layers[layer].mlp.linear_fc2, mask).remove)
            if cut.groups:
                mask = _mask(shape.num_query_groups, cut.groups[number], probe.device)
                mask = mask.repeat_interleave(shape.heads_per_group * shape.head_dim)
                stack.callback(_masks_input(probe.layers[layer].self_attention.linear_proj, mask).remove)
        yield


def _mask(size: int, kept: Sequence[int], device: torch.device) -> Tensor:
    """Return [size] bool, True at the kept indices."""
    mask = torch.zeros(size, dtype=torch.bool, device=device)
    mask[list(kept)] = True
    return mask


def _masks_input(linear: nn.Module, mask: Tensor) -> torch.utils.hooks.RemovableHandle:
    return linear.register_forward_pre_hook(lambda _, inputs: (inputs[0] * mask, *inputs[1:]))


def score_student(teacher: Probe, student: Probe, batches: Sequence[PackedBatch]) -> Score:
    """Return the score of a student that was loaded from its folder."""
    score = Score()
    for batch in batches:
        rows = [probe.enter(batch) for probe in (teacher, student)]
        logits = [
            probe.logits(row, probe.run(row, range(len(probe.layers))))
            for probe, row in zip((teacher, student), rows, strict=True)
        ]
        teacher.add_score(score, rows[0], logits[1], logits[0])
    return score


def depth_table(option: Option, teacher: ModelShape) -> list[str]:
    """Return the candidates of an option as lines; a star marks the chosen one."""
    lines = ["removed layers    parameters       KL    top-1   tokens"]
    for one in option.candidates:
        star = "  *" if one.layers == option.cut.layers else ""
        parameters = num_parameters(Cut(one.layers).shape(teacher))
        lines.append(f"{ranges(one.removed):14} {parameters:13,} {_figures(one.score)}{star}")
    return lines


def option_table(options: Sequence[Option], chosen: Option, teacher: ModelShape) -> list[str]:
    """Return the options as lines; a star marks the chosen one."""
    lines = ["layers  FFN channels    parameters       KL    top-1   tokens"]
    for one in options:
        shape, star = one.cut.shape(teacher), "  *" if one is chosen else ""
        sizes = f"{shape.num_layers:6} {shape.layers[0].ffn_hidden_size:13,} {num_parameters(shape):13,}"
        lines.append(f"{sizes} {_figures(one.score)}{star}")
    return lines


def _figures(score: Score) -> str:
    return f"{score.kl:8.4f} {score.top1:8.4f} {score.num_tokens:8,}"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in short: `0-11, 18-29`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
