"""A teacher whose weights are a moving average of the student's fp32 main weights.

    q <- (1 - rate) q + rate theta

The average is kept in fp32: with the distributed optimizer as shards, like the main weights, else whole on
every rank. The teacher's weights lie in flat memory with the layout of the student's buckets. A move is a
`lerp` of each shard, a cast, and one all-gather for each bucket. In fp32 a shard is a part of the teacher's
weights. Main weights are read, not the student's, which overlapped gathers would deliver later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from mkd.config.schema import TeacherConfig

PIECE = 2**24
"""Elements of a shard that are gathered at once for a checkpoint."""


@dataclass(frozen=True)
class AverageBucket:
    """The average of a student's bucket."""

    weights: Tensor  # [n] flat, in the model's dtype: the teacher's
    shard: Tensor  # [n/dp] fp32, this rank's part of the average
    places: Mapping[nn.Parameter, int]  # parameter of the student -> its first element in the bucket
    group: dist.ProcessGroup

    @classmethod
    def lay_out(
        cls,
        weights: Tensor,
        places: Mapping[nn.Parameter, int],
        twins: Mapping[nn.Parameter, nn.Parameter],  # parameter of the student -> the teacher's
        group: dist.ProcessGroup,
    ) -> AverageBucket:
        """Move the teacher's parameters to `weights`, and begin the average with their values."""
        for parameter, first in places.items():
            twin = twins[parameter]
            own = weights[first : first + twin.numel()].view(twin.shape)
            twin.data = own.copy_(twin)
        size = len(weights) // group.size()
        part = weights[group.rank() * size :][:size]
        return cls(weights, part if part.dtype == torch.float32 else part.float(), places, group)

    def gather(self) -> dist.Work | None:
        """Begin to gather the weights over data parallelism."""
        rounded = self.shard.to(self.weights.dtype)  # the shard itself in fp32
        return dist.all_gather_into_tensor(self.weights, rounded, group=self.group, async_op=True)

    def whole(self) -> dict[nn.Parameter, Tensor]:
        """Return the average of each parameter on the host, fp32 in its shape.

        Communication: all-gather over data parallelism, piece by piece. The device has room for no more.
        """
        size, parts = len(self.shard), torch.empty(self.group.size(), len(self.shard))
        for first in range(0, size, PIECE):
            own = self.shard[first : first + PIECE]
            gathered = own.new_empty(self.group.size() * len(own))
            dist.all_gather_into_tensor(gathered, own, group=self.group)
            parts[:, first : first + len(own)].copy_(gathered.view(self.group.size(), -1))
        values = parts.flatten()
        return {one: values[first:][: one.numel()].view(one.shape) for one, first in self.places.items()}

    def load(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Take the average of each parameter, and make the teacher's weights of it."""
        whole = torch.zeros(len(self.weights))
        for one, first in self.places.items():
            whole[first : first + one.numel()] = values[one].flatten()
        self.weights.copy_(whole)
        size = len(self.shard)
        self.shard.copy_(whole[self.group.rank() * size :][:size])


class MovingAverage:
    """The average of the student's weights in a teacher of the same layout, of this rank's stages."""

    def __init__(
        self,
        stages: Sequence[DistributedDataParallel],  # by virtual stage: each wraps a DistillationStage
        teacher: int,  # its number in the stages; its weights are the student's so far
        rate: float,
        every: int = 1,  # updates of the student for one move
        name: str = "",  # of the teacher: a checkpoint knows the average by it
    ):
        self.rate, self.every, self.teacher = rate, every, name
        self.updates = 0  # of the student so far, skipped ones left out
        self._names: list[dict[str, nn.Parameter]] = []  # of each stage, what the student learns
        self._buckets: list[AverageBucket] = []
        self._whole: dict[nn.Parameter, Tensor] = {}  # fp32, without the distributed optimizer
        self._twins: dict[nn.Parameter, nn.Parameter] = {}
        for wrapped in stages:
            stage = wrapped.module
            known = dict(stage.teachers[teacher].named_parameters())
            learned = {name: one for name, one in stage.student.named_parameters() if one.requires_grad}
            self._names.append(learned)
            self._twins |= {one: known[name] for name, one in learned.items()}
            if wrapped.ddp_config.use_distributed_optimizer:
                self._buckets += self._lay_out(wrapped)
            else:
                self._whole |= {one: _fp32(known[name]) for name, one in learned.items()}

    def _lay_out(self, wrapped: DistributedDataParallel) -> Iterator[AverageBucket]:
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            for bucket in buffer.buckets:
                firsts = {one: buffer.param_index_map[one][0] - bucket.offset for one in bucket.params_list}
                weights = torch.zeros_like(bucket.param_data)
                yield AverageBucket.lay_out(weights, firsts, self._twins, buffer.data_parallel_group)

    @torch.no_grad()
    def follow(self, optimizer: MegatronOptimizer) -> None:
        """Move the average after an update, while the main weights are on the device. Collective."""
        self.updates += 1
        if self.updates % self.every:
            return
        shards = {one: (bucket.shard, bucket) for bucket in self._buckets for one in bucket.places}
        averages, targets = [], []
        for parameter, first, main in main_weights(optimizer):
            own = self._whole[parameter] if first is None else shards[parameter][0][first:][: main.numel()]
            averages.append(own.view(-1))
            targets.append(main.detach().view(-1))
        if averages:
            torch._foreach_lerp_(averages, targets, self.rate)
        waiting = [bucket.gather() for bucket in self._buckets]
        for work in waiting:
            if work is not None:
                work.wait()
        self._copy_whole()

    def _copy_whole(self) -> None:
        for parameter, average in self._whole.items():
            if average.data_ptr() != self._twins[parameter].data_ptr():  # in fp32 they are one
                self._twins[parameter].copy_(average)

    @torch.no_grad()
    def whole(self) -> list[dict[str, Tensor]]:
        """Return the average of each stage, fp32 by the names of the student's parameters. Collective."""
        values = dict(self._whole)
        for bucket in self._buckets:
            values |= bucket.whole()
        return [{name: values[one] for name, one in names.items()} for names in self._names]

    @property
    def names(self) -> list[frozenset[str]]:
        """Names of the averaged parameters of each stage."""
        return [frozenset(names) for names in self._names]

    @torch.no_grad()
    def load(self, stages: Sequence[Mapping[str, Tensor]], updates: int) -> None:
        """Take what `whole` returned after so many updates, with the shapes of this layout."""
        self.updates = updates
        pairs = zip(self._names, stages, strict=True)
        values = {one: given[name] for names, given in pairs for name, one in names.items()}
        for bucket in self._buckets:
            bucket.load(values)
        for parameter, average in self._whole.items():
            average.copy_(values[parameter])
        self._copy_whole()


def build_averages(
    stages: Sequence[DistributedDataParallel],
    teachers: Mapping[str, TeacherConfig],  # those that run, in their order, by their names in the run
) -> tuple[MovingAverage, ...]:
    """Return the averages of the student's weights in teachers, which have the student's weights so far."""
    named = enumerate(teachers.items())
    return tuple(
        MovingAverage(stages, index, one.ema.rate, one.ema.every, name)
        for index, (name, one) in named
        if one.ema is not None
    )


def _fp32(twin: nn.Parameter) -> Tensor:
    """Return an average that begins with a teacher's parameter: in fp32 it is the parameter itself."""
    return twin.detach() if twin.dtype == torch.float32 else twin.detach().float()


def main_weights(optimizer: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, int | None, Tensor]]:
    """Yield each parameter of the student of which this rank has main weights, and these.

    Between them is the place of their first one in this rank's part of the bucket; None: they are whole.
    """
    for inner in optimizer.chained_optimizers:
        if inner.is_stub_optimizer:
            continue
        if isinstance(inner, DistributedOptimizer):
            groups = [*zip(inner.model_float16_groups, inner.shard_fp32_from_float16_groups, strict=True)]
            groups += zip(inner.model_fp32_groups, inner.shard_fp32_groups, strict=True)
            for parameters, mains in groups:
                for parameter, main in zip(parameters, mains, strict=True):
                    yield parameter, inner._get_model_param_range_map(parameter)["gbuf_local"].start, main
            continue
        copied = getattr(inner, "float16_groups", []), getattr(inner, "fp32_from_float16_groups", [])
        for parameters, mains in zip(*copied, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                yield parameter, None, main
        own = getattr(inner, "fp32_from_fp32_groups", None)
        for group in inner.optimizer.param_groups if own is None else ({"params": one} for one in own):
            for parameter in group["params"]:
                yield parameter, None, parameter
