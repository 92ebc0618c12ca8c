"""Megatron's pipeline schedule, driving student and teachers: one call runs all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from mkd.data.batch import PackedBatch
from mkd.data.teacher_input import TokenRow
from mkd.models.packed import packed_documents
from mkd.models.stage import DistillationStage, StageInput, StageOutput
from mkd.parallel.context import ParallelContext


class LossCallback(Protocol):
    """Takes the results of the last stage; see `objective.Objective`."""

    context: ParallelContext
    num_sums: int  # length of the reports

    def __call__(
        self, stage: DistillationStage, batch: PackedBatch, output: StageOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss to differentiate, number of tokens to divide it by or 0, report fp64 [num_sums])."""


@dataclass(frozen=True)
class PipelineSchedule:
    """1F1B, interleaved 1F1B or plain accumulation, by layout; the same for training and evaluation."""

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
        """Run forward (and backward) of all `microbatches`.

        Gradients end up summed over data-parallel ranks. `stages` are the virtual stages of this rank,
        DDP-wrapped in training. Return the objective's reports added up over the whole global batch, fp64
        [objective.num_sums]. They are equal on all ranks: all-reduce SUM over data, context and pipeline
        parallel groups, not part of any backward.
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


def _forward_step(objective: LossCallback, microbatches: Iterator[PackedBatch], model: nn.Module):
    """Run one stage; return the tensor for the next stage and a function that makes the loss.

    Megatron calls the function on the last stage only. There it passes the stage's results to the objective,
    which must not keep them: the teachers' hidden states would live until the backward pass.
    """
    batch = next(microbatches)
    stage = get_attr_wrapped_model(model, "teachers", return_model_obj=True)
    output: StageOutput = model(*stage_inputs(batch, objective.context.platform.transformer_engine))
    if not stage.post_process:
        return output.message(), _no_loss
    return output.hidden, lambda _: objective(stage, batch, output)


def _no_loss(_: Tensor):
    raise AssertionError("only the last stage has a loss")


def stage_inputs(batch: PackedBatch, padding_joins_document: bool) -> tuple[StageInput, list[StageInput]]:
    """Return the inputs of the student and of each teacher that runs; see `packed_documents`."""
    extras = {name: one.values for name, one in batch.extras.items()}
    teachers = [row for part in batch.teacher_inputs for row in part.token_rows(batch)]
    return (
        _stage_input(batch, padding_joins_document, extras),
        [_stage_input(row, padding_joins_document, extras if row is batch else {}) for row in teachers],
    )


def _stage_input(row: TokenRow, padding_joins_document: bool, extras: Mapping[str, Tensor]) -> StageInput:
    packed = packed_documents(
        row.cu_seqlens, row.cu_seqlens_padded, row.max_seqlen, padding_joins_document=padding_joins_document
    )
    return StageInput(row.tokens, row.position_ids, packed, extras)
