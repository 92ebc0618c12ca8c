"""Records and tokenised documents in the tokens of a student and of a teacher, with their common chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mkd.data.aligned.teacher_store import chunk_marks
from mkd.data.documents import MESSAGES, PROMPT_COMPLETION, Record, Row, encode_record, parse_row, require_eos
from mkd.data.encoding import each_row
from mkd.data.images.conversation import ConversationImages, EncodedImage
from mkd.data.images.image_table import image_records
from mkd.data.store import TokenStore
from mkd.errors import DataError, MkdError
from mkd.tokenizers.spans import EncodedText
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.align.align_chat import align_chat, align_completion
from mkd.xtoken.align.align_text import AlignedText, align, aligner

DOCUMENTS_PER_BATCH = 64
SHARED_ROLES = ("bos", "eos", "end_of_turn", "unk", "pad")  # a token with several roles counts as the first


@dataclass(frozen=True)
class AlignedBatch:
    """Consecutive documents, concatenated on both sides.

    A document that the teacher refuses is empty on its side.
    """

    student_ids: np.ndarray  # [n] int32
    teacher_ids: np.ndarray  # [m] int32
    student_marks: np.ndarray  # [n] uint8, see teacher_store.py
    teacher_marks: np.ndarray  # [m] uint8
    student_lengths: np.ndarray  # [documents] int64
    teacher_lengths: np.ndarray  # [documents] int64
    refused: np.ndarray  # [r] int64, the documents that the teacher refuses
    errors: list[MkdError]  # a BadRecord for each of these, or the error of an unreadable file
    images: np.ndarray  # [images] of IMAGE on the teacher's side, with documents counted from the first one


@dataclass(frozen=True)
class Pair:
    """A student's and a teacher's tokenizer and how their tokens are aligned. Picklable, for workers."""

    student: Tokenizer
    teacher: Tokenizer
    alignment: str
    reasoning: bool
    append_eod: bool
    student_images: ConversationImages | None = None  # None: the model reads no images
    teacher_images: ConversationImages | None = None


@dataclass(frozen=True)
class AlignedConversation(AlignedText):
    """Both sides of a conversation with images, expanded for each model."""

    images: tuple[EncodedImage, ...] = ()  # in the teacher's tokens


@dataclass(frozen=True)
class RowAligner:
    """Turns rows of files into aligned documents, with the documents and student ids of `encode_record`."""

    pair: Pair

    def __call__(self, rows: tuple[str, list[tuple[int, Row]]] | MkdError) -> AlignedBatch:
        if isinstance(rows, MkdError):
            return _batch([], [rows])
        documents, refused, errors = [], [], []
        for row in rows[1]:
            aligned, wrong = each_row((rows[0], [row]), self._align)
            if wrong:  # refused by the student, whose corpus skips it too, or by the teacher alone
                aligned, _ = each_row((rows[0], [row]), self._without_teacher)
                refused += [len(documents)] * len(aligned)
                errors += wrong * len(aligned)
            documents += aligned
        return _batch(documents, errors, refused)

    def _align(self, row: Row) -> AlignedText:
        return align_record(parse_row(row), self.pair)

    def _without_teacher(self, row: Row) -> AlignedText:
        record, pair = parse_row(row), self.pair
        ids = encode_record(record, pair.student, pair.append_eod, pair.student_images).ids
        return AlignedText(ids, np.zeros(0, dtype=np.int64), np.zeros((0, 4), dtype=np.int64))


@dataclass(frozen=True)
class StoreAligner:
    """Turns ranges of documents of a tokenised corpus, whose text is not at hand, into aligned documents."""

    store: TokenStore
    pair: Pair

    def __call__(self, documents: range) -> AlignedBatch:
        return _batch([self._align(*self.store.document(index)) for index in documents], [])

    def _align(self, ids: np.ndarray, loss: np.ndarray) -> AlignedText:
        return align_ids(ids, self.pair, completion=int(loss.argmax()) if len(loss) else 0)


@dataclass(frozen=True)
class DocumentRanges:
    """The documents of a corpus in batches."""

    num_documents: int

    def __iter__(self) -> Iterator[range]:
        documents = range(self.num_documents)
        return (documents[first : first + DOCUMENTS_PER_BATCH] for first in documents[::DOCUMENTS_PER_BATCH])


def align_record(record: Record, pair: Pair) -> AlignedText:
    """Return both sides of a record. The EOS tokens that end texts and completions form a separate chunk.

    If the teacher has no EOS, the student's EOS is in no chunk.
    """
    student, teacher = pair.student, pair.teacher
    if record.kind == MESSAGES:
        messages = record.values[0]
        aligned = align_chat(student, teacher, messages, reasoning=pair.reasoning, mode=pair.alignment)
        return _with_images(aligned, record, pair)
    if record.kind == PROMPT_COMPLETION:
        aligned = align_completion(student, teacher, *record.values, mode=pair.alignment)
    else:
        aligned = _without_eos(align(student, teacher, record.values[0], mode=pair.alignment), pair)
    return _with_eos(aligned, pair) if pair.append_eod else aligned


def _with_images(aligned: AlignedText, record: Record, pair: Pair) -> AlignedText:
    """Expand the images on both sides, each for its model, and move the chunks of the text."""
    if pair.student_images is None or pair.teacher_images is None:
        if not record.images:
            return aligned
        raise DataError(
            "the conversation has images, and one of the models reads none",
            "teacher and student would answer different questions",
            "use two vision-language models, or remove the records with images",
            code="images-for-text-model",
        )
    messages, read = record.values[0], pair.student_images.read(record.images)
    ours = pair.student_images.place(messages, np.asarray(aligned.student_ids, np.int32), read)
    theirs = pair.teacher_images.place(messages, np.asarray(aligned.teacher_ids, np.int32), read)
    chunks = np.concatenate([ours.moved(aligned.chunks[:, :2]), theirs.moved(aligned.chunks[:, 2:])], axis=1)
    return AlignedConversation(ours.ids, theirs.ids, chunks, theirs.images)


def _without_eos(aligned: AlignedText, pair: Pair) -> AlignedText:
    """Remove the EOS that a tokenizer's configuration adds.

    `append_eod` alone decides whether one ends a document.
    """
    sides = []
    for ids, tokenizer in ((aligned.student_ids, pair.student), (aligned.teacher_ids, pair.teacher)):
        sides.append(ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_id else ids)
    whole = (aligned.chunks[:, 1] <= len(sides[0])) & (aligned.chunks[:, 3] <= len(sides[1]))
    return AlignedText(*sides, aligned.chunks[whole])


def _with_eos(aligned: AlignedText, pair: Pair) -> AlignedText:
    n, m = len(aligned.student_ids), len(aligned.teacher_ids)
    student_ids = np.append(aligned.student_ids, require_eos(pair.student))
    if pair.teacher.eos_id is None:
        return AlignedText(student_ids, aligned.teacher_ids, aligned.chunks)
    chunks = np.concatenate([aligned.chunks, [[n, n + 1, m, m + 1]]])
    return AlignedText(student_ids, np.append(aligned.teacher_ids, pair.teacher.eos_id), chunks)


def align_ids(ids: np.ndarray, pair: Pair, completion: int = 0) -> AlignedText:
    """Return a tokenised document and the teacher's tokens of its text.

    The text is cut at token `completion`, the border between prompt and completion. A token that is not text
    becomes the teacher's token of the same role, if it has one. Tokens with invalid UTF-8, and other tokens
    that are not text, are in no chunk; the teacher reads only the text around them.
    """
    roles, token_bytes = _shared_roles(pair), pair.student.token_bytes
    contents = [token_bytes[i] for i in ids.tolist()]
    teacher_parts, chunk_parts, num_teacher = [], [], 0
    for first, last in _runs(contents, completion):
        if contents[first] is None:
            teacher_ids, chunks = _align_roles(ids[first:last].tolist(), roles)
        else:
            teacher_ids, chunks = _align_run(contents[first:last], pair, starts_document=not num_teacher)
        teacher_parts.append(teacher_ids)
        chunk_parts.append(chunks + [first, first, num_teacher, num_teacher])
        num_teacher += len(teacher_ids)
    none = np.zeros(0, dtype=np.int64)
    return AlignedText(
        ids, np.concatenate([none, *teacher_parts]), np.concatenate([none.reshape(0, 4), *chunk_parts])
    )


def _shared_roles(pair: Pair) -> Mapping[int, int]:
    """Return student id -> teacher id of the tokens with the same role."""
    ours, theirs = pair.student.roles, pair.teacher.roles
    return {ours[role]: theirs[role] for role in reversed(SHARED_ROLES) if role in ours and role in theirs}


def _runs(contents: list[bytes | None], cut: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of the longest runs of tokens that all are text (valid UTF-8) or all are not.

    Tokens with invalid UTF-8 are skipped. No run crosses the start of the token `cut`.
    """
    borders = [
        i for i in range(1, len(contents)) if i == cut or (contents[i] is None) != (contents[i - 1] is None)
    ]
    for first, last in zip([0, *borders], [*borders, len(contents)], strict=True):
        if first < last and contents[first] is None:
            yield first, last
        else:
            yield from _valid_runs(contents[first:last], first)


def _valid_runs(contents: list[bytes], first: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a run between tokens with invalid UTF-8, each valid by itself."""
    while contents:
        try:
            b"".join(contents).decode("utf-8")
        except UnicodeDecodeError as error:
            ends = np.cumsum([len(content) for content in contents])
            begin, end = np.searchsorted(ends, [error.start, error.end - 1], side="right").tolist()
            yield from _valid_runs(contents[:begin], first)
            contents, first = contents[end + 1 :], first + end + 1
        else:
            yield first, first + len(contents)
            return


def _align_roles(ids: list[int], roles: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (teacher ids, chunks) of tokens that are not text."""
    places = np.array([place for place, token in enumerate(ids) if token in roles], dtype=np.int64)
    twins = np.array([roles[ids[place]] for place in places], dtype=np.int64)
    ranges = np.arange(len(twins))
    return twins, np.stack([places, places + 1, ranges, ranges + 1], axis=1)


def _align_run(contents: list[bytes], pair: Pair, starts_document: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (teacher ids, chunks) of a run of text; the teacher adds BOS only at a document's start."""
    text = b"".join(contents).decode("utf-8")
    ends = np.cumsum([len(content) for content in contents])
    student = EncodedText(np.zeros(len(ends), dtype=np.int64), np.append(0, ends[:-1]), ends)
    teacher = pair.teacher.encode_spans(text, continuation=not starts_document)
    while len(teacher) and teacher.ends[-1] < 0:  # an EOS that the tokenizer added: the text may continue
        teacher = EncodedText(teacher.ids[:-1], teacher.starts[:-1], teacher.ends[:-1])
    return teacher.ids, aligner(pair.alignment, text)(student, teacher)


def _batch(
    documents: Iterable[AlignedText], errors: list[MkdError], refused: Sequence[int] = ()
) -> AlignedBatch:
    """Concatenate documents on both sides."""
    documents = list(documents)
    sides = {}
    for side, column in (("student", 0), ("teacher", 2)):
        ids = [getattr(document, f"{side}_ids") for document in documents]
        marks = [
            chunk_marks(len(side_ids), document.chunks[:, column], document.chunks[:, column + 1])
            for side_ids, document in zip(ids, documents, strict=True)
        ]
        sides[f"{side}_ids"] = np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int32)
        sides[f"{side}_marks"] = np.concatenate([np.zeros(0, np.uint8), *marks])
        sides[f"{side}_lengths"] = np.array([len(side_ids) for side_ids in ids], dtype=np.int64)
    images, _ = image_records(getattr(document, "images", ()) for document in documents)
    refused_documents = np.array(refused, dtype=np.int64)
    return AlignedBatch(**sides, refused=refused_documents, errors=errors, images=images)
