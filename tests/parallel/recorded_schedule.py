"""Run Megatron's 1F1B as one rank of a pipeline, and note what it does. The other ranks do not exist."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from mkd.parallel.pipeline import PipelineCommunicator

SHAPE = 3, 1, 4


@dataclass(frozen=True)
class Group:
    """One rank's view of a group."""

    number: int = 0
    ranks: int = 1

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


class Recorder(PipelineCommunicator):
    """Notes each exchange, (upper rank, whether something is received), and receives ones."""

    def __init__(self, group: Group, config: ModelParallelConfig, done: list):
        self.pp_group, self.config, self.done = group, config, done

    def _communicate(
        self,
        *,
        tensor_send_next,
        tensor_send_prev,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape,
        wait_on_reqs: bool = True,
    ):
        with_next = tensor_send_next is not None or recv_next
        assert wait_on_reqs and with_next != (tensor_send_prev is not None or recv_prev)
        self.done.append((self.pp_group.number - (not with_next), recv_prev or recv_next))
        received = torch.ones(SHAPE, requires_grad=True) if recv_prev else None
        return received, torch.ones(SHAPE) if recv_next else None, None


class Part(torch.nn.Module):
    """A stage that notes its forwards and backwards."""

    vp_stage, share_embeddings_and_output_weights = None, False
    model_type = ModelType.encoder_or_decoder

    def __init__(self, group: Group, config: ModelParallelConfig, done: list):
        super().__init__()
        self.weight, self.config, self.done = torch.nn.Parameter(torch.ones(4)), config, done
        self.is_last = group.number == group.ranks - 1
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        (self.received,) = tensors

    def forward(self) -> torch.Tensor:
        self.done.append("F")
        hidden = torch.ones(SHAPE) if self.received is None else self.received
        return self.noted(hidden * self.weight) if not self.is_last else hidden * self.weight

    def noted(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.register_hook(lambda _: self.done.append("B"))
        return tensor


def forward_step(_, part: Part):
    return part(), lambda output: (part.noted(output.sum()), torch.tensor(1), {})


def order_of_megatron(rank: int, ranks: int, microbatches: int) -> list:
    """Return F, B and the exchanges of one rank, as Megatron's schedule comes to them."""
    group, one, done = Group(rank, ranks), Group(), []
    config = ModelParallelConfig(pipeline_model_parallel_size=ranks, pipeline_dtype=torch.float32)
    config.hidden_size, config.calculate_per_token_loss, config.num_moe_experts = 4, False, None
    config.mtp_num_layers, config.fine_grained_activation_offloading = None, False
    schedules.forward_backward_pipelining_without_interleaving(
        forward_step_func=forward_step,
        data_iterator=None,
        model=Part(group, config, done),
        num_microbatches=microbatches,
        seq_length=SHAPE[0],
        micro_batch_size=1,
        p2p_communicator=Recorder(group, config, done),
        pg_collection=ProcessGroupCollection(tp=one, cp=one, embd=None, pos_embd=None, pp=group, dp_cp=one),
    )
    return done
