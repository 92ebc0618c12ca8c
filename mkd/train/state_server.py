"""The teacher's end of its processes: run the rows that the student asks for, and send their final states.

The leader of a replica (last stage, first process of a row) reads the messages of all students in the order
in which they arrive, with a thread for each. In turns, the credit of one student could wait behind another,
which waits for the first one in the reduction of gradients. It broadcasts each to its replica, so that all
processes of a pipeline do the same in the same order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import position_ids
from mkd.models.language_model import LanguageModel
from mkd.models.packed import packed_documents
from mkd.models.stage import Stopwatch
from mkd.parallel.context import ParallelContext
from mkd.parallel.side_groups import Bridge, Transfer
from mkd.parallel.side_links import SideLinks
from mkd.parallel.side_messages import HEAD, ROW, STOP, Message
from mkd.parallel.side_rows import HeldRows, is_whole, messages
from mkd.parallel.state_links import StateLinks

MOST_SENDS = 16
"""States that may be on their way to the next stage: what has arrived is freed."""


@dataclass
class Inbox:
    """The messages of all students, in the order in which they arrive. On the leader alone."""

    control: Mapping[int, Bridge]
    _messages: queue.Queue[Message | BaseException] = field(default_factory=queue.Queue)
    _stopped: set[int] = field(default_factory=set)  # students whose STOP has arrived

    def start(self) -> None:
        """Read the channels from now on."""
        for student in self.control:
            name = f"messages of replica {student}"
            threading.Thread(target=self._read, args=(student,), name=name, daemon=True).start()

    def next(self) -> Message:
        """Wait for the next message. Raises what broke a channel.

        A student that has said STOP takes no more states: the rows that it asked for ahead are dropped.
        """
        while True:
            found = self._messages.get()
            if isinstance(found, BaseException):
                raise found
            if found.kind != ROW or found.student not in self._stopped:
                return found

    def _read(self, student: int) -> None:
        try:
            while True:
                message = Message.receive(self.control[student], student)
                if message.kind == STOP:
                    self._stopped.add(student)
                self._messages.put(message)
                if message.kind == STOP:
                    return
        except BaseException as error:  # the main thread raises it
            self._messages.put(error)


class StateServer:
    """One process of a teacher."""

    def __init__(
        self,
        model: LanguageModel,
        links: SideLinks,
        context: ParallelContext,
        replica: dist.ProcessGroup,  # gloo, over the processes of this replica
        pipeline: StateLinks | None,  # None: the model has one stage
        forwards: Callable[[int], AbstractContextManager[object]] = nullcontext,  # entered for each
    ):
        self.model, self.links, self.context, self.pipeline = model, links, context, pipeline
        self.replica, self.forwards = replica, forwards
        own = context.sizes  # the leader's rank on this side; Megatron counts tp, cp, dp, then pp
        self.leader = own.row * (context.dp_rank + own.data * (own.pipeline - 1))
        self.num_forwards = self.most_kept = 0
        self.busy = Stopwatch()  # time of the forwards, without that for which their input is awaited
        self._held = HeldRows(context.sizes, context.row_rank)
        self._sequence_shards = context.sequence_shards(model.config.sequence_parallel)
        # (student, request) -> parts of its state by receiver, and a mark behind its computation
        self._ready: dict[tuple[int, int], tuple[list[tuple[int, Tensor]], torch.cuda.Event | None]] = {}
        self._sending: dict[int, list[Transfer]] = {}  # the latest state of each student
        self._inbox = Inbox(links.control)

    def serve(self) -> int:
        """Answer until every student has said STOP. Return the exit code that they sent."""
        self._inbox.start()
        exit_code, left = 0, set(self.links.routes.students_of(self.context.dp_rank))
        while left:
            message = self._next()
            if message.kind == STOP:
                left.discard(message.student)
                exit_code = exit_code or message.number
            elif message.kind == ROW:
                self.num_forwards += 1
                with self.forwards(self.num_forwards):
                    self._run(message)
            elif self.context.holds_last_stage:
                self._send(message)
        for transfer in (one for sent in self._sending.values() for one in sent):
            transfer.wait()
        if self.pipeline is not None:
            self.pipeline.wait_for_sends()
        return exit_code

    def _next(self) -> Message:
        """Return the next message. Communication: broadcast over the replica, on the host."""
        group, leader = self.replica, self.leader
        if self.context.rank == leader:
            message = self._inbox.next()
            dist.broadcast(message.head, leader, group=group)
            if message.row is not None:
                dist.broadcast(message.row, leader, group=group)
            return message
        head = torch.zeros(HEAD, dtype=torch.int64)
        dist.broadcast(head, leader, group=group)
        row = torch.zeros(int(head[2]), dtype=torch.int64) if head[2] else None
        if row is not None:
            dist.broadcast(row, leader, group=group)
        return Message.of_head(head, row)

    @torch.no_grad()
    def _run(self, message: Message) -> None:
        """Run the row of a request. On the last stage, keep the parts of its state until they may be sent."""
        tokens, lengths, padded = message.host_row()
        positions = position_ids(padded.diff().numpy().astype("int64"))
        cut = self.context.row_shard.rows(padded)
        device = self.context.device
        row = [one.to(device, non_blocking=True) for one in (tokens[None, cut], positions[:, cut])]
        lengths, borders = (one.to(device, non_blocking=True) for one in (lengths, padded))
        joins = self.context.platform.transformer_engine
        packed = packed_documents(lengths, borders, message.max_seqlen, padding_joins_document=joins)
        if self.pipeline is not None and self.context.pp_rank > 0:
            # The row says how long it is: a teacher may read other rows than the student.
            shape = message.tokens // self._sequence_shards, 1, self.model.config.hidden_size
            self.model.set_input_tensor(self.pipeline.receive([shape])[0])
        with self.busy.running(device):
            state = self.model(*row, packed_seq_params=packed)
        self.model.set_input_tensor(None)
        if self.pipeline is not None and not self.context.holds_last_stage:
            self.pipeline.send([state])
            self.pipeline.wait_for_sends(MOST_SENDS)  # the next stage takes them in their order
            return
        bridge, parts = self.links.states[message.student], []
        if not self.model.config.sequence_parallel:
            state = state.chunk(self.context.tp_size)[self.context.tp_rank]
        for receiver, places in messages(padded, self._held, self.links.others, is_sender=True):
            is_all = is_whole(places, len(state))
            parts.append((receiver, state.contiguous() if is_all else state[places.to(device)]))
        self._ready[message.student, message.number] = parts, bridge.mark()
        self.most_kept = max(self.most_kept, len(self._ready))

    def _send(self, message: Message) -> None:
        """Send the state of a request, whose receive is posted."""
        parts, ready = self._ready.pop((message.student, message.number))
        bridge = self.links.states[message.student]
        for earlier in self._sending.get(message.student, ()):  # the student has taken that state
            earlier.wait()
        row = self.context.sizes.row
        sent = [bridge.send(part, row + receiver, ready) for receiver, part in parts]
        self._sending[message.student] = sent
