"""A packed corpus in a cross-tokenizer teacher's tokens: its part of every pack, and a summary line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mkd.data.aligned.chunk_selection import ChunkSelection
from mkd.data.aligned.context_records import ContextTemplate
from mkd.data.aligned.teacher_batch import TeacherPack, empty_teacher_pack
from mkd.data.aligned.teacher_pieces import TeacherPieces
from mkd.data.aligned.teacher_store import TeacherStore
from mkd.data.batch import Pack
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_table import PackImages
from mkd.data.packing.cutting import Pieces, padded_lengths
from mkd.data.teacher_input import SharedTokens
from mkd.errors import UsageError
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.vocabulary.spelling import Spellings

KIND_NAMES = ("1-1", "1-N", "M-1", "M-N")


@dataclass(frozen=True)
class TeacherText:
    """The text settings of a teacher that reads a row of its own. Picklable, for workers."""

    tokenizer: Tokenizer
    vocab_size: int  # token ids that the teacher's model knows
    spellings: Spellings | None = None  # default: chunks other than 1-1 have only the realised pair
    alignment: str = "byte_offset"  # or "dp"
    seq_length: int | None = None  # teacher tokens of a pack; default: the length of the longest pack
    twins: np.ndarray | None = None  # [student ids] teacher id of the twin, -1: none; None: unknown
    reasoning: bool = True  # align the reasoning of assistant turns too
    name: str = "teacher"  # for messages
    images: ConversationImages | None = None  # reads the teacher's images; None: it reads none
    context: ContextTemplate | None = None  # of its prompt; None: it reads the student's
    least_seq_length: int = 1  # teacher tokens that a pack of the default length has at least

    @property
    def aligns(self) -> bool:
        """True if its tokens are of another tokenizer."""
        return self.twins is not None

    def selection(self) -> ChunkSelection:
        """Return the choice of the chunks that have loss."""
        return ChunkSelection(self.spellings, self.twins, self.vocab_size)


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
        self.store, self._teacher_pieces = store, teacher_pieces
        self._multiple = document_multiple
        self._selection = text.selection()

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
        kept = self._selection(np.concatenate(chunks), student.labels, student.loss_mask, pack.labels)
        images = PackImages.of_parts(self.store.images, parts) if self.store.images else None
        return TeacherPack(pack.tokens, pack.labels, np.array(lengths), np.array(spans), kept, images)

    def empty_pack(self) -> TeacherPack:
        """Return a pack of padding alone."""
        return empty_teacher_pack(self.seq_length, self.text.tokenizer.padding_id(self.text.vocab_size))

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
        chunks = self.store.chunks(int(pieces.document[number]), student_range, teacher_range)
        chunks = chunks - [offset, offset, start, start]
        if length > room:
            length = int(chunks[-1, 3]) - 1 if len(chunks) else 0  # the last token is only a label
        return chunks[(chunks[:, 0] > 0) & (chunks[:, 2] > 0)], length

    def _copy(self, document: int, first: int, length: int, pack: TeacherPack, start: int) -> None:
        """Copy a document's tokens, `first` and later, and labels into the pack's arrays at `start`."""
        tokens = self.store.tokens
        num_read = min(length + 1, int(tokens.lengths(document)) - first)
        ids = tokens.read(document, first, num_read)[0]
        pack.tokens[start : start + length] = ids[:length]
        pack.labels[start : start + num_read - 1] = ids[1:]


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


def check_teacher_length(text: TeacherText, seq_length: int, document_multiple: int) -> None:
    """Raise UsageError if documents cannot be padded to the length of a teacher's packs."""
    if seq_length % document_multiple:
        section = "context" if text.context else "xtoken"
        raise UsageError(
            f"{section}.seq_length {seq_length} of {text.name} is not a multiple of {document_multiple}",
            "the layout of this run pads documents to it, and a pack is made of whole documents",
            f"use {-(-seq_length // document_multiple) * document_multiple}",
            code="length-not-divisible",
        )
