"""Processes along each axis of parallelism, and the numbers that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mkd.config.schema import Config, ParallelConfig
from mkd.errors import UsageError
from mkd.human import counted
from mkd.plan.models.model_shape import ModelShape


@dataclass(frozen=True)
class Sizes:
    """Processes along each axis.

    Experts have a grid of their own: `expert` processes of a stage hold all experts of its layers.
    """

    tensor: int = 1  # share every matrix
    context: int = 1  # share every sequence
    pipeline: int = 1  # share the layers
    expert: int = 1  # share the experts of every layer
    data: int = 1  # share the batch: replicas of the models

    @classmethod
    def of(cls, parallel: ParallelConfig, data: int = 1) -> Sizes:
        """Return the sizes in the settings, with so many replicas."""
        return cls(
            tensor=parallel.tensor_model_parallel_size,
            context=parallel.context_parallel_size,
            pipeline=parallel.pipeline_model_parallel_size,
            expert=parallel.expert_model_parallel_size,
            data=data,
        )

    @property
    def row(self) -> int:
        """Processes of a pipeline stage that share a row of packs."""
        return self.tensor * self.context

    @property
    def replica(self) -> int:
        """Processes that hold one replica of the models."""
        return self.row * self.pipeline

    @property
    def stage(self) -> int:
        """Processes of a pipeline stage."""
        return self.row * self.data

    @property
    def copies(self) -> int:
        """Processes of a stage that hold the same weights, experts aside."""
        return self.context * self.data

    @property
    def expert_copies(self) -> int:
        """Processes of a stage that hold the same experts."""
        return self.stage // self.expert

    @property
    def weight_shards(self) -> int:
        """Consecutive processes that hold different weights of a model.

        Processes with the same tensor-parallel and the same expert-parallel rank hold the same weights. Both
        ranks count from the first process of a pipeline stage: Megatron counts ranks along tensor, context,
        data, then pipeline parallelism, and for experts along expert parallelism first.
        """
        return math.lcm(self.tensor, self.expert)

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """Sizes along the axes of dense layers."""
        return self.tensor, self.context, self.pipeline, self.data

    def megatron_groups(self) -> list[int]:
        """Return the sizes of the groups that Megatron makes, on the first pipeline rank."""
        dense = [*self.axes, self.copies, self.tensor * self.pipeline, self.tensor * self.data]
        dense += [self.row, self.stage, self.stage * self.pipeline]
        ends = [min(2, self.pipeline), 1]  # ranks that share the embedding of tokens, and that of positions
        experts = [self.expert, 1, self.expert, self.expert * self.pipeline, self.expert_copies]
        return dense + ends + experts

    @property
    def document_multiple(self) -> int:
        """Tokens that the length of documents and packs is a multiple of: two parts a process of a row."""
        return 2 * self.context if self.context > 1 else 1


ONE_PROCESS = Sizes()


def partners(own: int, others: int) -> int:
    """Return with how many of the `others`, replicas of a side, one of the `own` of another exchanges states.

    Request n of student replica d goes to teacher replica (n x student replicas + d) mod teacher replicas.
    """
    return others // math.gcd(own, others)


def sizes_of(config: Config, world_size: int) -> Sizes:
    """Return the sizes of `config` on `world_size` processes. UsageError if replicas do not divide them."""
    sizes = Sizes.of(config.parallel)
    data, rest = divmod(world_size, sizes.replica)
    if rest:
        do = f"start a multiple of {sizes.replica} processes (mkd train --nproc-per-node N, or torchrun)"
        if config.dry_run:
            do = f"plan a multiple of {sizes.replica} processes, "
            do += f"for example `mkd plan --world-size {sizes.replica}`"
        do += ", or change the parallel sizes"
        raise UsageError(
            f"{counted(world_size, 'process')} cannot be divided into replicas of {sizes.replica} "
            "(tensor x pipeline x context parallel size)",
            "every process belongs to exactly one replica of the models",
            do,
            code="world-not-divisible",
        )
    return replace(sizes, data=data)


def model_sizes(config: Config, model: ModelShape | None, teacher: int | None = None) -> Sizes:
    """Return the sizes in the settings for the student, or for the teacher of that number.

    `expert` is 1 for a dense model, and for one whose shape is unknown. A teacher without a setting of its
    own has the student's.
    """
    sizes = Sizes.of(config.parallel)
    own = None if teacher is None else config.teachers[teacher].expert_model_parallel_size
    return replace(sizes, expert=(own or sizes.expert) if model and model.moe else 1)
