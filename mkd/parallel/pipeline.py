"""Send pipeline messages, which outlive the schedule's own references and carry the teachers' hidden states.

Megatron's schedules send and receive ONE tensor a hop, always through `P2PCommunicator._communicate`, the one
method overridden here. The other tensors, the *teacher_hiddens*, are an attribute of that tensor. A stage
attaches them to its output, the communicator sends them and attaches the received ones, and the next stage
takes them off. While the teachers run ahead (`mkd/train/teacher_prefetch.py`), states of later micro-batches
go with the student's messages instead, as many as a plan says, also with those that carry a gradient alone.

Every run uses this communicator, with teachers or without. The schedules free an output as soon as it is
posted; Megatron's own communicator then sends memory that may already hold something else.

Elements sent per micro-batch and hop, each divided over cp, and over tp with sequence parallelism:

    forward     T * h_student, and T_i * h_i for every teacher i (T_i differs from T with another tokenizer)
    backward    T * h_student; a frozen teacher has no gradient

With teachers ahead, states go down with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor

_TEACHER_HIDDENS = "mkd_teacher_hiddens"

State = tuple[Tensor, ...]
"""The teachers' hidden states of one micro-batch, [t_i / cp (/ tp), 1, h_i] each."""


class Passengers(Protocol):
    """Work for the teachers beside the messages of the student."""

    def departing(self) -> Sequence[State]:
        """Return the states that go with the next exchange with the rank behind."""

    def arriving(self) -> int:
        """Return how many come with the next exchange with the rank before."""

    def arrived(self, states: Sequence[State]) -> None:
        """Take the states that have come."""

    def fill_gap(self) -> None:
        """Work between posting a receive of the student and waiting for it."""


def attach_teacher_hidden(activation: Tensor, teacher_hiddens: Sequence[Tensor]) -> Tensor:
    """Attach `teacher_hiddens`, detached from any graph, to `activation` and return it."""
    if teacher_hiddens:
        setattr(
            activation, _TEACHER_HIDDENS, tuple(teacher_hidden.detach() for teacher_hidden in teacher_hiddens)
        )
    return activation


def take_teacher_hidden(activation: Tensor | None) -> tuple[Tensor, ...]:
    """Remove and return the teacher_hiddens of `activation`, to free them before the backward pass."""
    return () if activation is None else activation.__dict__.pop(_TEACHER_HIDDENS, ())


@dataclass
class _Transfer:
    """Requests of one direction and the tensors they read, because the schedule frees its outputs early."""

    requests: list[dist.Work]
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        for request in self.requests:
            request.wait()
        self.requests, self.tensors = [], ()


class PipelineCommunicator(p2p_communication.P2PCommunicator):
    """Megatron's communicator, which keeps messages until they are sent.

    Its forward messages also carry a teacher_hidden for each teacher, in the dtype of the pipeline.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        # One shape for each teacher: [t / cp (/ tp if sequence parallel), 1, h], t its own number of tokens.
        teacher_hidden_shapes: Sequence[tuple[int, ...]] = (),
    ):
        super().__init__(pp_group, config)
        self.teacher_hidden_shapes = tuple(teacher_hidden_shapes)
        self.passengers: Passengers | None = None
        """If set, there are no teacher_hiddens of the student's own micro-batch."""
        self._sending: list[_Transfer] = []

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape,
        wait_on_reqs: bool = True,
    ):
        """Send and receive like Megatron's method. Return (activation, gradient, requests or None)."""
        received = self._empty(tensor_shape, self.config.pipeline_dtype) if recv_prev else None
        gradient = self._empty(tensor_shape, self.config.pipeline_dtype) if recv_next else None
        with_next = tensor_send_next is not None or recv_next
        with_prev = tensor_send_prev is not None or recv_prev
        teacher_hiddens_out = take_teacher_hidden(tensor_send_next)
        riding = self.passengers
        if riding is None:
            num_in, num_out = int(recv_prev), int(tensor_send_next is not None)
        else:
            departing = riding.departing() if with_next else ()
            teacher_hiddens_out = (*teacher_hiddens_out, *(one for state in departing for one in state))
            num_in, num_out = riding.arriving() if with_prev else 0, len(departing)
        assert len(teacher_hiddens_out) == num_out * len(self.teacher_hidden_shapes), (
            "a forward activation left its stage without its teacher_hiddens"
        )
        states_in = [self._empty_state() for _ in range(num_in)]
        teacher_hiddens_in = [one for state in states_in for one in state]
        post = self._post_batched if self.config.batch_p2p_comm else self._post_single
        transfers = post(
            send_prev=_alias(tensor_send_prev),
            recv_prev=received,
            recv_teacher_hiddens=teacher_hiddens_in,
            send_next=_alias(tensor_send_next),
            send_teacher_hiddens=teacher_hiddens_out,
            recv_next=gradient,
        )
        if riding is None and received is not None:
            attach_teacher_hidden(received, teacher_hiddens_in)
        if wait_on_reqs:
            if riding is not None and (recv_prev or recv_next):
                riding.fill_gap()
            for transfer in transfers.values():
                transfer.wait()
            if riding is not None and with_prev:
                riding.arrived(states_in)
            return received, gradient, None
        self._keep_until_sent(transfers)
        return received, gradient, transfers

    def send_states(self, states: Sequence[State]) -> None:
        """Send states to the next rank, and wait. The receiver knows how many."""
        self._exchange_alone(states_out=states)

    def receive_states(self, number: int) -> list[State]:
        """Return that many states of the rank before."""
        states = [self._empty_state() for _ in range(number)]
        self._exchange_alone(states_in=states)
        return states

    def _exchange_alone(self, states_in: Sequence[State] = (), states_out: Sequence[State] = ()) -> None:
        transfers = self._post_batched(
            send_prev=None,
            recv_prev=None,
            recv_teacher_hiddens=[one for state in states_in for one in state],
            send_next=None,
            send_teacher_hiddens=[one for state in states_out for one in state],
            recv_next=None,
        )
        for transfer in transfers.values():
            transfer.wait()

    def _empty_state(self) -> State:
        dtype = self.config.pipeline_dtype
        return tuple(self._empty(shape, dtype).requires_grad_(False) for shape in self.teacher_hidden_shapes)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=True)

    def _post_batched(
        self, *, send_prev, recv_prev, recv_teacher_hiddens, send_next, send_teacher_hiddens, recv_next
    ):
        """Post one grouped launch. All ranks append in the same order, so that messages of a pair match."""
        operations = [
            dist.P2POp(function, tensor, peer, self.pp_group)
            for function, tensors, peer in (
                (dist.isend, [send_prev], self.prev_rank),
                (dist.irecv, [recv_prev, *recv_teacher_hiddens], self.prev_rank),
                (dist.isend, [send_next, *send_teacher_hiddens], self.next_rank),
                (dist.irecv, [recv_next], self.next_rank),
            )
            for tensor in tensors
            if tensor is not None
        ]
        requests = dist.batch_isend_irecv(operations) if operations else []
        return {"all": _Transfer(requests, tuple(operation.tensor for operation in operations))}

    def _post_single(
        self, *, send_prev, recv_prev, recv_teacher_hiddens, send_next, send_teacher_hiddens, recv_next
    ):
        """Post single requests in Megatron's order, which alternates by rank; then the teacher_hiddens."""
        peers = dict(
            group=self.pp_group, prev_pipeline_rank=self.prev_rank, next_pipeline_rank=self.next_rank
        )
        posted = [
            p2p_communication._p2p_ops(
                tensor_send_prev=send_prev,
                tensor_recv_prev=recv_prev,
                tensor_send_next=send_next,
                tensor_recv_next=recv_next,
                **peers,
            )
        ]
        for sent, received in zip_longest(send_teacher_hiddens, recv_teacher_hiddens):
            posted.append(
                p2p_communication._p2p_ops(
                    tensor_send_prev=None,
                    tensor_recv_prev=received,
                    tensor_send_next=sent,
                    tensor_recv_next=None,
                    **peers,
                )
            )
        tensors = {"send_prev": (send_prev,), "send_next": (send_next, *send_teacher_hiddens)}
        return {
            name: _Transfer(
                [request[name] for request in posted if request.get(name) is not None], tensors.get(name, ())
            )
            for name in posted[0]
        }

    def _keep_until_sent(self, transfers: dict[str, _Transfer]) -> None:
        """Hold tensors until they are sent, whether or not the schedule waits for the requests."""
        self._sending = [t for t in self._sending if not all(r.is_completed() for r in t.requests)]
        self._sending += [transfer for name, transfer in transfers.items() if name.startswith("send")]


def _alias(tensor: Tensor | None) -> Tensor | None:
    """Return another tensor over the same storage, which survives when the schedule frees `tensor.data`."""
    return None if tensor is None else tensor.detach()
