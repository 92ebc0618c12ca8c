"""The student's end of a teacher on processes of its own: ask for rows of tokens ahead, take final states.

A replica of the student numbers its requests. A request carries the token row, over a channel between the
leaders of both replicas (last stage, first process of a row). The answer is the teacher's final state, which
each process of the last stages sends and receives by rows. The leader tells the teacher when the receive of
a state is posted (CREDIT), so that no transfer waits on a device for the other side. At most `ahead` rows are
asked for and not taken, and one receive is posted: that of the state which is taken next.

Between steps, states of the next step are ahead. An evaluation has a lane of its own and does not touch them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import PackedBatch
from mkd.models.stage import Stopwatch
from mkd.parallel.context import ParallelContext
from mkd.parallel.host_row import HostRow
from mkd.parallel.side_groups import Bridge, Transfer
from mkd.parallel.side_links import SideLinks
from mkd.parallel.side_messages import CREDIT, STOP, Message
from mkd.parallel.side_rows import HeldRows, is_whole, messages

SampleIds = tuple[int, ...]


@dataclass
class _Request:
    """A row that has been asked for."""

    ids: SampleIds
    row: HostRow
    number: int
    sent: list[Transfer]  # parts of messages about it, which must live until they have arrived
    received: list[tuple[Transfer, Tensor]] | None = None  # with their rows of the state; None: not posted


class RemoteStates:
    """The states of one teacher for this process of the student."""

    def __init__(
        self,
        links: SideLinks,
        context: ParallelContext,
        *,
        place: int,  # among the host rows of a batch
        needed: int,  # among the teachers of `needed_teachers`
        shape: tuple[int, int, int],  # of the whole state on this process, [t / cp (/ tp), 1, h]
        dtype: torch.dtype,
        sequence_parallel: bool,
        ahead: int,
    ):
        self.links, self.context, self.place, self.needed = links, context, place, needed
        self.shape, self.dtype, self.sequence_parallel, self.ahead = shape, dtype, sequence_parallel, ahead
        self.waiting = Stopwatch()  # time of training without the state that is needed
        self._is_timed = True
        self.most_ahead = self._rows = 0
        self._held = HeldRows(context.sizes, context.row_rank)
        self._number = 0
        self._todo: deque[tuple[SampleIds, HostRow]] = deque()  # of the lane, not asked for yet
        self._asked: deque[_Request] = deque()  # of the lane

    @contextmanager
    def step(
        self, microbatches: Sequence[PackedBatch], following: Sequence[PackedBatch], is_evaluation: bool
    ) -> Iterator[None]:
        """Ask for the states of `microbatches`, and then ahead for those of `following`, the next step's."""
        if not self.context.holds_last_stage:
            yield
            return
        kept, self._is_timed = (self._todo, self._asked), not is_evaluation
        if is_evaluation:
            self._todo, self._asked = deque(), deque()
        batches = [one for one in (*microbatches, *following) if self._is_needed(one)]
        known = [one.ids for one in self._asked] + [ids for ids, _ in self._todo]
        begun = [one.sample_ids for one in batches[: len(known)]]
        assert known == begun, f"states ahead are of samples {known}, the step's are {begun}"
        self._todo.extend((one.sample_ids, one.host_rows[self.place]) for one in batches[len(known) :])
        self._ask()
        try:
            yield
            assert not is_evaluation or not (self._asked or self._todo), "an evaluation left states behind"
        finally:
            if is_evaluation:
                self._todo, self._asked = kept

    def take(self, batch: PackedBatch) -> Tensor:
        """Return the teacher's final state of a micro-batch, [t / cp (/ tp), 1, h]. Last stage only.

        Communication: all-gather over tensor parallelism, unless the student is sequence parallel; no
        backward.
        """
        if not self._is_needed(batch):  # nothing reads it
            return torch.empty(self.shape, dtype=self.dtype, device=self.context.device)
        self.most_ahead = max(self.most_ahead, len(self._asked))
        request = self._asked.popleft()
        assert request.ids == batch.sample_ids, f"the state is of {request.ids}, not of {batch.sample_ids}"
        piece = self._received(request)
        self._rows += self._is_timed and self.context.row_rank == 0
        self._ask()
        if self.sequence_parallel or self.context.tp_size == 1:
            return piece
        whole = piece.new_empty(self.shape)
        dist.all_gather_into_tensor(whole, piece, group=self.context.tp_group)
        return whole

    def take_rows(self) -> int:
        """Return how many states of training the leader of a replica has taken since the last call."""
        taken, self._rows = self._rows, 0
        return taken

    def stop(self, exit_code: int) -> None:
        """Tell the teacher to end with that code, and forget what is ahead. Call it outside of a step."""
        for request in self._asked:
            if request.received is not None:  # the teacher has been told that it may send
                self._received(request)
        if self.context.device.type == "cuda":  # where a wait lets only the stream wait
            torch.cuda.synchronize(self.context.device)
        sent = [part for one in self._asked for part in one.sent]
        for control in self.links.control.values():
            sent += Message(STOP, exit_code).send(control)
        for part in sent:
            part.wait()
        self._asked.clear()
        self.links.close()

    def _is_needed(self, batch: PackedBatch) -> bool:
        return batch.needs_teacher(self.needed)

    def _ask(self) -> None:
        """Ask for as many rows as there is room for, and post the receive of the state that is taken next.

        The credit goes first: the teacher takes messages in their order.
        """
        self._post()
        while self._todo and len(self._asked) < self.ahead:
            ids, row = self._todo.popleft()
            request = _Request(ids, row, self._number, [])
            self._number += 1
            self._asked.append(request)
            if (control := self._control(request)) is not None:
                request.sent += Message.of_row(request.number, row).send(control)
            if len(self._asked) == 1:
                self._post()

    def _post(self) -> None:
        front = self._asked[0] if self._asked else None
        if front is None or front.received is not None:
            return
        bridge, front.received = self.links.states[self._replica(front)], []
        size = self.shape[0] // (1 if self.sequence_parallel else self.context.tp_size)
        found = messages(front.row.padded, self._held, self.links.others, is_sender=False)
        for sender, places in found:
            buffer = bridge.new_buffer((len(places), 1, self.shape[2]), self.dtype)
            front.received.append((bridge.receive(buffer, sender), places))
        assert sum(len(places) for _, places in front.received) == size, "the state has other rows"
        if (control := self._control(front)) is not None:
            front.sent += Message(CREDIT, front.number).send(control)

    def _received(self, request: _Request) -> Tensor:
        """Return the rows of the state that this process received."""
        assert request.received is not None, "it is posted before it is taken"
        with self.waiting.running(self.context.device) if self._is_timed else nullcontext():
            parts = [(transfer.wait(), places) for transfer, places in request.received]
        while request.sent:  # the teacher has read them; gloo's transfers end with their first wait
            request.sent.pop().wait()
        size = sum(len(places) for _, places in parts)
        if len(parts) == 1 and is_whole(parts[0][1], size):
            return parts[0][0]
        state = parts[0][0].new_empty((size, *self.shape[1:]))
        for part, places in parts:
            state[places.to(state.device, non_blocking=True)] = part
        return state

    def _replica(self, request: _Request) -> int:
        return self.links.routes.of(self.context.dp_rank, request.number)

    def _control(self, request: _Request) -> Bridge | None:
        return self.links.control.get(self._replica(request))


def take_wait_ms(teachers: Sequence[RemoteStates], context: ParallelContext) -> float | None:
    """Return how many ms the process that waited most did so since the last call; None without `teachers`.

    Communication: one all-reduce MAX over all processes of the student.
    """
    if not teachers:
        return None
    waited = sum(one.waiting.take_ms() for one in teachers)
    most = torch.tensor(waited, dtype=torch.float64, device=context.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)
