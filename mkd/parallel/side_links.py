"""Links between a replica of the student and those of a teacher on processes of its own.

Only the last stages are connected: by a bridge over the processes of both, teacher's first, which carries
states, and by a channel on the host between their leaders, which carries messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mkd.parallel.context import ParallelContext
from mkd.parallel.side_groups import Bridge, Launch
from mkd.parallel.side_messages import STUDENT, TEACHER
from mkd.parallel.side_rows import Routes
from mkd.plan.parallel_sizes import Sizes


@dataclass(frozen=True)
class SideLinks:
    """The links of one process, by the replica on the other side. Only last stages have some."""

    routes: Routes
    others: Sizes  # of the other side
    states: Mapping[int, Bridge] = field(default_factory=dict)
    control: Mapping[int, Bridge] = field(default_factory=dict)  # on the leader

    @classmethod
    def open(
        cls, launch: Launch, name: str, context: ParallelContext, others: Sizes, is_teacher: bool
    ) -> SideLinks:
        """Meet the other side of the teacher `name`. Collective on both.

        Every process opens its links in the order of (teacher's replica, student's replica).
        """
        own = context.sizes
        teacher, student = (own, others) if is_teacher else (others, own)
        routes, replica = Routes(student.data, teacher.data), context.dp_rank
        launch.await_student(name, is_teacher)
        if not context.holds_last_stage:
            return cls(routes, others)
        states, control = {}, {}
        for other in routes.students_of(replica) if is_teacher else routes.teachers_of(replica):
            pair = f"{name} {replica} {other}" if is_teacher else f"{name} {other} {replica}"
            place, size = context.row_rank, teacher.row + student.row
            place += 0 if is_teacher else teacher.row
            bridge = Bridge(launch.store, f"{pair} states", place, size, context.device)
            bridge.warm_up(range(teacher.row), range(teacher.row, size))
            states[other] = bridge
            if context.row_rank == 0:
                end, cpu = TEACHER if is_teacher else STUDENT, torch.device("cpu")
                control[other] = Bridge(launch.store, f"{pair} control", end, 2, cpu)
        return cls(routes, others, states, control)

    def close(self) -> None:
        """End all communicators. No message is under way."""
        for bridge in (*self.control.values(), *self.states.values()):
            bridge.close()


def send_head(
    links: SideLinks,
    context: ParallelContext,
    weight: Tensor,  # [v/tp, h], this rank's rows of the teacher's head
    vocab_size: int,
    student_rows: int,  # of the student's padded head, on all of its ranks together
) -> None:
    """Send the student's processes the rows of the head that each of them needs. See `receive_head`."""
    if context.row_rank >= context.tp_size:  # others of the row have the same rows
        return
    own, part = _span(context.tp_rank, len(weight), vocab_size), student_rows // links.others.tensor
    for replica, bridge in links.states.items():
        if links.routes.teachers_of(replica)[0] != context.dp_rank:
            continue
        for place in range(links.others.row):
            first, last = _overlap(own, _span(place % links.others.tensor, part, vocab_size))
            if first < last:
                start = context.tp_rank * len(weight)
                rows = weight[first - start : last - start].contiguous()
                bridge.send(rows, context.sizes.row + place).wait()


def receive_head(
    links: SideLinks,
    context: ParallelContext,
    shape: tuple[int, int],  # (real rows, width) of the teacher's head
    dtype: torch.dtype,
    student_rows: int,  # of the student's padded head, on all ranks together
    teacher_rows: int,  # of the teacher's padded head, on all of its ranks together
) -> Tensor:
    """Return this rank's rows of the teacher's head, [v/tp, h], zeros where it has none. Last stage only."""
    vocab_size, width = shape
    part, of_sender = student_rows // context.tp_size, teacher_rows // links.others.tensor
    head = torch.zeros(part, width, dtype=dtype, device=context.device)
    bridge = links.states[links.routes.teachers_of(context.dp_rank)[0]]
    own = _span(context.tp_rank, part, vocab_size)
    for sender in range(links.others.tensor):
        first, last = _overlap(_span(sender, of_sender, vocab_size), own)
        if first < last:
            rows = bridge.receive(bridge.new_buffer((last - first, width), dtype), sender).wait()
            head[first - context.tp_rank * part : last - context.tp_rank * part] = rows
    return head


def _span(rank: int, rows: int, vocab_size: int) -> tuple[int, int]:
    """Return the [first, last) ids whose rows a tensor-parallel rank holds."""
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])
