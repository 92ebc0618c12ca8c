"""Which rows of both LM heads, or which columns of both logits, this process has.

Without `tp_group` a process has all of them. With it the student's rows are split: a DTensor as `Shard(0)`
splits it, plain tensors in shards of as many rows. The teacher's shard begins where the student's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mkd.errors import UsageError
from mkd.losses.kd_objective import KDObjective, VocabShard, require_columns
from mkd.losses.standalone import dtensors
from mkd.losses.standalone.language_head import LMHead
from mkd.parallel.axes import place_in


@dataclass(frozen=True)
class VocabularySplit:
    """The student's ids on this process."""

    rank: int
    size: int
    start: int  # first id
    width: int  # ids on this process
    widest: int  # ids on the process with the most
    total: int  # ids on all processes

    @classmethod
    def of(cls, ids: int, is_whole: bool, tp_group: dist.ProcessGroup | None) -> VocabularySplit:
        """Return the split of `ids`: all of the student's if `is_whole`, else those of this process."""
        rank, size = place_in(tp_group)
        if not is_whole:
            return cls(rank, size, rank * ids, ids, ids, ids * size)
        widest = -(-ids // size)
        start, width = dtensors.shard_range(ids, rank, size)
        if ids <= widest * (size - 1):
            raise UsageError(
                f"{ids} vocabulary ids are split over {size} processes",
                "one of them has none",
                "use fewer processes",
                code="model-not-divisible",
            )
        return cls(rank, size, start, width, widest, ids)

    def shard(self, objective: KDObjective) -> VocabShard:
        require_columns("student_vocab_size", objective.student_vocab_size, self.total)
        return VocabShard.at(self.start, self.width, self.rank, self.size, objective)

    def is_alike(self, ids: int) -> bool:
        """Return True if another tensor with `ids` in all has shards that begin at the same ids."""
        return -(-ids // self.size) == self.widest


def split_heads(
    heads: Sequence[LMHead],  # the student's, and the teacher's if there is one
    tp_group: dist.ProcessGroup | None,
) -> tuple[list[LMHead], VocabularySplit, int | None]:
    """Return the heads with plain tensors of this process, the split, and the number of the teacher's ids.

    Communication: an all-gather of a head that other processes hold parts of; see `dtensors.py`.
    """
    student, *teachers = heads
    is_dtensor = isinstance(student.weight, DTensor)
    if is_dtensor and tp_group is not None and not dtensors.is_split(student.weight, tp_group, 0):
        raise UsageError(
            f"the student's LM head has the placements {student.weight.placements}",
            "with tp_group its rows, the vocabulary, are split over that group",
            "shard it with Shard(0) over the mesh of tp_group, or leave tp_group out",
            code="layout-not-valid",
        )
    split = VocabularySplit.of(len(student.weight), is_dtensor, tp_group)
    local, ids = [_local(student, tp_group)], None
    with torch.no_grad():
        for teacher in teachers:
            rows, ids = _teacher_rows(teacher, split, tp_group)
            local.append(rows)
    return local, split, ids


def _local(head: LMHead, tp_group: dist.ProcessGroup | None) -> LMHead:
    bias = None if head.bias is None else dtensors.own_part(head.bias, tp_group)
    return LMHead(dtensors.own_part(head.weight, tp_group), bias, head.scale, head.logits_cap)


def _teacher_rows(
    teacher: LMHead, split: VocabularySplit, tp_group: dist.ProcessGroup | None
) -> tuple[LMHead, int]:
    """Return the teacher's head with its rows of this process, and the number of its ids."""
    ids = len(teacher.weight)
    if split.size == 1:
        return _local(teacher, None), ids
    if not isinstance(teacher.weight, DTensor):
        _require_width("rows of the teacher's LM head", ids, split)
        return teacher, split.total
    if dtensors.is_split(teacher.weight, tp_group, 0) and split.is_alike(ids):
        return _local(teacher, tp_group), ids
    rows = slice(split.start, split.start + split.width)
    bias = None if teacher.bias is None else dtensors.whole(teacher.bias)[rows]
    return LMHead(dtensors.whole(teacher.weight)[rows], bias, teacher.scale, teacher.logits_cap), ids


def split_logits(
    student: Tensor, teacher: Tensor | None, tp_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor | None, VocabularySplit, int | None]:
    """Return both logits [..., w] of this process, the split, and the number of the teacher's ids.

    The teacher's have the student's columns: others are cut off, missing ones are zeros, in a copy.
    """
    is_dtensor = isinstance(student, DTensor)
    split = VocabularySplit.of(student.shape[-1], is_dtensor, tp_group)
    own = dtensors.own_columns(student, tp_group)
    if teacher is None:
        return own, None, split, None
    ids = teacher.shape[-1]
    with torch.no_grad():
        if isinstance(teacher, DTensor):
            dtensors.require_mesh(teacher, tp_group, "logits of the teacher are")
            if dtensors.is_split(teacher, tp_group, -1) and split.is_alike(ids):
                local = dtensors.own_columns(teacher, tp_group)
            else:
                local = dtensors.whole(teacher)[..., split.start : split.start + split.width]
        elif split.size > 1:
            _require_width("columns of the teacher's logits", ids, split)
            local, ids = teacher, split.total
        else:
            local = teacher[..., : split.width]
        missing = own.shape[-1] - local.shape[-1]
        local = torch.nn.functional.pad(local, (0, missing)) if missing > 0 else local.detach()
    return own, local, split, ids


def _require_width(what: str, ids: int, split: VocabularySplit) -> None:
    if ids != split.width:
        raise UsageError(
            f"there are {ids} {what} on this process, and {split.width} of the student",
            "an id is on the same process in both models",
            "pad both to one number of ids, or give DTensors",
            code="numbers-contradict",
        )
