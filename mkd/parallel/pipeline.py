"""Send pipeline messages, which outlive the schedule's own references and carry the teachers' hidden states.

Megatron's schedules send and receive ONE tensor a hop, always through `P2PCommunicator._communicate`, the one
method overridden here. The other tensors, the *teacher_hiddens*, are an attribute of that tensor. A stage
attaches them to its output, the communicator sends them and attaches the received ones, and the next stage
takes them off. While the teachers run ahead as a pipeline of their own, there are none
(`mkd/train/teacher_prefetch.py`), and none without a teacher.

Every run uses this communicator, with teachers or without. The schedules free an output as soon as it is
posted; Megatron's own communicator then sends memory that may already hold something else.

Elements sent per micro-batch and hop, each divided over cp, and over tp with sequence parallelism:

    forward     T * h_student, and T_i * h_i for every teacher i (T_i differs from T with another tokenizer)
    backward    T * h_student; a frozen teacher has no gradient
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor

_TEACHER_HIDDENS = "mkd_teacher_hiddens"


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
        self.while_waiting: Callable[[], None] | None = None
        """Called between posting a receive and waiting for it. If set, there are no teacher_hiddens."""
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
        carried = () if self.while_waiting else self.teacher_hidden_shapes
        teacher_hiddens_out = take_teacher_hidden(tensor_send_next)
        teacher_hiddens_in = [
            self._empty(shape, self.config.pipeline_dtype).requires_grad_(False)
            for shape in carried
            if recv_prev
        ]
        expected = 0 if tensor_send_next is None else len(carried)
        assert len(teacher_hiddens_out) == expected, (
            "a forward activation left its stage without its teacher_hiddens"
        )
        post = self._post_batched if self.config.batch_p2p_comm else self._post_single
        transfers = post(
            send_prev=_alias(tensor_send_prev),
            recv_prev=received,
            recv_teacher_hiddens=teacher_hiddens_in,
            send_next=_alias(tensor_send_next),
            send_teacher_hiddens=teacher_hiddens_out,
            recv_next=gradient,
        )
        if received is not None:
            attach_teacher_hidden(received, teacher_hiddens_in)
        if wait_on_reqs:
            if self.while_waiting and (recv_prev or recv_next):
                self.while_waiting()
            for transfer in transfers.values():
                transfer.wait()
            return received, gradient, None
        self._keep_until_sent(transfers)
        return received, gradient, transfers

    def _empty(self, shape, dtype: torch.dtype) -> Tensor:
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
