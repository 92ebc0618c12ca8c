"""The student's experts in one step: counts for the balance losses, the losses' sums, and the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.models.language_model import LanguageModel
from mkd.models.moe.balance import BALANCE, RouterRecord, Z
from mkd.models.moe.router import DocumentRouter
from mkd.parallel.context import ParallelContext
from mkd.train.sums import LossSums


@dataclass(frozen=True)
class ExpertStep:
    """Losses and load of the routers in one step, over all processes."""

    losses: dict[str, float]  # name -> loss with its coefficient, summed over layers; only those in use
    load: dict[str, float]  # metric -> value
    counts: Tensor = field(compare=False)  # [layers of the model, E] fp64: real tokens of each expert

    def added_to(self, sums: LossSums) -> LossSums:
        """Return the sums of the step with these losses among the auxiliary ones."""
        count = sums.num_loss_tokens
        losses = {name: loss * count for name, loss in self.losses.items()}
        return replace(sums, auxiliary={**sums.auxiliary, **losses})


@dataclass(frozen=True)
class ExpertMonitor:
    """The records of the student's routers on this process."""

    records: tuple[RouterRecord, ...]  # of its model parts
    routers: tuple[DocumentRouter, ...]  # of all its model parts
    context: ParallelContext
    bias_update_rate: float = 0.0

    @classmethod
    def of(
        cls, students: Sequence[LanguageModel], context: ParallelContext, bias_update_rate: float
    ) -> ExpertMonitor | None:
        """Return the monitor of the student's parts; None for a dense student."""
        records = tuple(one.router_record for one in students if one.router_record is not None)
        routers = tuple(router for one in students for router in one.routers)
        return cls(records, routers, context, bias_update_rate) if records else None

    def start_step(self, microbatches: Sequence[PackedBatch]) -> None:
        """Count the real tokens of the global batch: one all-reduce SUM over data parallelism."""
        total = torch.zeros((), dtype=torch.int64, device=self.context.device)
        for batch in microbatches:
            total += batch.cu_seqlens[-1]
        dist.all_reduce(total, group=self.context.dp_group)
        for record in self.records:
            record.start_step(1.0 / total.clamp(min=1).float())

    def finish_step(self) -> ExpertStep:
        """Add up the records: one all-reduce SUM over all processes. Waits for the device."""
        total = sum(record.sums for record in self.records)
        assert isinstance(total, Tensor)
        dist.all_reduce(total)
        counts, (balance, z) = total[:, :-2], total[:, -2:].sum(0).tolist()
        routed = counts[counts.sum(1) > 0]  # layers with experts
        ratios = routed.max(1).values / routed.mean(1)
        record = self.records[0]
        losses = {BALANCE: balance} if record.balance_coeff else {}
        losses |= {Z: z} if record.z_coeff else {}
        if not ratios.numel():
            return ExpertStep(losses, {}, counts)
        mean, worst = torch.stack((ratios.mean(), ratios.max())).tolist()
        load = {"expert_load_max_over_mean": mean, "expert_load_worst_layer": worst}
        return ExpertStep(losses, load, counts)

    @torch.no_grad()
    def move_biases(self, step: ExpertStep) -> None:
        """Raise the bias of every expert with fewer tokens than the mean by the rate, and lower the others'.

        The counts are whole numbers, so every rank and every layout makes the same move. Call this only
        after an update. Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing", algorithm 1.
        """
        if not self.bias_update_rate:
            return
        for router in self.routers:
            counts = step.counts[router.layer_number - 1]
            missing = counts.sum() - counts.numel() * counts
            router.expert_bias += self.bias_update_rate * missing.sign()
