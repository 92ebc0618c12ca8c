"""A packed corpus in a cross-tokenizer teacher's tokens: its part of every pack, and a summary line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mkd.data.aligned.teacher_batch import PackChunks, TeacherPack
from mkd.data.aligned.teacher_pieces import TeacherPieces
from mkd.data.aligned.teacher_store import TeacherStore
from mkd.data.batch import Pack
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.pack_images import PackImages
from mkd.data.packing.cutting import Pieces, padded_lengths
from mkd.data.teacher_input import SharedTokens
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.chunks import MANY_TO_MANY, MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE
from mkd.xtoken.vocabulary.spelling import Spellings

CACHED_SUPPORTS = 1 << 16  # chunks; the same chunks recur often
KIND_NAMES = ("1-1", "1-N", "M-1", "M-N")


@dataclass(frozen=True)
class TeacherText:
    """The text settings of one cross-tokenizer teacher. Picklable, for workers."""

    tokenizer: Tokenizer
    vocab_size: int  # token ids that the teacher's model knows
    spellings: Spellings | None = None  # default: chunks other than 1-1 have only the realised pair
    alignment: str = "byte_offset"  # or "dp"
    seq_length: int | None = None  # teacher tokens of a pack; default: the length of the longest pack
    twins: np.ndarray | None = None  # [student ids] teacher id of the twin, -1: none; None: unknown
    exact_only: bool = False  # keep only the 1-1 chunks of a common pair
    reasoning: bool = True  # align the reasoning of assistant turns too
    name: str = "teacher"  # for messages
    images: ConversationImages | None = None  # reads the teacher's images; None: it reads none


@dataclass(frozen=True)
class StudentPack:
    """The parts of a student's pack that the teacher's side needs."""

    first_piece: int  # number of its first piece
    pieces: Pieces
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
    """The teacher's packs of one corpus. Picklable, for workers."""

    def __init__(
        self,
        store: TeacherStore,
        text: TeacherText,
        teacher_pieces: TeacherPieces,  # the pieces of all packs in the teacher's tokens
        seq_length: int,  # teacher tokens of a pack
        document_multiple: int,  # documents are padded to a multiple of it
    ):
        assert seq_length % document_multiple == 0
        self.text, self.seq_length = text, seq_length
        self._store, self._teacher_pieces = store, teacher_pieces
        self._multiple = document_multiple
        self._supports = Supports(text.spellings)
        if text.twins is not None:
            self._is_twin = np.zeros(max(text.vocab_size, int(text.twins.max(initial=-1)) + 1), dtype=bool)
            self._is_twin[text.twins[text.twins >= 0]] = True

    def pack(self, student: StudentPack) -> TeacherPack:
        """Return the teacher's part of a pack.

        Pieces keep the student's order. A piece without enough room is cut at the last common boundary, or
        dropped.
        """
        pack, pieces = self.empty_pack(), student.pieces
        ranges = self._teacher_pieces.part(student.first_piece, student.first_piece + len(pieces))
        lengths, spans, chunks, start = [], [], [np.zeros((0, 4), dtype=np.int64)], 0
        parts: list[tuple[int, int, int, int]] = []
        for number, (student_start, first, length) in enumerate(
            zip(student.starts.tolist(), *(column.tolist() for column in ranges), strict=True)
        ):
            found, length = self._piece(pieces, number, first, length, self.seq_length - start)
            if not length:
                continue
            self._copy(int(pieces.document[number]), first, length, pack, start)
            parts.append((int(pieces.document[number]), first, length, start))
            chunks.append(found + [student_start, student_start, start, start])
            lengths.append(length)
            spans.append(int(padded_lengths(np.int64(length), self._multiple)))
            start += spans[-1]
        if not lengths:
            return pack
        spans[-1] += self.seq_length - start  # the tail of the pack is padding of its last document
        kept = self._chunks(np.concatenate(chunks), student, pack.labels)
        images = PackImages.of_parts(self._store.images, parts) if self._store.images else None
        return TeacherPack(pack.tokens, pack.labels, np.array(lengths), np.array(spans), kept, images)

    def empty_pack(self) -> TeacherPack:
        """Return a pack of padding alone."""
        return TeacherPack(
            tokens=np.full(self.seq_length, self.text.tokenizer.pad_id, dtype=np.int64),
            labels=np.zeros(self.seq_length, dtype=np.int64),
            lengths=np.zeros(1, dtype=np.int64),
            spans=np.array([self.seq_length]),
            chunks=PackChunks.empty(),
        )

    def needed(self, first: int, last: int) -> int:
        """Return the teacher tokens of the whole pieces [first, last), before any is cut to fit."""
        return int(self._teacher_pieces.part(first, last)[1].sum())

    def _piece(
        self, pieces: Pieces, number: int, start: int, length: int, room: int
    ) -> tuple[np.ndarray, int]:
        """Return (chunks, teacher tokens <= room) of a piece that has `length` of them, from `start` on.

        Chunks are int64 [c, 4], counted from the start of the piece; each has a predictor on both sides.
        """
        offset, num_labels = int(pieces.offset[number]), int(pieces.num_labels[number])
        student_range = (offset, offset + num_labels + 1)
        teacher_range = (start, start + min(length, room) + 1)
        chunks = self._store.chunks(int(pieces.document[number]), student_range, teacher_range)
        chunks = chunks - [offset, offset, start, start]
        if length > room:
            length = int(chunks[-1, 3]) - 1 if len(chunks) else 0  # the last token is only a label
        return chunks[(chunks[:, 0] > 0) & (chunks[:, 2] > 0)], length

    def _copy(self, document: int, first: int, length: int, pack: TeacherPack, start: int) -> None:
        """Copy a document's tokens, `first` and later, and labels into the pack's arrays at `start`."""
        tokens = self._store.tokens
        num_read = min(length + 1, int(tokens.lengths(document)) - first)
        ids = tokens.read(document, first, num_read)[0]
        pack.tokens[start : start + length] = ids[:length]
        pack.labels[start : start + num_read - 1] = ids[1:]

    def _chunks(self, chunks: np.ndarray, student: StudentPack, teacher_labels: np.ndarray) -> PackChunks:
        """Return the chunks [c, 4] (positions in the packs) whose student tokens all have loss.

        A 1-1 chunk becomes an M-N chunk if one of its two tokens has another twin. Its pairs would compare
        the wrong tokens, so only the realised text is compared. An example is the end of a turn, if one model
        ends turns and documents with the same token.
        """
        rows, counts = chunks[:, ::2] - 1, chunks[:, 1::2] - chunks[:, ::2]  # [c, 2], student and teacher
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
        supports = self._supports.look_up(kinds, rows, counts, (student.labels, teacher_labels))
        return PackChunks(rows[:, 0], counts[:, 0], rows[:, 1], counts[:, 1], kinds, *supports)


def chunk_kinds(student_counts: np.ndarray, teacher_counts: np.ndarray) -> np.ndarray:
    """Return the kind of chunks with these numbers of tokens, int8 [c]."""
    kinds = np.array([[ONE_TO_ONE, ONE_TO_MANY], [MANY_TO_ONE, MANY_TO_MANY]], dtype=np.int8)
    return kinds[(student_counts > 1).astype(int), (teacher_counts > 1).astype(int)]


class Supports:
    """The support of a chunk: the pairs of last tokens that are its candidates. Picklable, for workers."""

    def __init__(self, spellings: Spellings | None):
        """Keep `spellings`; without them the support of a chunk is its realised pair alone."""
        self._spellings = spellings
        self._cached = lru_cache(CACHED_SUPPORTS)(self._pairs)

    def __reduce__(self) -> tuple[type[Supports], tuple[Spellings | None]]:
        return Supports, (self._spellings,)

    def look_up(
        self,
        kinds: np.ndarray,  # [c] int8
        rows: np.ndarray,  # [c, 2] int64, student and teacher: the row that predicts a chunk's first token
        counts: np.ndarray,  # [c, 2] int64, its tokens
        labels: tuple[np.ndarray, np.ndarray],  # of the student's and the teacher's pack, int64
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (number of pairs of each chunk [c], student ids [p], teacher ids [p]), int64.

        A 1-1 chunk has no pairs.
        """
        sizes = np.zeros(len(kinds), dtype=np.int64)
        pairs = [np.zeros((2, 0), dtype=np.int64)]
        for i in np.flatnonzero(kinds != ONE_TO_ONE).tolist():
            tokens = (
                tuple(side[row : row + count].tolist())
                for side, row, count in zip(labels, rows[i].tolist(), counts[i].tolist(), strict=True)
            )
            pairs.append(self._cached(int(kinds[i]), *tokens))
            sizes[i] = pairs[-1].shape[1]
        return sizes, *np.concatenate(pairs, axis=1)

    def _pairs(self, kind: int, student: tuple[int, ...], teacher: tuple[int, ...]) -> np.ndarray:
        """Return [2, p] int64: student ids and teacher ids of the last tokens, the realised pair first.

        Every other pair that contains a token of the realised pair is dropped.
        """
        realised = np.array([[student[-1]], [teacher[-1]]], dtype=np.int64)
        if self._spellings is None or kind not in (ONE_TO_MANY, MANY_TO_ONE):
            return realised
        if kind == ONE_TO_MANY:
            pairs = np.stack(self._spellings.one_to_many(teacher[:-1]))
        else:
            pairs = np.stack(self._spellings.many_to_one(student[:-1]))
        return np.concatenate([realised, pairs[:, (pairs != realised).all(axis=0)]], axis=1)


def summarise_teacher(
    side: TeacherSide,
    packs: Sequence[Pack],  # a sample of the `num_packs` packs of a data set
    parts: Sequence[TeacherPack],  # the same in the teacher's tokens
    needed: int,  # teacher tokens of their pieces, before any was cut
    num_packs: int,
) -> str:
    """Return a line of sizes and proportions.

    A loss token is in no chunk in three cases: its chunk has a token without loss, lacks a predictor on one
    side, or does not fit into the teacher's pack.
    """
    tokens = sum(int(part.lengths.sum()) for part in parts)
    kinds = np.bincount(
        np.concatenate([part.chunks.kinds for part in parts]), minlength=len(KIND_NAMES)
    ).tolist()
    covered = sum(int(part.chunks.student_counts.sum()) for part in parts)
    loss_tokens = sum(np.count_nonzero(pack.loss_mask) for pack in packs)
    chunks = ", ".join(f"{name} {count}" for name, count in zip(KIND_NAMES, kinds, strict=True))
    return (
        f"  {side.text.name}: packs of {side.seq_length} tokens; "
        f"in {len(packs)} of {num_packs} packs {tokens} tokens,"
        f" fill {tokens / (len(packs) * side.seq_length):.3f}, chunks {chunks},"
        f" share of loss tokens in chunks {covered / max(loss_tokens, 1):.3f},"
        f" share of teacher tokens without room {1 - tokens / max(needed, 1):.3f}"
    )
