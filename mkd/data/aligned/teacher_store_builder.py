"""Build the corpus of a teacher that reads a row of its own from raw files or from a student's corpus."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from mkd.data.aligned.aligned_documents import AlignedBatch, DocumentRanges, RowAligner, StoreAligner
from mkd.data.aligned.aligned_ids import Pair
from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.aligned.teacher_store import (
    COVERED,
    OF_OTHER_TAGS,
    SILENT,
    STARTS,
    TeacherStore,
    TeacherStoreFiles,
)
from mkd.data.corpus.encoding import FileRows, in_workers
from mkd.data.corpus.known_files import KnownFiles
from mkd.data.corpus.store import FORGETFUL, FORMAT_VERSION, STUDENT, StoreFiles, TokenStore
from mkd.data.corpus.store_builder import RECORDS_VERSION, replaced_when_complete
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_table import with_sources_of
from mkd.data.progress_lines import ProgressLines, total_megabytes
from mkd.data.quarantine import BadRecord, Quarantine, require_few
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.errors import DataError, MkdError
from mkd.tokenizers.tokenizer import Tokenizer

ALIGNMENT_VERSION = 6  # raise it when the alignment of the same text changes
TOKENS_VERSION = 2  # raise it when the texts made from a tokenised corpus change


def cached_teacher_store(
    path: str,  # the user's path: records, or a tokenised corpus
    sources: Sequence[str],  # the files of records; none of a tokenised corpus
    student_prefix: str,  # the same corpus in the student's tokens
    text: TeacherText,
    *,
    tokenizer: Tokenizer,  # the student's
    images: ConversationImages | None = None,  # the student's
    append_eod: bool,
    cache_dir: str,
    workers: int,
    max_bad_records: int = 0,
    wanted: WantedRecords = ANY_RECORDS,
    file_tag: str = "",  # of records without a tag of their own
    known: KnownFiles = FORGETFUL,
    progress: Callable[[], None] = lambda: None,
) -> str:
    """Return the prefix of the corpus in the teacher's tokens.

    The corpus is aligned unless the cache has it for this content and these settings. Up to `max_bad_records`
    records that the teacher's tokenizer or template refuses are skipped, as in a student's corpus (see
    `refused_documents`). Raises DataError for more, and for ids that the teacher's model does not know. For
    `progress` see `build_store`.
    """
    student = TokenStore(student_prefix)
    aligning = text.alignment, text.reasoning, append_eod, images, text.images, text.context
    pair = Pair(tokenizer, text.tokenizer, *aligning)
    settings = [ALIGNMENT_VERSION, *_settings(pair), *wanted.settings]
    settings += [text.context.settings(file_tag)] if text.context else []
    if sources:
        source, align = FileRows(sources, wanted), RowAligner(pair, wanted, file_tag)
        key = known.content_hash([*settings, append_eod, None], sources, progress)  # None: see `cache_key`
    else:
        source, align = DocumentRanges(len(student)), StoreAligner(student, pair)
        files = StoreFiles(student_prefix)
        contents = [file for file in (files.bin, files.idx, files.loss_mask) if file.exists()]
        key = known.content_hash([*settings, TOKENS_VERSION], contents, progress)
    version = RECORDS_VERSION if sources else None  # as for a student's corpus, no part of the key
    name = _stem(student_prefix) if sources else Path(path).stem
    prefix = str(Path(cache_dir) / f"{name}-teacher-{key[:16]}")
    if not _is_complete(prefix, student, key, version, known, progress):
        with closing(in_workers(source, align, workers, progress)) as batches:
            megabytes = total_megabytes(sources)
            name = f"aligning {path} with the tokens of {text.name}"
            lines = (
                ProgressLines(name, megabytes, "MB", "records")
                if megabytes
                else ProgressLines(name, len(student), "documents")
            )
            _write(_followed(batches, lines), prefix, student, text, key, version, max_bad_records)
    store = TokenStore(prefix)
    require_few(StoreFiles(prefix).quarantine, max_bad_records)
    store.check_token_range(text.vocab_size, known, progress)
    return prefix


def _settings(pair: Pair) -> list[object]:
    """Return what decides the tokens and the chunks of a text, as JSON values."""
    readers = (reader.settings for reader in (pair.student_images, pair.teacher_images) if reader)
    prints = pair.student.chat_fingerprint, pair.teacher.chat_fingerprint
    return [*prints, pair.alignment, pair.reasoning, *readers]


def _stem(student_prefix: str) -> str:
    """Return the name of a student's corpus in the cache, without its key."""
    return Path(student_prefix).name.rpartition("-")[0]


def _followed(batches: Iterable[AlignedBatch], lines: ProgressLines) -> Iterator[AlignedBatch]:
    """Yield the batches, and log how much is done."""
    documents = 0
    for batch in batches:
        documents += len(batch.student_lengths)
        lines.at(batch.megabytes_read or documents, batch.num_rows)
        yield batch
    lines.end()


def refused_documents(prefix: str) -> list[int]:
    """Return the documents that a teacher's corpus skips."""
    return TokenStore(prefix).meta["refused"]


def _is_complete(
    prefix: str,
    student: TokenStore,
    key: str,
    version: int | None,
    known: KnownFiles,
    progress: Callable[[], None],
) -> bool:
    try:
        tokens = TeacherStore(prefix, student).tokens
        tokens.check_layout(known, progress)
        return tokens.meta.get("cache_key") == key and tokens.meta.get("records_version") == version
    except DataError:
        return False


def _write(
    batches: Iterable[AlignedBatch],
    prefix: str,
    student: TokenStore,
    text: TeacherText,
    key: str,
    version: int | None,
    max_bad_records: int,
) -> None:
    """Write the corpus, or raise DataError and leave no file."""
    with replaced_when_complete(TeacherStoreFiles(prefix)) as partial:
        written = _write_batches(batches, partial, student, text, max_bad_records)
        max_token_id, refused, num_images, covered, silent, others = written
        meta = {
            "format_version": FORMAT_VERSION,
            "cache_key": key,
            "records_version": version,
            "tokenizer_fingerprint": text.tokenizer.fingerprint,
            "vocabulary_fingerprint": text.tokenizer.vocabulary_fingerprint,
            STUDENT: student.prefix,
            "loss_mask": False,
            "max_token_id": max_token_id,
            "bad_records": len(refused),
            "refused": refused,
        }
        if text.context:
            meta |= {COVERED: covered, SILENT: silent - len(refused) - others, OF_OTHER_TAGS: others}
        if num_images:
            meta["teacher_images"] = num_images
        partial.meta.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _write_batches(
    batches: Iterable[AlignedBatch],
    files: TeacherStoreFiles,
    student: TokenStore,
    text: TeacherText,
    max_bad_records: int,
) -> tuple[int, list[int], int, int, int, int]:
    """Write tokens, marks and images.

    Return (largest token id, skipped documents, images, chunks, documents without the teacher's tokens, those
    of other tags among them).
    """
    builder = IndexedDatasetBuilder(str(files.bin), dtype=DType.optimal_dtype(text.tokenizer.vocab_size))
    document, max_token_id, refused, quarantine = 0, -1, [], Quarantine(files.quarantine, max_bad_records)
    num_images = covered = silent = others = 0
    with (
        builder.data_file,
        files.student_marks.open("wb") as student_marks,
        files.teacher_marks.open("wb") as teacher_marks,
    ):
        for batch in batches:
            quarantine.add([_named(error, text.name) for error in batch.errors])
            if quarantine.is_full:
                break
            if quarantine.is_over:
                continue  # the corpus is refused: only collect further errors
            _check_documents(batch, student, document)
            refused += (document + batch.refused).tolist()
            covered += int((batch.student_marks == STARTS).sum())
            silent += int((batch.teacher_lengths == 0).sum())
            others += batch.num_others
            num_images += _append_images(files, batch.images, document, student)
            document += len(batch.student_lengths)
            stops = np.cumsum(batch.teacher_lengths)
            for start, stop in zip(stops - batch.teacher_lengths, stops, strict=True):
                builder.add_document(batch.teacher_ids[start:stop], [int(stop - start)])
            student_marks.write(batch.student_marks.tobytes())
            teacher_marks.write(batch.teacher_marks.tobytes())
            max_token_id = max(max_token_id, int(batch.teacher_ids.max(initial=-1)))
    quarantine.close()
    if document != len(student):
        raise _other_documents(
            student, document, f"its source has {document} documents, the corpus {len(student)}"
        )
    builder.finalize(str(files.idx))
    return max_token_id, refused, num_images, covered, silent, others


def _append_images(files: TeacherStoreFiles, images: np.ndarray, document: int, student: TokenStore) -> int:
    """Write the records of a batch that starts at `document`, and return their number."""
    if len(images):
        assert student.images is not None, "the student read the same images"
        images["document"] += document
        last = int(images["document"][-1]) + 1
        records = with_sources_of(images, student.images.between(document, last))
        with files.teacher_images.open("ab") as file:
            file.write(records.tobytes())
    return len(images)


def _named(error: MkdError, teacher: str) -> MkdError:
    return error.for_teacher(teacher) if isinstance(error, BadRecord) else error


def _check_documents(batch: AlignedBatch, student: TokenStore, first: int) -> None:
    """Raise DataError unless the student's side of the batch equals its corpus from document `first` on."""
    stops = np.cumsum(batch.student_lengths)
    for document, (start, stop) in enumerate(zip(stops - batch.student_lengths, stops, strict=True), first):
        if document == len(student):
            raise _other_documents(
                student, document, f"the corpus has {len(student)} documents, its source has more"
            )
        if not np.array_equal(student.document(document)[0], batch.student_ids[start:stop]):
            raise _other_documents(
                student, document, "its tokens differ from those that alignment finds in the source"
            )


def _other_documents(student: TokenStore, document: int, why: str) -> DataError:
    return DataError(
        f"{student.prefix}: document {document} cannot be aligned",
        why,
        "remove the corpus: the next run tokenises the file again",
        code="cached-file-damaged",
    )
