"""Point-to-point communication of the pair: the teacher's hidden state rides along with the student's activation.

Megatron's schedules send and receive ONE tensor a hop. Everything they do goes through `P2PCommunicator._communicate`, so
that method alone is overridden here. The second tensor, the *rider*, is an attribute of the first: the stage puts it on its
output, the communicator sends it and puts the received one on the received activation, the next stage takes it off.

On the wire, per micro-batch and hop: forward `T * (h_student + h_teacher)` elements (over cp, and over tp with sequence
parallelism), backward `T * h_student`: a frozen teacher has no gradient, so none is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor

_RIDER = "mkd_rider"


def attach_rider(activation: Tensor, rider: Tensor | None) -> Tensor:
    """Put `rider` on `activation` and return it. The rider is data: it carries no graph."""
    if rider is not None:
        setattr(activation, _RIDER, rider.detach())
    return activation


def take_rider(activation: Tensor | None) -> Tensor | None:
    """Remove and return the rider of `activation`, so that it does not live until the backward pass."""
    return None if activation is None else activation.__dict__.pop(_RIDER, None)


@dataclass
class _Transfer:
    """Requests of one direction, with the tensors they read: the schedule frees its outputs right after posting."""

    requests: list[dist.Work]
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        for request in self.requests:
            request.wait()
        self.requests, self.tensors = [], ()


class PairCommunicator(p2p_communication.P2PCommunicator):
    """Megatron's communicator, with the rider of `rider_shape` (the teacher's hidden state) added to forward messages."""

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        rider_shape: tuple[int, ...],  # [T / cp (/ tp if sequence parallel), 1, h_teacher]
        rider_dtype: torch.dtype,
    ):
        super().__init__(pp_group, config)
        self.rider_shape, self.rider_dtype = rider_shape, rider_dtype
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
        """Same contract as Megatron's: (received activation, received gradient, requests by direction or None)."""
        received = self._empty(tensor_shape, self.config.pipeline_dtype) if recv_prev else None
        gradient = self._empty(tensor_shape, self.config.pipeline_dtype) if recv_next else None
        rider_out = take_rider(tensor_send_next)
        rider_in = self._empty(self.rider_shape, self.rider_dtype).requires_grad_(False) if recv_prev else None
        assert tensor_send_next is None or rider_out is not None, "a forward activation left its stage without a rider"
        post = self._post_batched if self.config.batch_p2p_comm else self._post_single
        transfers = post(
            send_prev=_alias(tensor_send_prev),
            recv_prev=received,
            recv_rider=rider_in,
            send_next=_alias(tensor_send_next),
            send_rider=rider_out,
            recv_next=gradient,
        )
        if received is not None:
            attach_rider(received, rider_in)
        if wait_on_reqs:
            for transfer in transfers.values():
                transfer.wait()
            return received, gradient, None
        self._keep_until_sent(transfers)
        return received, gradient, transfers

    def _empty(self, shape, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=True)

    def _post_batched(self, *, send_prev, recv_prev, recv_rider, send_next, send_rider, recv_next):
        """One grouped launch; every rank appends in the same order, so that messages of a pair of ranks match."""
        operations = [
            dist.P2POp(function, tensor, peer, self.pp_group)
            for function, tensor, peer in (
                (dist.isend, send_prev, self.prev_rank),
                (dist.irecv, recv_prev, self.prev_rank),
                (dist.irecv, recv_rider, self.prev_rank),
                (dist.isend, send_next, self.next_rank),
                (dist.isend, send_rider, self.next_rank),
                (dist.irecv, recv_next, self.next_rank),
            )
            if tensor is not None
        ]
        requests = dist.batch_isend_irecv(operations) if operations else []
        return {"all": _Transfer(requests, tuple(operation.tensor for operation in operations))}

    def _post_single(self, *, send_prev, recv_prev, recv_rider, send_next, send_rider, recv_next):
        """Megatron's ordering of single requests (it alternates between even and odd ranks), the rider right behind."""
        peers = dict(group=self.pp_group, prev_pipeline_rank=self.prev_rank, next_pipeline_rank=self.next_rank)
        main = p2p_communication._p2p_ops(
            tensor_send_prev=send_prev,
            tensor_recv_prev=recv_prev,
            tensor_send_next=send_next,
            tensor_recv_next=recv_next,
            **peers,
        )
        rider = p2p_communication._p2p_ops(
            tensor_send_prev=None,
            tensor_recv_prev=recv_rider,
            tensor_send_next=send_rider,
            tensor_recv_next=None,
            **peers,
        )
        tensors = {"send_prev": (send_prev,), "send_next": (send_next, send_rider)}
        return {
            name: _Transfer([r for r in (main[name], rider.get(name)) if r is not None], tensors.get(name, ()))
            for name in main
        }

    def _keep_until_sent(self, transfers: dict[str, _Transfer]) -> None:
        """Hold what is being sent until it has left, whether or not the schedule waits for it."""
        self._sending = [t for t in self._sending if not all(r.is_completed() for r in t.requests)]
        self._sending += [transfer for name, transfer in transfers.items() if name.startswith("send")]


def _alias(tensor: Tensor | None) -> Tensor | None:
    """The same storage under another tensor: freeing the schedule's `.data` does not touch it."""
    return None if tensor is None else tensor.detach()
