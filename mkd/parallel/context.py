"""`ParallelContext`: who this rank is. The only file that asks Megatron's `parallel_state`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from mkd.errors import MkdError
from mkd.platform import Platform

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelContext:
    """Ranks, sizes and groups of one process in the TP x CP x DP x PP grid. Passed down, never looked up."""

    platform: Platform
    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    virtual_stages: int  # model chunks of each pipeline rank; 1 without interleaving
    groups: ProcessGroupCollection

    @property
    def device(self) -> torch.device:
        return self.platform.device

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.groups.tp

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.groups.pp

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.groups.dp

    @property
    def dp_cp_group(self) -> dist.ProcessGroup:
        return self.groups.dp_cp

    def is_first_stage(self, virtual_stage: int) -> bool:
        """Whether (this pipeline rank, `virtual_stage`) embeds the tokens."""
        return self.pp_rank == 0 and virtual_stage == 0

    def is_last_stage(self, virtual_stage: int) -> bool:
        """Whether (this pipeline rank, `virtual_stage`) computes the loss."""
        return self.pp_rank == self.pp_size - 1 and virtual_stage == self.virtual_stages - 1

    @property
    def holds_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @classmethod
    def create(
        cls,
        platform: Platform,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        virtual_stages: int = 1,
        context_parallel: int = 1,
        seed: int = 1234,
        timeout_minutes: float = 10,
    ) -> ParallelContext:
        """Join the process group (unless the caller already has), build Megatron's groups and seed the generators.

        World size and rank come from torchrun's environment; without it this is a single process.
        """
        timeout = timedelta(minutes=timeout_minutes)
        if not dist.is_initialized():
            join_process_group(platform, timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel,
            pipeline_model_parallel_size=pipeline_parallel,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            context_parallel_size=context_parallel,
            distributed_timeout_minutes=max(1, round(timeout_minutes)),
            create_gloo_process_groups=platform.is_cuda,
        )
        context = cls(
            platform=platform,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            virtual_stages=virtual_stages,
            groups=ProcessGroupCollection.use_mpu_process_groups(),
        )
        context.seed(seed)
        return context

    def seed(self, seed: int) -> None:
        """Seed torch's and Megatron's generators: alike on data-parallel ranks, different on pipeline ranks."""
        torch.manual_seed(seed + 100 * self.pp_rank)
        tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * self.pp_rank, force_reset_rng=True)

    def close(self) -> None:
        """Tear Megatron's groups down, so that another layout can be created in this process."""
        parallel_state.destroy_model_parallel()

    def leave(self) -> None:
        """End of the process's part in the job: groups are torn down and the process group is left."""
        self.close()
        dist.destroy_process_group()

    def broadcast_object(self, value: object) -> object:
        """The picklable `value` of global rank 0, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def rank_0_first(self, prepare: Callable[[], T]) -> T:
        """`prepare()` on rank 0, and once that is done on the others, which may find its files.

        An MkdError of rank 0 is raised by all: nobody waits for ever.
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
        device_id = platform.device if platform.is_cuda else None
        dist.init_process_group(platform.backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(
            platform.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
