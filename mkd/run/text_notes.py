"""Notes about text that only the data sets together show: what comes twice, and what is long for a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.plan.models.model_shape import ModelShape


def text_notes(
    training: BlendedDataset | None, held_out: BlendedDataset | None, models: Sequence[tuple[str, ModelShape]]
) -> Iterator[str]:
    """Yield the notes, a line each, for data sets and the (role, shape) of models that read them."""
    ours, theirs = (part.members if part is not None else [] for part in (training, held_out))
    for first, second in combinations(ours, 2):
        if _share_text(first, second):
            yield f"note: {_named(first, second)} are the same text, so it is trained twice as often"
    for one in ours:
        same = next((other for other in theirs if _share_text(one, other)), None)
        if same is not None:
            yield (
                f"note: the held-out text {same.store.prefix} is training text too: held-out figures do not "
                "show what the student only remembers"
            )
    longest = max((member.longest_piece() for member in (*ours, *theirs)), default=0)
    for role, shape in models:
        if longest > shape.max_position_embeddings:
            yield (
                f"note: the longest text in a pack has {longest} tokens, the {role} was made for "
                f"{shape.max_position_embeddings} (max_position_embeddings of config.json). Check that it "
                "can read so far, or lower --seq-length"
            )


def _share_text(one: PackedDataset, other: PackedDataset) -> bool:
    """Return True if both have documents of the same corpus, in whatever file."""
    first = max(one.first_document, other.first_document)
    last = min(member.first_document + member.num_documents for member in (one, other))
    return _identity(one) == _identity(other) and first < last


def _identity(member: PackedDataset) -> Any:
    return member.store.meta.get("cache_key") or member.store.prefix


def _named(first: PackedDataset, second: PackedDataset) -> str:
    names = dict.fromkeys((first.store.prefix, second.store.prefix))
    return " and ".join(names) if len(names) > 1 else f"two paths of --data-path ({first.store.prefix})"
