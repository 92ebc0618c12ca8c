"""Random hidden states and LM heads of both models, the fused loss on them, and its float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mkd.losses import HeadInput, KDObjective, build_divergence, fused_linear_kd
from mkd.plan.footprint.head import head_block_rows
from tools.benchmarks.gate import Errors, reference_chunks, reference_rows, relative, worst
from tools.benchmarks.machine import Machine

# Standard deviations of the logits' common part and of each model's own part: the KL is about 0.5.
SHARED_STD, OWN_STD = 3.0, 0.7
GATE_COLUMNS = 128  # vocabulary rows whose weight gradient is compared, spread over all

Gradients = tuple[Tensor, Tensor, Tensor]
"""(mean loss [], d hidden [n, h_s], d weight [v, h_s])."""


@dataclass(frozen=True)
class HeadShape:
    rows: int
    student_hidden: int
    teacher_hidden: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.rows},{self.student_hidden},{self.teacher_hidden},{self.vocab}"


class HeadCase:
    """Inputs of one shape. The student's weight has `main_grad` (fp32), as Megatron's DDP gives it."""

    def __init__(self, shape: HeadShape, machine: Machine):
        self.shape, self.machine = shape, machine
        generator = machine.generator()

        def normal(*size: int) -> Tensor:
            return torch.empty(*size, device=machine.device, dtype=machine.dtype).normal_(generator=generator)

        common = min(shape.student_hidden, shape.teacher_hidden) // 2
        common_hidden = normal(shape.rows, common)
        common_weight = normal(shape.vocab, common).mul_(SHARED_STD * common**-0.5)

        def model(width: int) -> tuple[Tensor, Tensor]:
            own = width - common
            hidden = torch.cat([common_hidden, normal(shape.rows, own)], dim=1)
            return hidden, torch.cat(
                [common_weight, normal(shape.vocab, own).mul_(OWN_STD * own**-0.5)], dim=1
            )

        self.student_hidden, self.student_weight = model(shape.student_hidden)
        self.teacher_hidden, self.teacher_weight = model(shape.teacher_hidden)
        self.main_grad = torch.zeros(self.student_weight.shape, device=machine.device)
        device = machine.device
        self.labels = torch.randint(shape.vocab, (shape.rows,), device=device, generator=generator)
        self.all_rows = torch.ones(shape.rows, device=device)
        self.half_of_rows = torch.zeros(shape.rows, device=device)
        chosen = torch.randperm(shape.rows, device=device, generator=generator)[: max(1, shape.rows // 2)]
        self.half_of_rows[chosen] = 1.0

    def restore(self) -> None:
        self.main_grad.zero_()

    def gate_columns(self) -> Tensor:
        last = self.shape.vocab - 1
        return torch.linspace(0, last, min(GATE_COLUMNS, last + 1), device=self.machine.device).long()

    def reference(self, divergence: str, mask: Tensor) -> Gradients:
        """Compute loss and gradients in float64; the weight's gradient for the rows `gate_columns` only."""
        student_weight, teacher_weight = self.student_weight.double(), self.teacher_weight.double()
        hidden_gradient = torch.empty(
            self.student_hidden.shape, dtype=torch.float64, device=self.machine.device
        )
        columns, losses = self.gate_columns(), []
        weight_gradient = student_weight.new_zeros(len(columns), self.shape.student_hidden)
        for rows in reference_chunks(self.shape.rows, self.shape.vocab, self.machine.device):
            student_hidden = self.student_hidden[rows].double()
            loss, gradient = reference_rows(
                student_hidden @ student_weight.t(),
                self.teacher_hidden[rows].double() @ teacher_weight.t(),
                mask[rows],
                divergence,
            )
            losses.append(loss)
            hidden_gradient[rows] = gradient @ student_weight
            weight_gradient += gradient[:, columns].t() @ student_hidden
        count = mask.sum()
        return torch.stack(losses).sum() / count, hidden_gradient / count, weight_gradient / count

    def errors(self, result: Gradients, reference: Gradients) -> Errors:
        """Return the errors of a result: of the loss, and the larger one of both gradients."""
        loss, hidden_gradient, weight_gradient = result
        pairs = ((hidden_gradient, reference[1]), (weight_gradient[self.gate_columns()], reference[2]))
        return worst([Errors(relative(loss, reference[0]), relative(*pair)) for pair in pairs])


def block_rows_of(machine: Machine, shape: HeadShape, given: int | None, ranks: int = 1) -> int:
    """Return the rows of a block of logits: `given`, or the engine's choice on this device."""
    return given or head_block_rows(shape.rows, shape.vocab // ranks, machine.dtype.itemsize, machine.is_cuda)


def mkd_head(
    case: HeadCase,
    divergence: str,
    mask: Tensor,
    block_rows: int | None,  # None: the engine's choice
    shard: slice | None = None,
    tp_group: dist.ProcessGroup | None = None,
    fp32_logits: bool = False,
) -> Callable[[], Gradients]:
    """Return a call of mkd's fused head on the case.

    With several ranks, each runs on its vocabulary rows `shard`, over the ranks of `tp_group`.
    """
    shard = shard or slice(0, case.shape.vocab)
    inverse_count = 1.0 / mask.sum()
    loss_rows = mask.nonzero().flatten()
    weight = nn.Parameter(case.student_weight[shard])
    weight.main_grad = case.main_grad[shard]
    teacher_weight = case.teacher_weight[shard]
    vocab = case.shape.vocab
    objective = KDObjective(vocab, vocab, kd_ratio=1.0, divergence=build_divergence(divergence))

    def run() -> Gradients:
        hidden = case.student_hidden.detach().requires_grad_()
        output = fused_linear_kd(
            HeadInput(hidden, weight),
            [HeadInput(case.teacher_hidden, teacher_weight)],
            case.labels,
            mask,
            objective,
            loss_rows=loss_rows,
            tp_group=tp_group,
            loss_gradient=inverse_count,
            block_rows=block_rows,
            fp32_logits=fp32_logits,
        )
        loss = output.loss * inverse_count
        loss.backward()
        weight.grad = None  # DDP does the same: the gradient is in main_grad
        return loss.detach(), hidden.grad, weight.main_grad

    return run
