"""The samples of a step that went wrong, for messages and for the files that list such steps."""

from __future__ import annotations

from collections.abc import Iterable

from mkd.data.dataset import BlendedDataset

SHOWN = 16  # sample ids in a message; the file has all


def shown(samples: Iterable[int]) -> str:
    """`3, 7, 12`, the first ones of many."""
    samples = sorted(samples)
    text = ", ".join(map(str, samples[:SHOWN]))
    return text if len(samples) <= SHOWN else f"{text} and {len(samples) - SHOWN} more"


def documents_by_sample(dataset: BlendedDataset, samples: Iterable[int]) -> dict[str, dict[str, list[int]]]:
    """{sample: {prefix of a corpus: numbers of the documents in it that the sample has parts of}}, for JSON."""
    return {str(sample): dataset.documents_of(sample) for sample in sorted(samples)}
