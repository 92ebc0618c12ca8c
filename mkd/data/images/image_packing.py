"""The tokens to keep of documents with images, and the room that images take in a pack.

A document with images is never split: a piece would have images that its first part describes. It is cut
after the last answer that fits, else dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkd.data.images.image_table import patches_of
from mkd.data.packing.cutting import Pieces

if TYPE_CHECKING:
    from mkd.data.store import TokenStore


def kept_lengths(
    store: TokenStore,
    first: int,
    lengths: np.ndarray,  # int64 [documents], tokens of the documents first, first + 1, ...
    seq_length: int,
    max_patches: int | None,  # in one pack; None: no limit
    overlong: str,  # "drop", or a cut after an answer
) -> np.ndarray:
    """Return the tokens to keep of each document, int64 [documents]; 0 for a document to drop.

    A document without images keeps its length. One that is too long, or whose images have too many patches,
    ends after the last run of tokens with loss that fits.
    """
    if store.images is None:
        return lengths
    kept, records = lengths.copy(), store.images.between(first, first + len(lengths))
    if not len(records):
        return kept
    documents, starts = np.unique(records["document"], return_index=True)
    patches, ends = np.cumsum(patches_of(records)), np.append(starts[1:], len(records))
    before = np.append(0, patches)[starts]
    allowed = np.minimum(lengths[documents - first], seq_length)
    if max_patches is not None:
        over = np.searchsorted(patches, before + max_patches, side="right")  # first image without room
        has_over = over < ends
        beyond = records["first"][np.minimum(over, len(records) - 1)].astype(np.int64)
        allowed = np.where(has_over, np.minimum(allowed, beyond), allowed)
    for place in np.flatnonzero((allowed < lengths[documents - first]) & (lengths[documents - first] > 0)):
        document = int(documents[place])
        loss = store.read(document, 0, int(allowed[place]) + 1)[1]
        kept[document - first] = 0 if overlong == "drop" else _end_of_last_answer(loss)
    return kept


def _end_of_last_answer(loss: np.ndarray) -> int:
    """Return the end of the last run of ones that is whole; `loss` has one token more than may be kept."""
    ends = np.flatnonzero((loss[:-1] == 1) & (loss[1:] == 0)) + 1
    return int(ends[-1]) if len(ends) else 0


def room_of_pieces(
    store: TokenStore,
    pieces: Pieces,
    spans: np.ndarray,  # int64 [pieces], tokens with padding
    seq_length: int,
    max_patches: int | None,
) -> np.ndarray:
    """Return the tokens that each piece takes of a pack, int64 [pieces], raised to its share of the patches.

    If pieces fit by this number, they fit by tokens and by patches.
    """
    if store.images is None or max_patches is None:
        return spans
    patches = patches_in(store, pieces)
    return np.maximum(spans, -(-patches * seq_length // max_patches))


def patches_in(store: TokenStore, pieces: Pieces) -> np.ndarray:
    """Return the patches of the images in each piece, int64 [pieces]."""
    found = np.zeros(len(pieces), dtype=np.int64)
    if store.images is None or not len(pieces):
        return found
    first, last = int(pieces.document.min()), int(pieces.document.max()) + 1
    records = store.images.between(first, last)
    place = np.searchsorted(pieces.document, records["document"])
    inside = place < len(pieces)
    place = np.where(inside, place, 0)
    inside &= pieces.document[place] == records["document"]
    inside &= records["first"] < pieces.length[place]
    np.add.at(found, place[inside], patches_of(records)[inside])
    return found
