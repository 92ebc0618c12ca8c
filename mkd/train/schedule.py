"""Megatron's pipeline schedule, driving student and teachers: one call runs all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from mkd.data.aligned.teacher_batch import TeacherBatch
from mkd.data.batch import PackedBatch
from mkd.models.packed import packed_documents
from mkd.models.stage import DistillationStage, StageInput
from mkd.parallel.context import ParallelContext


class LossCallback(Protocol):
    """What the last stage does with its final hidden states; see `objective.Objective`."""

    context: ParallelContext
    num_sums: int  # length of the reports

    def __call__(
        self, stage: DistillationStage, batch: PackedBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss to differentiate, number of tokens to divide it by or 0, report fp64 [num_sums])."""


@dataclass(frozen=True)
class PipelineSchedule:
    """1F1B, interleaved 1F1B or plain accumulation, as the layout says; the same for training and evaluation."""

    context: ParallelContext
    communicator: P2PCommunicator
    tokens_per_microbatch: int

    def run(
        self,
        stages: Sequence[nn.Module],
        microbatches: Sequence[PackedBatch],
        objective: LossCallback,
        forward_only: bool,
    ) -> Tensor:
        """Forward (and backward) of all `microbatches`; gradients are left summed over data-parallel ranks.

        `stages` are this rank's chunks, DDP-wrapped in training. Returns the objective's reports added up over the whole
        global batch, fp64 [objective.num_sums], equal on all ranks (all-reduce SUM over data, context and pipeline parallel
        groups; not part of any backward).
        """
        interleaved = len(stages) > 1
        iterators = [iter(microbatches) for _ in stages]
        virtual_stages = len(stages) if interleaved else None
        reports = get_forward_backward_func(pp_size=self.context.pp_size, vp_size=virtual_stages)(
            forward_step_func=partial(_forward_step, objective),
            data_iterator=iterators if interleaved else iterators[0],
            model=list(stages) if interleaved else stages[0],
            num_microbatches=len(microbatches),
            seq_length=self.tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=self.communicator if self.context.pp_size > 1 else None,
            pg_collection=self.context.groups if self.context.pp_size > 1 else None,
        )
        total = torch.zeros(objective.num_sums, dtype=torch.float64, device=self.context.device)
        for report in reports:
            total += report
        if objective.num_sums:
            torch.distributed.all_reduce(total, group=self.context.dp_cp_group)
            torch.distributed.all_reduce(total, group=self.context.pp_group)
        return total


def _forward_step(objective: LossCallback, microbatches, model: nn.Module):
    """Megatron's forward callback: the stage's output, and what turns the last stage's output into a loss."""
    batch: PackedBatch = next(microbatches)
    uses_te = objective.context.platform.transformer_engine
    stage = get_attr_wrapped_model(model, "teachers", return_model_obj=True)
    teachers = batch.teachers or (None,) * len(stage.teachers)
    output = model(_stage_input(batch, uses_te), [own and _stage_input(own, uses_te) for own in teachers])
    return output, partial(objective, stage, batch)


def _stage_input(row: PackedBatch | TeacherBatch, uses_te: bool) -> StageInput:
    packed = packed_documents(
        row.cu_seqlens, row.cu_seqlens_padded, row.max_seqlen, padding_joins_document=uses_te
    )
    return StageInput(row.tokens, row.position_ids, packed)
