"""`ParallelContext`: this process's place in the grid. Only this file asks Megatron's `parallel_state`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from mkd.errors import MkdError
from mkd.parallel.axes import Axis, NoOthers, axes_of, build_expert_groups, peer_ranks
from mkd.parallel.start_store import needs_own_keys, start_store
from mkd.parallel.zigzag import RowShard
from mkd.plan.parallel_sizes import ONE_PROCESS, Sizes
from mkd.platform import Platform

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelContext:
    """Axes and groups of one process in the TP x CP x DP x PP grid. Passed down, never looked up."""

    platform: Platform
    rank: int
    world_size: int
    axes: Mapping[str, Axis]  # by the names of `AXES`
    virtual_stages: int  # model parts of each pipeline rank; 1 without interleaving
    groups: ProcessGroupCollection | None  # taken by Megatron's modules; None: communicates with no other
    timeout: timedelta = timedelta(minutes=10)  # of communication in the groups
    divides_documents: int = 1  # number that other processes need document_multiple to be a multiple of
    # Called before groups are torn down: NCCL waits for CUDA graphs that hold its work.
    before_close: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)
    # Groups besides the axes, by purpose and sizes.
    _more_groups: dict[tuple[str | int, ...], dist.ProcessGroup] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def device(self) -> torch.device:
        """Compute device of this process."""
        return self.platform.device

    @property
    def tp(self) -> Axis:
        """Tensor-parallel axis: its processes divide every matrix."""
        return self.axes["tp"]

    @property
    def cp(self) -> Axis:
        """Context-parallel axis: its processes divide every sequence."""
        return self.axes["cp"]

    @property
    def dp(self) -> Axis:
        """Data-parallel axis: its processes divide the batch."""
        return self.axes["dp"]

    @property
    def pp(self) -> Axis:
        """Pipeline-parallel axis: its processes divide the layers."""
        return self.axes["pp"]

    @property
    def ep(self) -> Axis:
        """Expert-parallel axis: its processes divide the experts of every layer."""
        return self.axes["ep"]

    @property
    def edp(self) -> Axis:
        """Axis of the copies of the experts: its processes hold the same experts."""
        return self.axes["edp"]

    @property
    def sizes(self) -> Sizes:
        """Processes along each axis."""
        return Sizes(self.tp.size, self.cp.size, self.pp.size, self.ep.size, self.dp.size)

    tp_rank = property(lambda self: self.tp.rank)
    tp_size = property(lambda self: self.tp.size)
    tp_group = property(lambda self: self.tp.group)
    cp_rank = property(lambda self: self.cp.rank)
    cp_size = property(lambda self: self.cp.size)
    cp_group = property(lambda self: self.cp.group)
    dp_rank = property(lambda self: self.dp.rank)
    dp_size = property(lambda self: self.dp.size)
    dp_group = property(lambda self: self.dp.group)
    pp_rank = property(lambda self: self.pp.rank)
    pp_size = property(lambda self: self.pp.size)
    pp_group = property(lambda self: self.pp.group)

    @property
    def copies_group(self) -> dist.ProcessGroup:
        """The ranks of this stage that hold the same weights, experts aside: `sizes.copies` of them."""
        assert self.groups is not None, "several processes have groups"
        return self.groups.dp_cp

    def is_first_stage(self, virtual_stage: int) -> bool:
        """Return True if (this pipeline rank, `virtual_stage`) embeds the tokens."""
        return self.pp.rank == 0 and virtual_stage == 0

    def is_last_stage(self, virtual_stage: int) -> bool:
        """Return True if (this pipeline rank, `virtual_stage`) computes the loss."""
        return self.holds_last_stage and virtual_stage == self.virtual_stages - 1

    @property
    def microbatch_unit(self) -> int:
        """Number that the micro-batches of a call of the schedule are a multiple of.

        Interleaving needs whole groups of micro-batches.
        """
        return self.pp.size if self.virtual_stages > 1 else 1

    @property
    def holds_last_stage(self) -> bool:
        """True if this process computes the loss."""
        return self.pp.rank == self.pp.size - 1

    @property
    def is_first_replica(self) -> bool:
        """True if this process has the first of several equal copies of its weights."""
        return self.dp.rank == 0 and self.cp.rank == 0

    def experts(self, num_experts: int) -> range:
        """Return the experts of a layer that this process holds."""
        held = num_experts // self.ep.size
        return range(self.ep.rank * held, (self.ep.rank + 1) * held)

    def first_expert_holder(self, pp_rank: int, ep_rank: int) -> int:
        """Return the global rank with the first copy of a pipeline stage's experts of one `ep_rank`."""
        return pp_rank * self.sizes.stage + ep_rank

    @property
    def row_shard(self) -> RowShard:
        """The part of every row that this process holds."""
        return RowShard(self.cp.rank, self.cp.size)

    @property
    def row_rank(self) -> int:
        """Number of this process among the `sizes.row` that share a row."""
        return self.cp.rank * self.tp.size + self.tp.rank

    @property
    def row_group(self) -> dist.ProcessGroup | None:
        """The ranks that share every row; None if rows are whole."""
        return self.cp.group if self.cp.size > 1 else None

    @property
    def document_multiple(self) -> int:
        """Number of tokens that the length of padded documents and packs must be a multiple of."""
        return math.lcm(self.sizes.document_multiple, self.divides_documents)

    def sequence_shards(self, sequence_parallel: bool) -> int:
        """Return how many processes share the activations of a sequence between layers."""
        return self.cp.size * (self.tp.size if sequence_parallel else 1)

    @classmethod
    def create(
        cls,
        platform: Platform,
        sizes: Sizes = ONE_PROCESS,  # `data` follows from the world
        *,
        virtual_stages: int = 1,
        seed: int = 1234,
        timeout_minutes: float = 10,
        divides_documents: int = 1,
    ) -> ParallelContext:
        """Join the process group unless the caller already has, build Megatron's groups and seed generators.

        World size and rank come from torchrun's environment. Without it this is a single process.
        """
        timeout = timedelta(minutes=timeout_minutes)
        if not dist.is_initialized():
            join_process_group(platform, timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=max(1, round(timeout_minutes)),
            create_gloo_process_groups=platform.is_cuda,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        context = cls(
            platform,
            dist.get_rank(),
            dist.get_world_size(),
            axes_of(groups),
            virtual_stages,
            groups,
            timeout=timeout,
            divides_documents=divides_documents,
        )
        context.seed(seed)
        return context

    def with_expert_parallel(self, expert_parallel: int, timeout_minutes: float = 10) -> ParallelContext:
        """Return this context with the experts of a frozen teacher spread otherwise. Collective.

        All other groups are shared.
        """
        if expert_parallel == self.ep.size:
            return self
        groups = build_expert_groups(self.groups, expert_parallel, timedelta(minutes=timeout_minutes))
        return replace(self, axes=axes_of(groups), groups=groups)

    def with_whole_rows(self) -> ParallelContext:
        """Return this context for rows that no process shares: context-parallel ranks are replicas.

        They hold the same weights, as those of data parallelism do.
        """
        if self.cp.size == 1:
            return self
        assert self.groups is not None, "several processes have groups"
        copies = self.groups.dp_cp
        axes = {"cp": Axis(0, 1, None), "dp": Axis(copies.rank(), copies.size(), copies)}
        groups = ProcessGroupCollection(**vars(self.groups) | {"cp": NoOthers(), "dp": copies})
        return replace(self, axes={**self.axes, **axes}, groups=groups)

    def peer_group(self, size: int, has_experts: bool = False) -> dist.ProcessGroup:
        """Return the group of the `size` nearest processes that hold the same weights, this one included.

        The weights are those of a model of this context. The group is separate from all others, and the same
        at every call with the same ranks. The first call is collective.
        """
        shards = (self.sizes if has_experts else replace(self.sizes, expert=1)).weight_shards
        key = "teacher_peers", shards, size
        return self._group(key, peer_ranks(self.world_size, shards, size))

    def pipeline_group(self, number: int) -> dist.ProcessGroup:
        """Return another group over the processes of this pipeline, for messages beside the student's.

        It is the same at every call with the same `number`. The first call is collective.
        """
        of_stage = self.sizes.stage
        pipelines = [list(range(first, self.world_size, of_stage)) for first in range(of_stage)]
        return self._group(("teacher_pipeline", number), pipelines)

    def _group(self, key: tuple[str | int, ...], ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return this process's group among `ranks`. The first call with a key is collective."""
        if key not in self._more_groups:
            self._more_groups[key], _ = dist.new_subgroups_by_enumeration(
                ranks, timeout=self.timeout, group_desc=str(key[0])
            )
        return self._more_groups[key]

    def seed(self, seed: int) -> None:
        """Seed torch's and Megatron's generators: differently on each pipeline rank, alike on all others."""
        torch.manual_seed(seed + 100 * self.pp.rank)
        tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * self.pp.rank)

    def close(self) -> None:
        """Tear down the groups, so that this process can create another layout."""
        while self.before_close:
            self.before_close.pop()()
        while self._more_groups:
            dist.destroy_process_group(self._more_groups.popitem()[1])
        for group in filter(None, parallel_state._global_process_group_list or ()):
            dist.destroy_process_group(group)
        # Megatron forgets its groups, whose communicators would keep memory of the GPU.
        parallel_state.destroy_model_parallel()

    def leave(self) -> None:
        """Tear down the groups and leave the process group, at the end of the job."""
        self.close()
        dist.destroy_process_group()

    def broadcast_object(self, value: T) -> T:
        """Return the picklable `value` of global rank 0 on every rank. Collective."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def rank_0_first(self, prepare: Callable[[], T]) -> T:
        """Return `prepare()`, called on rank 0 first, so that the others find its files. Collective.

        All ranks raise an MkdError of rank 0, so none of them waits forever.
        """
        result = error = None
        if self.rank == 0:
            try:
                result = prepare()
            except MkdError as caught:
                error = caught
        error = self.broadcast_object(error)
        if error is not None:
            error.on_all_ranks = True
            raise error
        return result if self.rank == 0 else prepare()


def join_process_group(platform: Platform, timeout: timedelta) -> None:
    """Initialise torch.distributed from torchrun's environment, or as a world of one process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # With a device, all groups get their communicators at once. A process that is alone needs few.
        is_alone = os.environ["WORLD_SIZE"] == "1"
        device_id = platform.device if platform.is_cuda and not is_alone else None
        options: dict[str, Any] = {}
        if needs_own_keys():
            options |= {"store": start_store(timeout)}
            options |= {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group(platform.backend, timeout=timeout, device_id=device_id, **options)
    else:
        dist.init_process_group(
            platform.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
