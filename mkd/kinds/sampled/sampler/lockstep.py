"""Data-parallel replicas that share experts run row by row together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mkd.parallel.context import ParallelContext


class Lockstep:
    """Lets the replicas of an expert-parallel group run the same number of rows: their all-to-alls wait."""

    def __init__(self, context: ParallelContext):
        self._group, self._device = context.ep.group, context.device
        self.is_alone = context.ep.size == 1

    def any(self, has_work: object) -> bool:
        """Return True if a replica of the group has work. All-reduce MAX of one number."""
        return bool(self._most(bool(has_work)))

    def missing(self, rows: int) -> int:
        """Return the rows of padding that this replica must run besides its own. All-reduce MAX, as `any`."""
        return self._most(rows) - rows

    def _most(self, number: int) -> int:
        if self.is_alone:
            return number
        value = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return int(value)
