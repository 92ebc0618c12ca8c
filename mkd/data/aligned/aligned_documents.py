"""Records and tokenised documents in the tokens of a student and of a teacher, with their common chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.data.aligned.aligned_ids import Pair, align_ids, align_sampled
from mkd.data.aligned.context_records import ContextTemplate, context_record, context_sides
from mkd.data.aligned.teacher_store import chunk_marks
from mkd.data.corpus.documents import encode_record, require_eos
from mkd.data.corpus.encoding import FileBatch, each_row
from mkd.data.corpus.store import TokenStore
from mkd.data.images.image_table import EncodedImage, image_records
from mkd.data.records.kinds import MESSAGES, PROMPT_COMPLETION, SEGMENTS, TOKENS, Record
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import Row
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.errors import DataError, MkdError
from mkd.tokenizers.tokenizer import without_eos
from mkd.xtoken.align.align_chat import align_chat, align_completion
from mkd.xtoken.align.align_text import AlignedText, align

DOCUMENTS_PER_BATCH = 64


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
    num_others: int = 0  # documents of tags that the teacher does not teach, empty on its side
    num_rows: int = 0
    megabytes_read: float = 0.0  # of the file, up to its end; 0 for a tokenised corpus


@dataclass(frozen=True)
class AlignedConversation(AlignedText):
    """Both sides of a conversation with images, expanded for each model."""

    images: tuple[EncodedImage, ...] = ()  # in the teacher's tokens


class OfAnotherTag(AlignedText):
    """A document of a tag that the teacher does not teach."""


@dataclass(frozen=True)
class RowAligner:
    """Turns rows of files into aligned documents, with the documents and student ids of `encode_record`."""

    pair: Pair
    wanted: WantedRecords = ANY_RECORDS  # a record without its numbers is bad, as in the student's corpus
    file_tag: str = ""  # of records without a tag of their own

    def __call__(self, batch: FileBatch | MkdError) -> AlignedBatch:
        if isinstance(batch, MkdError):
            return _batch([], [batch])
        documents, refused, errors = [], [], []
        for row in batch.rows:
            one = FileBatch(batch.path, [row])
            aligned, wrong = each_row(one, self._align)
            if wrong:  # refused by the student, whose corpus skips it too, or by the teacher alone
                aligned, _ = each_row(one, self._without_teacher)
                refused += [len(documents)] * len(aligned)
                errors += wrong * len(aligned)
            documents += [document for _, document in aligned]
        found = _batch(documents, errors, refused)
        return replace(found, num_rows=len(batch.rows), megabytes_read=batch.megabytes_read)

    def _align(self, row: Row) -> AlignedText:
        record, pair = parse_row(row, self.wanted), self.pair
        if pair.context is None:
            return align_record(record, pair)
        if not pair.context.teaches(record.tag or self.file_tag):
            return OfAnotherTag(*self._for_student(record))
        return align_context(record, pair, pair.context)

    def _without_teacher(self, row: Row) -> AlignedText:
        return AlignedText(*self._for_student(parse_row(row, self.wanted)))

    def _for_student(self, record: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a document of the student with nothing on the teacher's side."""
        pair = self.pair
        ids = encode_record(record, pair.student, pair.append_eod, pair.student_images).ids
        return ids, np.zeros(0, dtype=np.int64), np.zeros((0, 4), dtype=np.int64)


@dataclass(frozen=True)
class StoreAligner:
    """Turns ranges of documents of a tokenised corpus, whose text is not at hand, into aligned documents."""

    store: TokenStore
    pair: Pair

    def __call__(self, documents: range) -> AlignedBatch:
        found = (self.store.document(index) for index in documents)
        return _batch([_align_document(ids, loss, self.pair) for ids, loss in found], [])


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
        conversation = record.values[0]
        student.apply_chat_template(conversation)  # raises for all that its corpus refuses, marks included
        aligned = align_chat(student, teacher, conversation, reasoning=pair.reasoning, mode=pair.alignment)
        return _with_images(aligned, record, pair)
    if record.kind in (SEGMENTS, TOKENS):  # as a tokenised document
        document = encode_record(record, student, pair.append_eod)
        return _align_document(document.ids, document.loss, pair)
    if record.kind == PROMPT_COMPLETION:
        aligned = align_completion(student, teacher, *record.values, mode=pair.alignment)
    else:
        aligned = _without_eos(align(student, teacher, record.values[0], mode=pair.alignment), pair)
    return _with_eos(aligned, pair) if pair.append_eod else aligned


def align_context(record: Record, pair: Pair, template: ContextTemplate) -> AlignedText:
    """Return both sides of a record whose completion the teacher reads after another prompt.

    With another tokenizer the completion's bytes become the teacher's tokens, as those of a sampled one.
    """
    if pair.teacher.fingerprint == pair.student.fingerprint:
        return context_record(record, pair.student, pair.append_eod, template)
    one = context_sides(record, pair.student, pair.append_eod, template, pair.teacher)
    if one.before is None:
        return one.untaught
    ids, roles = one.ids[one.start : one.stop].astype(np.int64), pair.student.roles
    is_stopped = int(ids[-1]) in (roles.get("eos"), roles.get("end_of_turn"))
    found = align_sampled(ids, pair, is_stopped=is_stopped, is_chat=record.kind == MESSAGES)
    chunks = found.chunks[found.chunks[:, 0] >= template.skip_first]
    chunks = chunks + [one.start, one.start, len(one.before), len(one.before)]
    return AlignedText(one.ids, np.concatenate([one.before, found.teacher_ids]), chunks)


def _align_document(ids: np.ndarray, loss: np.ndarray, pair: Pair) -> AlignedText:
    return align_ids(ids, pair, completion=int(loss.argmax()) if len(loss) else 0)


def _with_images(aligned: AlignedText, record: Record, pair: Pair) -> AlignedText:
    """Expand the images on both sides, each for its model, and move the chunks of the text."""
    if pair.student_images is None or pair.teacher_images is None:
        if not record.images:
            return aligned
        raise DataError(
            "the conversation has images, and one of the models reads none",
            "teacher and student would answer different questions",
            "use two vision-language models, or remove the records with images",
            code="images-not-read",
        )
    messages, read = record.values[0].messages, pair.student_images.read(record.images)
    ours = pair.student_images.place(messages, np.asarray(aligned.student_ids, np.int32), read)
    theirs = pair.teacher_images.place(messages, np.asarray(aligned.teacher_ids, np.int32), read)
    chunks = np.concatenate([ours.moved(aligned.chunks[:, :2]), theirs.moved(aligned.chunks[:, 2:])], axis=1)
    return AlignedConversation(ours.ids, theirs.ids, chunks, theirs.images)


def _without_eos(aligned: AlignedText, pair: Pair) -> AlignedText:
    """Remove the EOS that a tokenizer's configuration adds.

    `append_eod` alone decides whether one ends a document.
    """
    student_ids = without_eos(aligned.student_ids, pair.student.eos_id)
    teacher_ids = without_eos(aligned.teacher_ids, pair.teacher.eos_id)
    whole = (aligned.chunks[:, 1] <= len(student_ids)) & (aligned.chunks[:, 3] <= len(teacher_ids))
    return AlignedText(student_ids, teacher_ids, aligned.chunks[whole])


def _with_eos(aligned: AlignedText, pair: Pair) -> AlignedText:
    n, m = len(aligned.student_ids), len(aligned.teacher_ids)
    student_ids = np.append(aligned.student_ids, require_eos(pair.student))
    if pair.teacher.eos_id is None:
        return AlignedText(student_ids, aligned.teacher_ids, aligned.chunks)
    chunks = np.concatenate([aligned.chunks, [[n, n + 1, m, m + 1]]])
    return AlignedText(student_ids, np.append(aligned.teacher_ids, pair.teacher.eos_id), chunks)


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
    others = sum(isinstance(document, OfAnotherTag) for document in documents)
    refused_documents = np.array(refused, dtype=np.int64)
    return AlignedBatch(**sides, refused=refused_documents, errors=errors, images=images, num_others=others)
