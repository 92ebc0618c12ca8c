"""Megatron's pipeline schedule, driving student and teachers: one call runs all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from mkd.data.batch import PackedBatch
from mkd.models.stage import DistillationStage, StageOutput
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import PipelineCommunicator
from mkd.train.remote_states import RemoteStates
from mkd.train.stage_inputs import stage_inputs, stored_hiddens, student_input
from mkd.train.teacher_prefetch import TeacherPrefetch

MICROBATCHES_PER_STAGE = 16  # in one forward-only call: enough to make filling the pipeline cheap


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
    communicator: PipelineCommunicator
    tokens_per_microbatch: int
    prefetch: TeacherPrefetch | None = None  # runs the teachers in training; None: the stages do
    remote: tuple[RemoteStates, ...] = ()  # of teachers on processes of their own, in order

    @property
    def looks_ahead(self) -> bool:
        """True if a step needs the micro-batches of the next one."""
        return self.prefetch is not None or bool(self.remote)

    def run(
        self,
        stages: Sequence[nn.Module],
        microbatches: Sequence[PackedBatch],
        objective: LossCallback,
        forward_only: bool,
        following: Sequence[PackedBatch] = (),  # micro-batches of the next step; (): it is the last one
    ) -> Tensor:
        """Run forward (and backward) of all `microbatches`.

        A prefetch makes teacher forwards of `following`, and the next training step must be about these.
        Gradients end up summed over data-parallel ranks. `stages` are the virtual stages of this rank,
        DDP-wrapped in training. Return the objective's reports added up over the whole global batch, fp64
        [objective.num_sums]. They are equal on all ranks: all-reduce SUM over data, context and pipeline
        parallel groups, not part of any backward.
        """
        interleaved = len(stages) > 1
        iterators = [iter(microbatches) for _ in stages]
        virtual_stages = len(stages) if interleaved else None
        prefetch = None if forward_only else self.prefetch
        with ExitStack() as steps:
            for states in self.remote:
                steps.enter_context(states.step(microbatches, following, is_evaluation=forward_only))
            if prefetch is not None:
                steps.enter_context(prefetch.step(microbatches, following))
            reports = get_forward_backward_func(pp_size=self.context.pp_size, vp_size=virtual_stages)(
                forward_step_func=partial(_forward_step, objective, prefetch, self.remote),
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
            torch.distributed.all_reduce(total, group=self.context.copies_group)
            torch.distributed.all_reduce(total, group=self.context.pp_group)
        return total


def _forward_step(
    objective: LossCallback,
    prefetch: TeacherPrefetch | None,
    remote: Sequence[RemoteStates],
    microbatches: Iterator[PackedBatch],
    model: nn.Module,
):
    """Run one stage; return the tensor for the next stage and a function that makes the loss.

    Megatron calls the function on the last stage only. There it passes the stage's results to the objective,
    which must not keep them: the teachers' hidden states would live until the backward pass.
    """
    batch = next(microbatches)
    stage = get_attr_wrapped_model(model, "teachers", return_model_obj=True)
    joins = objective.context.platform.transformer_engine
    if prefetch is None:
        output: StageOutput = model(*stage_inputs(batch, joins, stage.running))
    else:
        if stage.pre_process:  # nothing is received before this forward
            prefetch.fill_gap()
        output = model(student_input(batch, joins), None)
        if stage.post_process:
            output = replace(output, teacher_hiddens=prefetch.take(batch.sample_ids))
    if stage.heads:
        taken = [states.take(batch) for states in remote]
        hiddens = (*output.teacher_hiddens, *taken, *stored_hiddens(stage, batch, len(taken)))
        output = replace(output, teacher_hiddens=stage.by_number(hiddens))
    if not stage.post_process:
        return output.message(), _no_loss
    return output.hidden, lambda _: objective(stage, batch, output)


def _no_loss(_: Tensor):
    raise AssertionError("only the last stage has a loss")
