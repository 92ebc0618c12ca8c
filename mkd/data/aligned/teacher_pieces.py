"""The teacher's tokens of each piece of a document, and how long the teacher's packs must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mkd.data.aligned.teacher_store import TeacherStore, TeacherStoreFiles
from mkd.data.corpus.known_files import KnownFiles
from mkd.data.packing.array_file import ArrayFile, ArrayFileWriter
from mkd.data.packing.cutting import Pieces, padded_lengths
from mkd.data.packing.pack_index import WHOLE, PackIndex, open_whole
from mkd.data.progress_lines import ProgressLines

LENGTH_UNIT = 64  # a pack's length is rounded up to this many document multiples
VERSION = 1  # raise it when the same pieces get other tokens


class TeacherPieces:
    """The teacher's tokens of each piece: those between the piece's first and last common token boundary.

    Picklable: a file is mapped again.
    """

    def __init__(self, records: np.ndarray, most: int, file: ArrayFile | None = None):
        self._records, self.most, self._file = records, most, file  # tokens of the longest pack

    @classmethod
    def in_file(cls, file: ArrayFile) -> TeacherPieces:
        return cls(file.arrays["pieces"], file.values["most"], file)

    @classmethod
    def in_memory(cls, store: TeacherStore, index: PackIndex, document_multiple: int) -> TeacherPieces:
        blocks = list(_blocks(store, index, document_multiple))
        return cls(np.concatenate([records for records, _ in blocks]), max(most for _, most in blocks))

    def __reduce__(self) -> tuple[Callable[..., TeacherPieces], tuple[object, ...]]:
        if self._file is not None:
            return TeacherPieces.in_file, (self._file,)
        return TeacherPieces, (self._records, self.most)

    def part(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (first token in the document, tokens) of the pieces [first, last), both int64."""
        records = self._records[first:last]
        return records["start"].astype(np.int64), records["length"].astype(np.int64)

    def pack_length(self, document_multiple: int) -> int:
        """Return the tokens of the longest pack, rounded up to a multiple of `document_multiple` x 64."""
        return int(padded_lengths(max(self.most, 1), document_multiple * LENGTH_UNIT))


def teacher_pieces_file(
    store: TeacherStore,
    index: PackIndex,  # in a file
    document_multiple: int,
    cache_dir: str,
    known: KnownFiles,
    progress: Callable[[], None] = lambda: None,
) -> ArrayFile:
    """Return the file with the teacher's side of all pieces; write it unless the cache has it."""
    prefix = store.tokens.prefix
    files = TeacherStoreFiles(prefix)
    contents = [files.idx, files.student_marks, files.teacher_marks]
    key = known.content_hash([VERSION, index.key, document_multiple], contents, progress)
    path = Path(cache_dir) / f"{Path(prefix).name}-packs-{key[:16]}.bin"
    if (found := open_whole(path, key, known, progress)) is not None:
        return found
    lines, most = ProgressLines(f"packing {store.student.name} for a teacher", index.num_pieces, "pieces"), 0
    with ArrayFileWriter(path, key, {"pieces": _kind(store)}) as writer:
        for records, most_here in _blocks(store, index, document_multiple):
            writer.append("pieces", records)
            most = max(most, most_here)
            lines.step(len(records))
            progress()
        writer.finish({"most": most}, progress)
    lines.end()
    known.keep(path, WHOLE, True)
    return ArrayFile(path, key)


def _kind(store: TeacherStore) -> np.dtype:
    number = np.min_scalar_type(store.tokens.num_tokens)
    return np.dtype([("start", number), ("length", number)])


def _blocks(
    store: TeacherStore, index: PackIndex, document_multiple: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (records, teacher tokens of the longest pack) for consecutive packs."""
    for first, stops in index.blocks():
        start, length = teacher_pieces(store, index.pieces(first, int(stops[-1])))
        records = np.empty(len(start), _kind(store))
        records["start"], records["length"] = start, length
        begins = np.concatenate([[0], stops[:-1] - first])
        yield records, int(np.add.reduceat(padded_lengths(length, document_multiple), begins).max())


def teacher_pieces(store: TeacherStore, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Return the teacher's side of `pieces`: (first token in the document, tokens), both int64 [pieces].

    If a piece begins or ends inside a chunk, the chunk is dropped. If it does so between chunks (in a prompt,
    say), the teacher gets the same proportion of its tokens there. The last token of a piece that continues
    in the next one is only a label, so it needs no place in the row. The same holds for the teacher's.
    """
    start = np.zeros(len(pieces), dtype=np.int64)
    stop = store.tokens.lengths(pieces.document)
    last_label = pieces.offset + pieces.num_labels + 1
    parts = np.flatnonzero((pieces.offset > 0) | (last_label < store.student.lengths(pieces.document)))
    parts = parts[np.argsort(pieces.document[parts], kind="stable")]
    changes = np.flatnonzero(np.diff(pieces.document[parts], prepend=-1, append=-1))
    for first, last in zip(changes[:-1], changes[1:], strict=True):
        same = parts[first:last]  # the parts of one document
        document = int(pieces.document[same[0]])
        borders = _Borders(store, document)
        start[same] = borders.teacher_position(pieces.offset[same], up=True)
        inside = borders.teacher_position(pieces.offset[same] + pieces.length[same], up=False)
        stop[same] = np.maximum(inside, borders.teacher_position(last_label[same], up=False) - 1)
    return start, np.maximum(stop - start, 0)


class _Borders:
    """The token boundaries of one document that student and teacher have in common."""

    def __init__(self, store: TeacherStore, document: int):
        ends = np.array([store.student.lengths(document), store.tokens.lengths(document)])
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
