"""Layers: candidates to remove, and the ones whose removal hurts least.

A candidate is scored by running it: KL(teacher || candidate) on text. Its layers are the teacher's own, so a
batch goes through the teacher once, and a candidate starts behind the layers that it shares with it. A
candidate that is far behind after a batch is measured no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mkd.data.batch import PackedBatch
from mkd.data.measured_text import TimedBatches
from mkd.pruning.cut import may_end, without_block
from mkd.pruning.probe import Probe, Score

FAR_BEHIND = 2.0  # times the best candidate's KL


@dataclass(frozen=True)
class DepthCandidate:
    """Layers that stay, and how well they predict without any training."""

    layers: tuple[int, ...]
    removed: tuple[int, ...]  # in this round
    score: Score = field(default_factory=Score)


def measure_blocks(probe: Probe, batches: Sequence[PackedBatch], num_kept: int) -> list[DepthCandidate]:
    """Score every contiguous block whose removal leaves `num_kept` layers, in order of their start."""
    everything = tuple(range(len(probe.layers)))
    length = len(everything) - num_kept
    candidates = []
    for start in range(num_kept + 1 if length else 1):
        layers = without_block(len(everything), start, length)
        if may_end(probe.model.shape, layers[-1]):
            candidates.append(DepthCandidate(layers, everything[start : start + length]))
    measure(probe, batches, everything, candidates)
    return candidates


def measure_one_by_one(probe: Probe, batches: Sequence[PackedBatch], num_kept: int) -> list[DepthCandidate]:
    """Remove one layer after the other, each time the one that hurts least.

    Return the chosen candidate of every round; the last one has `num_kept` layers.
    """
    base = tuple(range(len(probe.layers)))
    rounds: list[DepthCandidate] = []
    while len(base) > num_kept:
        without = {layer: tuple(one for one in base if one != layer) for layer in base}
        shape = probe.model.shape
        candidates = [
            DepthCandidate(rest, (layer,)) for layer, rest in without.items() if may_end(shape, rest[-1])
        ]
        measure(probe, batches, base, candidates)
        rounds.append(best(candidates))
        base = rounds[-1].layers
    return rounds


def measure(
    probe: Probe, batches: Sequence[PackedBatch], base: tuple[int, ...], candidates: Sequence[DepthCandidate]
) -> None:
    """Fill the candidates' scores. `base` are the layers that they share up to their first removed one."""
    everything = range(len(probe.layers))
    running = list(candidates)
    for batch in batches:
        row = probe.enter(batch)
        states = probe.trace(row, base)
        whole = states[-1] if len(base) == len(everything) else probe.run(row, everything)
        teacher_logits = probe.logits(row, whole)
        for candidate in batches.cuts(running) if isinstance(batches, TimedBatches) else running:
            shared = _common_prefix(candidate.layers, base)
            hidden = probe.run(row, candidate.layers[shared:], states[shared])
            probe.add_score(candidate.score, row, probe.logits(row, hidden), teacher_logits)
        limit = FAR_BEHIND * min(candidate.score.kl for candidate in running)
        running = [candidate for candidate in running if candidate.score.kl <= limit]


def best(candidates: Sequence[DepthCandidate]) -> DepthCandidate:
    """Return the candidate with the lowest KL among those that were measured to the end."""
    most = max(candidate.score.num_tokens for candidate in candidates)
    finished = [candidate for candidate in candidates if candidate.score.num_tokens == most]
    return min(finished, key=lambda candidate: candidate.score.kl)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
