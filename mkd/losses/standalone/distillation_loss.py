"""`DistillationLoss`: cross entropy and distillation as a module for any trainer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mkd.config.divergence import DECLARATIONS
from mkd.errors import UsageError
from mkd.losses.divergences import build_divergence
from mkd.losses.fused_linear import fused_linear_kd
from mkd.losses.fused_rows import fused_linear_rows
from mkd.losses.kd_objective import KDObjective, KDOutput, VocabShard, require_columns
from mkd.losses.lm_head import HeadInput
from mkd.losses.standalone import dtensors
from mkd.losses.standalone.language_head import LMHead
from mkd.losses.standalone.target_rows import TargetRows, denominator, require_labels, target_rows
from mkd.losses.standalone.vocabulary_split import VocabularySplit, split_heads, split_logits
from mkd.losses.statistics import VALUE_NAMES, RowValues
from mkd.losses.vocab_parallel import vocab_parallel_kd, vocab_parallel_rows
from mkd.plan.footprint.head import head_block_rows

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class DistillationOutput:
    """The loss and its metrics, all reduced in the same way; fp32, or fp64 for fp64 inputs.

    0-dim, or with reduction "none" of the shape of the rows, 0 where there is no loss. Only `loss` has a
    graph. None: not computed. `loss == (1 - kd_ratio) * ce + kd_ratio * kd`.
    """

    loss: Tensor
    ce: Tensor | None  # the student's cross entropy, T = 1, nats
    kd: Tensor | None  # divergence over the shared ids, times the temperature scaling
    teacher_ce: Tensor | None  # over the shared ids, T = 1, nats
    teacher_entropy: Tensor | None
    top1_agreement: Tensor | None  # share of rows whose most likely id is the same in both models
    num_loss_tokens: Tensor  # int64 [], rows with a loss on this process


class DistillationLoss(nn.Module):
    """(1 - kd_ratio) CE + kd_ratio s(T) D(teacher, student), from hidden states and heads or from logits.

    Has no parameters and no state. docs/loss-library.md is its contract.
    """

    def __init__(
        self,
        divergence: str = "forward_kl",  # a name of --kd-divergence
        *,
        kd_ratio: float = 0.5,  # 0: cross entropy only, 1: distillation only
        temperature: float = 1.0,
        temperature_scaling: str = "squared",  # s(T): "squared" (T * T) or "none" (1)
        reduction: str = "mean",  # over tokens: "mean", "sum" or "none"
        ignore_index: int = -100,  # label of a row without loss
        student_vocab_size: int | None = None,  # real ids; None: all rows of the head
        teacher_vocab_size: int | None = None,
        tp_group: Any = None,  # ProcessGroup or DeviceMesh of one dimension that splits the vocabulary
        with_ce_metric: bool = False,  # compute the cross entropy even if kd_ratio is 1
        fp32_logits: bool = False,  # make fp32 logits of bf16 hidden states
        block_rows: int | None = None,  # rows whose logits exist at a time; None: about 2.5 GiB on a GPU
        skip_ignored_rows: bool = True,  # False: never wait for the device, and compute ignored rows too
        **parameter: float,  # of the divergence: jsd_beta, mixed_kl_weight or skew_alpha
    ):
        """Raise UsageError for values that make no loss."""
        super().__init__()
        if reduction not in REDUCTIONS:
            do = f"choose one of: {', '.join(REDUCTIONS)}"
            raise UsageError(f"reduction is {reduction!r}", "mkd has no such rule", do, code="value-unknown")
        self.objective = KDObjective(  # of each call with its vocabularies
            1,
            1,
            kd_ratio,
            temperature,
            temperature_scaling,
            build_divergence(divergence, _parameter(divergence, parameter)),
            with_ce_metric,
        )
        self.reduction, self.ignore_index = reduction, ignore_index
        self.student_vocab_size, self.teacher_vocab_size = student_vocab_size, teacher_vocab_size
        self.tp_group = dtensors.group_of(tp_group)
        self.fp32_logits, self.block_rows = fp32_logits, block_rows
        self.skip_ignored_rows = skip_ignored_rows

    def extra_repr(self) -> str:
        names = ("divergence", "kd_ratio", "temperature", "temperature_scaling")
        return ", ".join(f"{name}={getattr(self.objective, name)}" for name in names) + f", {self.reduction}"

    def forward(
        self,
        student: Tensor,  # [..., h_s] final hidden states with student_head, else [..., v] logits
        teacher: Tensor | None = None,  # [..., h_t] or [..., v'], of the same rows, frozen
        *,
        labels: Tensor | None = None,  # [...] tokens: row i predicts labels[..., i + 1]
        shift_labels: Tensor | None = None,  # [...] what each row predicts; or neither, at kd_ratio 1
        loss_mask: Tensor | None = None,  # [...] weight of each label or row, 0: no loss
        student_head: LMHead | nn.Module | Tensor | None = None,
        teacher_head: LMHead | nn.Module | Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,  # denominator of the mean; None: rows with a loss
    ) -> DistillationOutput:
        """Return the loss, differentiable by `student`, and by the weight and bias of `student_head`.

        With heads no tensor of all logits exists. Raises UsageError for inputs that do not fit each other.
        """
        if not self.objective.uses_teacher:
            teacher = teacher_head = None
        if teacher is not None:
            _require_pair(student, teacher, student_head is not None, teacher_head is not None)
        given = labels, shift_labels, loss_mask, self.ignore_index
        needs_labels = self.objective.measures_ce
        target = target_rows(student.shape[:-1], student.device, *given, needs_labels=needs_labels)
        divisor = denominator(target.mask, self.reduction, num_items_in_batch)
        dtype = _autocast_dtype(student)
        with nullcontext() if dtype is None else torch.autocast(student.device.type, enabled=False):
            if student_head is None:
                output, rows = self._of_logits(student, teacher, target), None
            else:
                states = [self._states(one, dtype) for one in (student, teacher) if one is not None]
                heads = [LMHead.of(one) for one in (student_head, teacher_head) if one is not None]
                rows = target.mask.nonzero().flatten() if self.skip_ignored_rows else None
                output = self._of_hidden(states, heads, target, rows)
            return _reduced(output, rows, target, student.shape[:-1], divisor)

    def _of_logits(self, student: Tensor, teacher: Tensor | None, target: TargetRows) -> KDOutput | RowValues:
        own, local, split, ids = split_logits(student, teacher, self.tp_group)
        objective, shard = self._objective(split, ids)
        self._check_labels(target, objective)
        own, local = (None if one is None else one.flatten(0, -2) for one in (own, local))
        loss = vocab_parallel_rows if self.reduction == "none" else vocab_parallel_kd
        rows = own, local, target.labels, target.mask
        return loss(*rows, objective, tp_group=self.tp_group, shard=shard)

    def _of_hidden(
        self,
        states: list[Tensor],  # [t, h] of the student, and of the teacher if there is one
        heads: list[LMHead],
        target: TargetRows,
        rows: Tensor | None,  # [n] rows with a loss
    ) -> KDOutput | RowValues:
        local, split, ids = split_heads(heads[: len(states)], self.tp_group)
        objective, shard = self._objective(split, ids)
        self._check_labels(target, objective)
        student, *teachers = (
            HeadInput(hidden, head.weight, head.logits_cap, head.bias, head.scale)
            for hidden, head in zip(states, local, strict=True)
        )
        count = len(target.mask) if rows is None else len(rows)
        itemsize = 4 if self.fp32_logits else student.hidden.dtype.itemsize
        block_rows = self.block_rows or head_block_rows(count, split.widest, itemsize, target.mask.is_cuda)
        loss = fused_linear_rows if self.reduction == "none" else fused_linear_kd
        return loss(
            student,
            teachers,
            target.labels,
            target.mask,
            objective,
            tp_group=self.tp_group,
            loss_rows=rows,
            block_rows=block_rows,
            fp32_logits=self.fp32_logits,
            shard=shard,
        )

    def _check_labels(self, target: TargetRows, objective: KDObjective) -> None:
        """Check the labels of rows with a loss, unless the device must not be waited for."""
        if self.skip_ignored_rows and target.has_labels:
            require_labels(target.labels[target.mask != 0], objective.student_vocab_size)

    def _states(self, hidden: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return hidden states [t, h] of all rows, in `dtype` if there is one."""
        rows = dtensors.whole_rows(hidden, self.tp_group).flatten(0, -2)
        return rows if dtype is None else rows.to(dtype)

    def _objective(self, split: VocabularySplit, teacher_ids: int | None) -> tuple[KDObjective, VocabShard]:
        """Return the objective of these vocabularies, and this process's ids."""
        if self.teacher_vocab_size is not None and teacher_ids is not None:
            require_columns("teacher_vocab_size", self.teacher_vocab_size, teacher_ids)
        objective = replace(
            self.objective,
            student_vocab_size=self.student_vocab_size or split.total,
            teacher_vocab_size=self.teacher_vocab_size or teacher_ids,
        )
        objective.require_teacher(teacher_ids is not None)
        return objective, split.shard(objective)


def _require_pair(student: Tensor, teacher: Tensor, student_head: bool, teacher_head: bool) -> None:
    """Raise UsageError unless both models come with a head or without, and with the same rows."""
    if student_head != teacher_head:
        raise UsageError(
            "one model has an LM head and the other has none",
            "with heads the loss reads hidden states, without them logits",
            "give both student_head and teacher_head, or neither",
            code="numbers-contradict",
        )
    shapes = tuple(student.shape[:-1]), tuple(teacher.shape[:-1])
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"rows of the student have the shape {shapes[0]}, of the teacher {shapes[1]}",
            "both models read the same tokens",
            "give hidden states or logits of one batch",
            code="numbers-contradict",
        )


def _parameter(divergence: str, given: dict[str, float]) -> float | None:
    """Return the divergence's parameter. Raises UsageError for one that it does not have."""
    declared = DECLARATIONS[divergence].parameter if divergence in DECLARATIONS else None
    for name in given:
        if declared is None or name != declared.name:
            has = "no parameter" if declared is None else f"the parameter {declared.name}"
            raise UsageError(
                f"DistillationLoss got {name}={given[name]}",
                f"the divergence {divergence} has {has}",
                "remove it, or choose the divergence that has it",
                code="remove-flag",
            )
    return given.get(declared.name) if declared is not None else None


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast, None without autocast."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _reduced(
    output: KDOutput | RowValues,
    rows: Tensor | None,
    target: TargetRows,
    shape: torch.Size,
    divisor: Tensor | None,
) -> DistillationOutput:
    """Return the output of the caller's reduction."""

    def reduce(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        if isinstance(output, RowValues):
            if rows is not None:
                value = value.new_zeros(shape.numel()).index_copy(0, rows, value)
            return value.view(shape)
        return value if divisor is None else value / divisor

    values = {name: reduce(getattr(output, name)) for name in ("loss", *VALUE_NAMES)}
    if not target.has_labels:
        values["teacher_ce"] = None
    return DistillationOutput(**values, num_loss_tokens=torch.count_nonzero(target.mask))
