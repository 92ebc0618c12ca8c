"""The batch arithmetic: how a global batch of packs is split into micro-batches of data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.human import counted
from mkd.plan.parallel_sizes import sizes_of


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of one optimizer step. A sample is one pack of `seq_length` tokens; batch sizes count packs."""

    micro_batch_size: int  # packs of one micro-batch, run as one row of micro_batch_size * seq_length tokens
    num_microbatches: int  # of each data-parallel rank
    data_parallel: int
    seq_length: int  # tokens of a pack

    @property
    def global_batch_size(self) -> int:
        """Packs of one optimizer step."""
        return self.micro_batch_size * self.num_microbatches * self.data_parallel

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, padding included."""
        return self.global_batch_size * self.seq_length

    def equation(self) -> str:
        """Return the arithmetic as one line."""
        return (
            f"{counted(self.global_batch_size, 'pack')} = {self.micro_batch_size} per micro-batch x "
            f"{counted(self.num_microbatches, 'micro-batch')} x {self.data_parallel} data-parallel; "
            f"{self.global_batch_size} x {self.seq_length} = {self.tokens_per_step} tokens a step"
        )

    @classmethod
    def create(
        cls, *, micro_batch_size: int, global_batch_size: int | None, data_parallel: int, seq_length: int
    ) -> BatchPlan:
        """Divide the global batch (None: a micro-batch per replica). Raises UsageError for a remainder."""
        unit = micro_batch_size * data_parallel
        num_microbatches, rest = divmod(unit if global_batch_size is None else global_batch_size, unit)
        if rest:
            nearest = [n * unit for n in (num_microbatches, num_microbatches + 1) if n]
            raise UsageError(
                f"global-batch-size {global_batch_size} is not divisible by micro-batch-size "
                f"{micro_batch_size} x data-parallel {data_parallel} = {unit}",
                "every data-parallel rank runs the same number of whole micro-batches in a step",
                f"use {' or '.join(map(str, nearest))}",
                code="batch-not-divisible",
            )
        return cls(micro_batch_size, num_microbatches, data_parallel, seq_length)

    @classmethod
    def from_config(cls, config: Config, world_size: int) -> BatchPlan:
        """Return the plan of `config` on `world_size` processes. Raises UsageError as `create`."""
        training = config.training
        return cls.create(
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size,
            data_parallel=sizes_of(config, world_size).data,
            seq_length=training.seq_length,
        )
