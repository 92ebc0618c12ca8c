"""Score requests under every layout: one model on its pipeline schedule, forward only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.images.row_images import RowImages
from mkd.data.loader import BatchLayout, read_ahead
from mkd.errors import NonFiniteError
from mkd.evaluation.requests import Request, RequestBatch, RequestPacks, collate_requests
from mkd.losses.scores import token_scores
from mkd.models.builder import join_stages
from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage, StageOutput
from mkd.operations.stopping import Interruptible, Stopper
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import PipelineCommunicator
from mkd.parallel.zigzag import RowShard
from mkd.train.schedule import MICROBATCHES_PER_STAGE, PipelineSchedule


@dataclass(frozen=True)
class RequestBatches:
    """The micro-batches of this rank that score all requests, one list for each call of the schedule."""

    requests: Sequence[Request]
    packs: RequestPacks
    context: ParallelContext
    micro_batch_size: int  # packs
    seq_length: int  # tokens of a pack
    row_images: RowImages | None = None  # None: the models read none
    num_workers: int = 0  # processes that decode images

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        context: ParallelContext,
        micro_batch_size: int,
        seq_length: int,
        pad_id: int,
        row_images: RowImages | None = None,
        num_workers: int = 0,
    ) -> RequestBatches:
        packs = RequestPacks(requests, seq_length, context.document_multiple, pad_id)
        return cls(requests, packs, context, micro_batch_size, seq_length, row_images, num_workers)

    def __iter__(self) -> Iterator[list[RequestBatch]]:
        """Yield lists of micro-batches, of the same length on every rank. Padding fills the last one."""
        calls, context = list(self._calls()), self.context
        make = _RequestMicroBatches(self.packs, context.row_shard, self.row_images)
        batches = read_ahead(
            make,
            [samples for call in calls for samples in call],
            num_workers=self.num_workers if self.row_images is not None else 0,  # text takes no time
            pin_memory=context.device.type == "cuda",
            ahead=MICROBATCHES_PER_STAGE,
        )
        for call in calls:
            yield [batch.to(context.device) for batch in islice(batches, len(call))]

    def _calls(self) -> Iterator[list[list[int]]]:
        """Yield the packs of each of this rank's micro-batches, one list for each call."""
        context = self.context
        packs_at_once = self.micro_batch_size * context.dp_size
        unit = context.microbatch_unit
        left = -(-len(self.packs) // (packs_at_once * unit)) * unit
        first = 0
        while left:
            count = min(left, MICROBATCHES_PER_STAGE * context.pp_size)
            samples = np.arange(first, first + count * packs_at_once)
            layout = BatchLayout(self.micro_batch_size, len(samples), context.dp_rank, context.dp_size)
            yield layout.microbatches(samples).tolist()
            first, left = first + len(samples), left - count


@dataclass(frozen=True)
class _RequestMicroBatches:
    """Makes one rank's part of the micro-batch of a list of packs. Picklable, for workers."""

    packs: RequestPacks
    shard: RowShard
    row_images: RowImages | None

    def __call__(self, samples: list[int]) -> RequestBatch:
        packs = [self.packs[sample] for sample in samples]
        whole = collate_requests(packs)
        part = whole.shard(self.shard)
        if self.row_images is None:
            return part
        images = self.row_images([one.pack for one in packs], whole, shard=self.shard)
        return replace(part, images=images)


@torch.no_grad()
def log_likelihoods(
    models: Sequence[LanguageModel], batches: RequestBatches, stopper: Stopper | None = None
) -> np.ndarray | None:
    """Return the sum of ln p over each request's continuation, fp64 [requests].

    The result is equal on all ranks and for every layout. `models` are the parts of one model on this rank;
    no other model runs. Collective: one all-reduce SUM of the result over data and context parallelism, one
    over the pipeline. Return None if all ranks agree to stop before a call of the schedule. Raises
    NonFiniteError on every rank for predictions that are not finite.
    """
    context = batches.context
    communicator = PipelineCommunicator(context.pp_group, models[0].config)
    schedule = PipelineSchedule(context, communicator, batches.micro_batch_size * batches.seq_length)
    were_training = [model.training for model in models]
    stages = [stage.eval() for stage in join_stages(models)]
    scorer = _Scorer(context, torch.zeros(len(batches.requests), dtype=torch.float64, device=context.device))
    calls = Interruptible(batches, stopper)
    for microbatches in calls:
        schedule.run(stages, microbatches, scorer, forward_only=True)
    for model, was_training in zip(models, were_training, strict=True):
        model.train(was_training)
    if calls.stop:
        return None
    dist.all_reduce(scorer.scores, group=context.copies_group)
    dist.all_reduce(scorer.scores, group=context.pp_group)
    scores = scorer.scores.cpu().numpy()
    not_finite = np.count_nonzero(~np.isfinite(scores))
    if not_finite:
        what = f"the predictions of {not_finite} of {len(scores)} evaluated continuations are not finite"
        do = "check the model's weights, for example with `mkd parity`"
        raise NonFiniteError(what, "no metric can be made of them", do, code="model-not-finite")
    return scores


@dataclass(frozen=True)
class _Scorer:
    """Replaces the objective: adds up the log-probabilities of the last stage's micro-batches."""

    context: ParallelContext
    scores: Tensor  # [requests] fp64, this rank's sums
    num_sums: int = 0  # the schedule has nothing to add up

    def __call__(
        self, stage: DistillationStage, batch: RequestBatch, output: StageOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score one micro-batch; see `LossCallback`. Nothing is differentiated or reported."""
        model, hidden = stage.student, output.hidden
        scores = token_scores(
            hidden.squeeze(1),
            model.head_weight(),
            batch.score_rows,
            batch.score_labels,
            tp_group=self.context.tp_group,
            logits_cap=model.shape.logits_cap,
            vocab_size=model.shape.vocab_size,
            sequence_parallel=model.config.sequence_parallel,
        )
        self.scores.index_add_(0, batch.score_requests, scores.label.double())
        nothing = hidden.new_zeros(0, dtype=torch.float64)
        return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), nothing
