"""A packed corpus as a teacher with its own tokenizer reads it: the teacher's part of every pack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mkd.data.aligned.supports import Supports
from mkd.data.aligned.teacher_batch import PackChunks, TeacherPack
from mkd.data.aligned.teacher_pieces import TeacherPieces
from mkd.data.aligned.teacher_store import TeacherStore
from mkd.data.aligned.teacher_text import TeacherText
from mkd.data.packing import Pieces, padded_lengths
from mkd.data.teacher_input import SharedTokens
from mkd.xtoken.chunks import MANY_TO_MANY, MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE


@dataclass(frozen=True)
class StudentPack:
    """What the teacher's side needs to know about a student's pack."""

    piece_ids: np.ndarray  # [documents] int64
    starts: np.ndarray  # [documents] int64, first row of each
    labels: np.ndarray  # [s] int64
    loss_mask: np.ndarray  # [s] float32


@dataclass(frozen=True)
class SharedSide:
    """The packs of a corpus for a teacher that reads the student's tokens."""

    seq_length: int  # tokens of a pack

    def pack(self, student: StudentPack) -> SharedTokens:
        return SharedTokens()

    def empty_pack(self) -> SharedTokens:
        return SharedTokens()


class TeacherSide:
    """The teacher's packs of one corpus. Can be pickled for workers."""

    def __init__(
        self,
        store: TeacherStore,
        text: TeacherText,
        pieces: Pieces,  # of the student
        own: TeacherPieces,
        seq_length: int,  # teacher tokens of a pack
        document_multiple: int,  # documents are padded to a multiple of it
    ):
        assert seq_length % document_multiple == 0
        self.text, self.seq_length = text, seq_length
        self._store, self._pieces, self._own, self._multiple = store, pieces, own, document_multiple
        self._supports = Supports(text.spellings)
        if text.twins is not None:
            self._is_twin = np.zeros(max(text.vocab_size, int(text.twins.max(initial=-1)) + 1), dtype=bool)
            self._is_twin[text.twins[text.twins >= 0]] = True

    def pack(self, student: StudentPack) -> TeacherPack:
        """The teacher's part of a pack. Pieces lie in it in the student's order; those that find no room are cut off at
        the last common border, or left out."""
        pack = self.empty_pack()
        lengths, spans, chunks, start = [], [], [np.zeros((0, 4), dtype=np.int64)], 0
        for piece, student_start in zip(student.piece_ids.tolist(), student.starts.tolist(), strict=True):
            found, length = self._piece(piece, self.seq_length - start)
            if not length:
                continue
            self._copy(piece, length, pack, start)
            chunks.append(found + [student_start, student_start, start, start])
            lengths.append(length)
            spans.append(int(padded_lengths(np.int64(length), self._multiple)))
            start += spans[-1]
        if not lengths:
            return pack
        spans[-1] += self.seq_length - start  # the tail of the pack is padding of its last document
        kept = self._chunks(np.concatenate(chunks), student, pack.labels)
        return TeacherPack(pack.tokens, pack.labels, np.array(lengths), np.array(spans), kept)

    def empty_pack(self) -> TeacherPack:
        """A pack of padding alone."""
        return TeacherPack(
            tokens=np.full(self.seq_length, self.text.tokenizer.pad_id, dtype=np.int64),
            labels=np.zeros(self.seq_length, dtype=np.int64),
            lengths=np.zeros(1, dtype=np.int64),
            spans=np.array([self.seq_length]),
            chunks=PackChunks.empty(),
        )

    def needed(self, piece_ids: np.ndarray) -> int:
        """Teacher tokens of pieces that no pack has cut off."""
        return int(self._own.length[piece_ids].sum())

    def _piece(self, piece: int, room: int) -> tuple[np.ndarray, int]:
        """(chunks with a predictor on both sides, int64 [c, 4], from the start of the piece; teacher tokens <= room)."""
        offset, num_labels = int(self._pieces.offset[piece]), int(self._pieces.num_labels[piece])
        start, length = int(self._own.start[piece]), int(self._own.length[piece])
        student_range, teacher_range = (
            (offset, offset + num_labels + 1),
            (start, start + min(length, room) + 1),
        )
        chunks = self._store.chunks(int(self._pieces.document[piece]), student_range, teacher_range)
        chunks = chunks - [offset, offset, start, start]
        if length > room:
            length = int(chunks[-1, 3]) - 1 if len(chunks) else 0  # the last token is only predicted
        return chunks[(chunks[:, 0] > 0) & (chunks[:, 2] > 0)], length

    def _copy(self, piece: int, length: int, pack: TeacherPack, start: int) -> None:
        """Tokens and labels of a piece into the arrays of the pack, from position `start`."""
        document, first = int(self._pieces.document[piece]), int(self._own.start[piece])
        tokens = self._store.tokens
        num_read = min(length + 1, int(tokens.lengths[document]) - first)
        ids = tokens.read(document, first, num_read)[0]
        pack.tokens[start : start + length] = ids[:length]
        pack.labels[start : start + num_read - 1] = ids[1:]

    def _chunks(self, chunks: np.ndarray, student: StudentPack, teacher_labels: np.ndarray) -> PackChunks:
        """Those of `chunks` [c, 4], positions in the packs, whose student tokens all have loss.

        Two tokens that are the same text here, of which one is paired with another token (the end of a turn, where one of the
        models ends turns and documents with one token), cannot be compared by the pairs: the text decides, as for M-N chunks.
        """
        rows, counts = (
            chunks[:, ::2] - 1,
            chunks[:, 1::2] - chunks[:, ::2],
        )  # both [c, 2], student and teacher
        losses = np.concatenate([[0], np.cumsum(student.loss_mask > 0)])
        wanted = losses[rows[:, 0] + counts[:, 0]] - losses[rows[:, 0]] == counts[:, 0]
        kinds = chunk_kinds(counts[:, 0], counts[:, 1])
        if self.text.twins is not None:
            twins, realised = self.text.twins[student.labels[rows[:, 0]]], teacher_labels[rows[:, 1]]
            is_single = kinds == ONE_TO_ONE
            if self.text.exact_only:
                wanted &= is_single & (twins == realised)
            kinds[is_single & (twins != realised) & ((twins >= 0) | self._is_twin[realised])] = MANY_TO_MANY
        rows, counts, kinds = rows[wanted], counts[wanted], kinds[wanted]
        supports = self._supports.of(kinds, rows, counts, (student.labels, teacher_labels))
        return PackChunks(rows[:, 0], counts[:, 0], rows[:, 1], counts[:, 1], kinds, *supports)


def chunk_kinds(student_counts: np.ndarray, teacher_counts: np.ndarray) -> np.ndarray:
    """Kind of chunks with these numbers of tokens, int8 [c]."""
    kinds = np.array([[ONE_TO_ONE, ONE_TO_MANY], [MANY_TO_ONE, MANY_TO_MANY]], dtype=np.int8)
    return kinds[(student_counts > 1).astype(int), (teacher_counts > 1).astype(int)]
