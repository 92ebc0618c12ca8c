"""A corpus in a teacher's tokens on disk, beside the student's, with the chunks that tie both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkd.data.corpus.store import StoreFiles, TokenStore, mapped_bytes
from mkd.data.images.image_table import ImageTable
from mkd.errors import DataError

NO_CHUNK, STARTS, CONTINUES = range(3)
"""Mark of a token: in no chunk, first of a chunk, later in a chunk.

The i-th chunk of one side is the i-th of the other.
"""

COVERED, SILENT, OF_OTHER_TAGS = "covered_tokens", "documents_without_context", "documents_of_other_tags"
"""Entries of the description of a corpus with contexts: chunks, and documents that the teacher skips."""


@dataclass(frozen=True)
class TeacherStoreFiles(StoreFiles):
    """The files of a corpus in a teacher's tokens; a byte for each token of either side marks the chunks."""

    @property
    def student_marks(self) -> Path:  # uint8 per token of the student's corpus
        return Path(self.prefix + ".student_chunks.bin")

    @property
    def teacher_marks(self) -> Path:  # uint8 per token of PREFIX.bin
        return Path(self.prefix + ".teacher_chunks.bin")

    @property
    def teacher_images(self) -> Path:  # as PREFIX.images.bin; its sources are in the student's file
        return Path(self.prefix + ".teacher_images.bin")

    @property
    def in_order(self) -> tuple[Path, ...]:
        return self.student_marks, self.teacher_marks, self.teacher_images, *super().in_order


class TeacherStore:
    """The documents of a student's corpus in a teacher's tokens, memory-mapped.

    Unpickling reopens the files.
    """

    def __init__(self, prefix: str, student: TokenStore):
        """Open the files.

        Raises DataError if they are missing, damaged, or made for another corpus than `student`.
        """
        self.tokens, self.student = TokenStore(prefix), student
        files = TeacherStoreFiles(prefix)
        fits = len(self.tokens) == len(student)
        self._marks = []
        for path, store in ((files.student_marks, student), (files.teacher_marks, self.tokens)):
            if not fits or not path.is_file() or path.stat().st_size != store.num_tokens:
                raise DataError(
                    f"{prefix} does not fit {student.prefix}",
                    f"a teacher's corpus has the same {len(student)} documents, and a mark for each token",
                    "remove it: the next run aligns the corpus again",
                    code="cached-file-damaged",
                )
            self._marks.append(mapped_bytes(path))

        self.images: ImageTable | None = None
        if self.tokens.meta.get("teacher_images"):
            self.images = ImageTable(files.teacher_images, StoreFiles(student.prefix).image_sources)

    def __reduce__(self) -> tuple[type[TeacherStore], tuple[str, TokenStore]]:
        return TeacherStore, (self.tokens.prefix, self.student)

    def chunks(
        self, document: int, student: tuple[int, int] | None = None, teacher: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Return the chunks of a document, int64 [c, 4].

        The columns are student start, student end, teacher start and teacher end; ends are exclusive. With
        ranges [first, last) of tokens of both sides, return only the chunks inside both. Both ranges must
        start after the same number of chunks. Positions count from the start of the document.
        """
        stores = (self.student, self.tokens)
        limits = [
            limit or (0, int(store.lengths(document)))
            for store, limit in zip(stores, (student, teacher), strict=True)
        ]
        sides = []
        for store, marks, (first, last) in zip(stores, self._marks, limits, strict=True):
            start, length = int(store.starts(document)), int(store.lengths(document))
            stop = start + min(last + 1, length)  # one mark more shows whether the last chunk continues
            window = marks[start + first : stop]
            sides.append(_ranges(window) + first)
        count = min(map(len, sides))
        chunks = np.concatenate([side[:count] for side in sides], axis=1)
        return chunks[(chunks[:, 1] <= limits[0][1]) & (chunks[:, 3] <= limits[1][1])]


def image_tables(prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return the tables of images of those teachers' corpora that have one."""
    paths = (TeacherStoreFiles(prefix).teacher_images for prefix in prefixes)
    return tuple(str(path) for path in paths if path.exists())


def chunk_marks(length: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the marks of `length` tokens, uint8; the chunks [starts, ends) ascend and do not overlap."""
    edges = np.zeros(length + 1, dtype=np.int8)
    edges[starts] += 1
    edges[ends] -= 1
    marks = np.where(np.cumsum(edges[:-1]) > 0, CONTINUES, NO_CHUNK).astype(np.uint8)
    marks[starts] = STARTS
    return marks


def _ranges(marks: np.ndarray) -> np.ndarray:
    """Return [start, end) of every chunk that starts in `marks`, int64 [c, 2]."""
    starts = np.flatnonzero(marks == STARTS)
    borders = np.append(np.flatnonzero(marks != CONTINUES), len(marks))
    return np.stack([starts, borders[np.searchsorted(borders, starts, side="right")]], axis=1)
