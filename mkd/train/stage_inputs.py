"""Make the inputs of the student's and the teachers' stages from a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.data.stored.teacher_rows import StoredStates
from mkd.data.teacher_input import TokenRow
from mkd.models.packed import packed_documents
from mkd.models.stage import DistillationStage, StageInput


def student_input(batch: PackedBatch, padding_joins_document: bool) -> StageInput:
    """Return the input of the student; see `packed_documents`."""
    return _stage_input(batch, padding_joins_document)


def teacher_inputs(
    batch: PackedBatch,
    padding_joins_document: bool,
    numbers: Sequence[int] | None = None,  # of the teachers that run in these processes; None: all run
) -> list[StageInput]:
    """Return the input of each teacher that runs here, also of one that this batch does not need."""
    numbers = range(len(batch.teacher_inputs)) if numbers is None else numbers
    return [
        replace(_stage_input(row, padding_joins_document), is_needed=batch.needs_teacher(number))
        for number in numbers
        for row in batch.teacher_inputs[number].token_rows(batch)
    ]


def stage_inputs(
    batch: PackedBatch, padding_joins_document: bool, numbers: Sequence[int] | None = None
) -> tuple[StageInput, list[StageInput]]:
    """Return the input of the student and that of each teacher that runs here; see `teacher_inputs`."""
    return student_input(batch, padding_joins_document), teacher_inputs(
        batch, padding_joins_document, numbers
    )


def stored_hiddens(stage: DistillationStage, batch: PackedBatch, others: int = 0) -> tuple[Tensor, ...]:
    """Return the stored hidden states of teachers that do not run, each [t(/tp), 1, h], on the last stage.

    Positions without loss have zeros. With sequence parallelism it is this rank's part of the row. The first
    `others` of the stage's heads are of teachers that run on other processes.
    """
    config, length = stage.student.config, batch.tokens.shape[1]
    found = []
    first = len(stage.teachers) + others
    for part in batch.teacher_inputs[first:][: len(stage.heads) - others]:
        assert isinstance(part, StoredStates), "stored teachers follow those that run"
        states = part.whole(batch.loss_rows, length, config.params_dtype)
        if config.sequence_parallel:
            tp_group = stage.student.pg_collection.tp
            states = states.chunk(tp_group.size())[tp_group.rank()]
        found.append(states[:, None])
    return tuple(found)


def _stage_input(row: TokenRow, padding_joins_document: bool) -> StageInput:
    packed = packed_documents(
        row.cu_seqlens, row.cu_seqlens_padded, row.max_seqlen, padding_joins_document=padding_joins_document
    )
    return StageInput(row.tokens, row.position_ids, packed, row.images)
