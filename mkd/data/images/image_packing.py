"""The tokens to keep of documents with images, and the room that images take in a pack.

A document with images is never split: a later piece would speak of images that only the first one has. It is
cut after the last answer that fits, else dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkd.data.corpus.store import TokenStore
from mkd.data.images.image_table import IMAGE, patches_of
from mkd.data.packing.cutting import Pieces


@dataclass(frozen=True)
class ImageRoom:
    """Both capacities of a pack, for the documents of one corpus."""

    store: TokenStore
    seq_length: int  # tokens of a pack
    max_patches: int | None  # of each model in a pack; None: no limit
    teacher_images: tuple[str, ...] = ()  # tables of teachers with image processors of their own

    def kept_lengths(self, first: int, lengths: np.ndarray, overlong: str) -> np.ndarray:
        """Return the tokens to keep of the documents first, first + 1, ..., int64 [documents]; 0: drop it.

        `lengths` int64 [documents]; a document without images keeps its length. One that is too long, or
        whose images have too many patches, ends after the last run of tokens with loss that fits. If
        `overlong` is "drop", it is dropped.
        """
        records = self._between(first, first + len(lengths))
        kept, here = lengths.copy(), records["document"] - first
        allowed = np.minimum(lengths, self.seq_length)
        for patches in self._patches(first, first + len(lengths)):
            if self.max_patches is not None:
                before = np.concatenate([[0], np.cumsum(patches)])
                starts = before[np.searchsorted(here, np.arange(len(lengths)))]
                over = before[1:] - starts[here] > self.max_patches
                np.minimum.at(allowed, here[over], records["first"][over].astype(np.int64))
        for place in np.unique(here[allowed[here] < lengths[here]]).tolist():
            loss = self.store.read(first + place, 0, int(allowed[place]) + 1)[1]
            kept[place] = 0 if overlong == "drop" else _end_of_last_answer(loss)
        return kept

    def taken_by(self, pieces: Pieces, spans: np.ndarray) -> np.ndarray:
        """Return the tokens that each piece takes of a pack, int64 [pieces].

        It is `spans`, its tokens with padding, or its share of the patches if that is larger. If pieces fit
        by this number, they fit by tokens and by patches.
        """
        if self.max_patches is None:
            return spans
        return np.maximum(spans, -(-self.patches_in(pieces) * self.seq_length // self.max_patches))

    def patches_in(self, pieces: Pieces) -> np.ndarray:
        """Return the patches in each piece, of the model that has most, int64 [pieces]."""
        found = np.zeros(len(pieces), dtype=np.int64)
        if not len(pieces):
            return found
        first, last = int(pieces.document.min()), int(pieces.document.max()) + 1
        records = self._between(first, last)
        place = np.minimum(np.searchsorted(pieces.document, records["document"]), len(pieces) - 1)
        inside = pieces.document[place] == records["document"]
        inside &= records["first"] < pieces.length[place]
        for patches in self._patches(first, last):
            of_model = np.zeros_like(found)
            np.add.at(of_model, place[inside], patches[inside])
            found = np.maximum(found, of_model)
        return found

    def _between(self, first: int, last: int) -> np.ndarray:
        """Return the student's records of the documents [first, last)."""
        return np.zeros(0, IMAGE) if self.store.images is None else self.store.images.between(first, last)

    def _patches(self, first: int, last: int) -> list[np.ndarray]:
        """Return the patches of these images for each model, int64 [images].

        Images that a teacher lacks, because it refuses their document, have 0 there.
        """
        records = self._between(first, last)
        found = [patches_of(records)]
        for path in self.teacher_images:
            table = np.memmap(Path(path), IMAGE, mode="r")
            begin, end = np.searchsorted(table["document"], [first, last])
            own, patches = table[begin:end], np.zeros(len(records), dtype=np.int64)
            patches[np.isin(records["document"], own["document"])] = patches_of(own)
            found.append(patches)
        return found


def _end_of_last_answer(loss: np.ndarray) -> int:
    """Return the end of the last run of ones that is whole; `loss` has one token more than may be kept."""
    ends = np.flatnonzero((loss[:-1] == 1) & (loss[1:] == 0)) + 1
    return int(ends[-1]) if len(ends) else 0
