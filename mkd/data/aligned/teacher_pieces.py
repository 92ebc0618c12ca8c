"""The teacher's tokens of each piece of a document, and how long the teacher's packs must be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mkd.data.aligned.teacher_store import TeacherStore
from mkd.data.packing import Packs, Pieces, padded_lengths

LENGTH_UNIT = 64  # a pack's length is rounded up to this many document multiples


@dataclass(frozen=True)
class TeacherPieces:
    """The teacher's tokens of each piece: those between the piece's first and last common token boundary."""

    start: np.ndarray  # [pieces] int64, first token in the document
    length: np.ndarray  # [pieces] int64, tokens


def teacher_pieces(store: TeacherStore, pieces: Pieces) -> TeacherPieces:
    """Return the teacher's side of `pieces`.

    If a piece begins or ends inside a chunk, the chunk is dropped. If it does so between chunks (in a prompt,
    say), the teacher gets the same proportion of its tokens there. The last token of a piece that continues
    in the next one is only a label, so it needs no place in the row. The same holds for the teacher's.
    """
    start = np.zeros(len(pieces), dtype=np.int64)
    stop = store.tokens.lengths[pieces.document].copy()
    last_label = pieces.offset + pieces.num_labels + 1
    parts = np.flatnonzero((pieces.offset > 0) | (last_label < store.student.lengths[pieces.document]))
    changes = np.flatnonzero(np.diff(pieces.document[parts], prepend=-1, append=-1))
    for first, last in zip(changes[:-1], changes[1:], strict=True):
        same = parts[first:last]  # the parts of one document
        document = int(pieces.document[same[0]])
        borders = _Borders(store, document)
        start[same] = borders.teacher_position(pieces.offset[same], up=True)
        inside = borders.teacher_position(pieces.offset[same] + pieces.length[same], up=False)
        stop[same] = np.maximum(inside, borders.teacher_position(last_label[same], up=False) - 1)
    return TeacherPieces(start, np.maximum(stop - start, 0))


def longest_pack(pieces: TeacherPieces, packs: Packs, document_multiple: int) -> int:
    """Return the teacher tokens of the longest pack, rounded up to a multiple of `document_multiple` x 64."""
    spans = padded_lengths(pieces.length, document_multiple)[packs.piece_ids]
    needed = int(np.add.reduceat(spans, packs.offsets[:-1]).max())
    return int(padded_lengths(max(needed, 1), document_multiple * LENGTH_UNIT))


class _Borders:
    """The token boundaries of one document that student and teacher have in common."""

    def __init__(self, store: TeacherStore, document: int):
        ends = np.array([store.student.lengths[document], store.tokens.lengths[document]])
        # the ends of the document are added as empty chunks, so that every position lies between two chunks
        self._chunks = np.concatenate(
            [np.zeros((1, 4), np.int64), store.chunks(document), np.repeat(ends, 2)[None]]
        )

    def teacher_position(self, student: np.ndarray, up: bool) -> np.ndarray:
        """Return the teacher's positions, int64 [n], at `student` positions.

        Inside a chunk, return the chunk's end (`up`) or its start.
        """
        student_starts, student_ends, teacher_starts, teacher_ends = self._chunks.T
        before = np.maximum(np.searchsorted(student_starts, student, side="left") - 1, 0)
        after = np.minimum(before + 1, len(self._chunks) - 1)
        student_gap = student_starts[after] - student_ends[before]
        teacher_gap = teacher_starts[after] - teacher_ends[before]
        between = teacher_ends[before] + teacher_gap * (student - student_ends[before]) // np.maximum(
            student_gap, 1
        )
        inside = student_ends[before] > student
        return np.where(inside, (teacher_ends if up else teacher_starts)[before], between)
