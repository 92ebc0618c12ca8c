"""Make the inputs of the student's and the teachers' stages from a micro-batch."""

from __future__ import annotations

from dataclasses import replace

from mkd.data.batch import PackedBatch
from mkd.data.teacher_input import TokenRow
from mkd.models.packed import packed_documents
from mkd.models.stage import StageInput


def student_input(batch: PackedBatch, padding_joins_document: bool) -> StageInput:
    """Return the input of the student; see `packed_documents`."""
    return _stage_input(batch, padding_joins_document)


def teacher_inputs(batch: PackedBatch, padding_joins_document: bool) -> list[StageInput]:
    """Return the input of each teacher that runs in this run, also of one that this batch does not need."""
    rows = [row for part in batch.teacher_inputs for row in part.token_rows(batch)]
    needed = batch.needed_teachers or [True] * len(rows)
    inputs = [_stage_input(row, padding_joins_document) for row in rows]
    return [replace(one, is_needed=is_one) for one, is_one in zip(inputs, needed, strict=True)]


def stage_inputs(batch: PackedBatch, padding_joins_document: bool) -> tuple[StageInput, list[StageInput]]:
    """Return the input of the student and that of each teacher that runs."""
    return student_input(batch, padding_joins_document), teacher_inputs(batch, padding_joins_document)


def _stage_input(row: TokenRow, padding_joins_document: bool) -> StageInput:
    packed = packed_documents(
        row.cu_seqlens, row.cu_seqlens_padded, row.max_seqlen, padding_joins_document=padding_joins_document
    )
    return StageInput(row.tokens, row.position_ids, packed, row.images)
