"""The gated delta net of Qwen3-Next and Qwen3.5, for packed documents.

A block is a key head with the value heads that share it. The rows of the input projection, the channels of
the convolution and the heads are all in the order of blocks. Tensor-parallel ranks hold runs of whole blocks,
and context-parallel ranks compute a run of those, so every parameter is a plain shard of the whole one.
Megatron's own module orders channels by rank, and takes no packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from mkd.families.layer_shape import DeltaShape
from mkd.models.mixers.pack_rows import PackRows, channels_to_rows, pack_rows, rows_to_channels
from mkd.models.mixers.recurrence import PackedRecurrence
from mkd.models.packed import PackedDocuments

NORM_EPSILON = 1e-6  # added to the squared length of queries and keys
OF_BLOCKS = ("conv_weight", "A_log", "dt_bias")  # parameters that are cut by blocks


@dataclass(frozen=True)
class DeltaNetParts:
    """The linear layers of a gated delta net: Megatron's local ones or Transformer Engine's."""

    column_linear: type  # without a norm inside
    row_linear: type


class DeltaNet(MegatronModule):
    """A gated delta net in the place of attention.

    It is a projection, a convolution, the recurrence, a gated norm and a projection. The norm of a head has
    one weight for all heads. Each rank has the gradient of its heads; their sum over the tensor-parallel
    group is taken in backward, with sequence parallelism too.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetParts,
        layer_number: int,
        *,
        mixer: DeltaShape,
        pg_collection: ProcessGroupCollection,
        **unused: object,  # what Megatron's layer hands to every attention
    ) -> None:
        super().__init__(config=config)
        self.mixer = mixer
        self.recurrence = PackedRecurrence()
        self.is_recomputed = (
            config.recompute_granularity == "selective" and "mixer" in config.recompute_modules
        )
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.blocks = mixer.key_heads // self.tp_group.size()
        assert mixer.key_heads % (self.tp_group.size() * self.cp_group.size()) == 0, "check_mixers refuses it"
        options = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj = submodules.column_linear(
            config.hidden_size,
            mixer.projected_width,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="in_proj",
            **options,
        )
        self._build_parameters()
        self.out_proj = submodules.row_linear(
            mixer.output_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="out_proj",
            **options,
        )

    def _build_parameters(self) -> None:
        """Build the parameters between the projections, with transformers' first values."""
        mixer, heads = self.mixer, self.blocks * self.mixer.heads_per_block
        options = dict(dtype=self.config.params_dtype, device=torch.cuda.current_device())
        channels = self.blocks * sum(mixer.convolved_parts)
        self.conv_weight = nn.Parameter(torch.empty(channels, 1, mixer.kernel_size, **options))
        self.config.init_method(self.conv_weight)
        self.A_log = nn.Parameter(torch.empty(heads, **options).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(heads, **options))
        self.norm_weight = nn.Parameter(torch.ones(mixer.value_dim, **options))
        for name in OF_BLOCKS:
            set_tensor_model_parallel_attributes(getattr(self, name), is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        hidden_states: Tensor,  # [t(/tp), 1, h], after the layer's norm
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedDocuments,
        **unused: object,  # what Megatron's layers hand to every attention
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [t(/tp), 1, h], and None in place of a bias."""
        projected = self.in_proj(hidden_states)[0][:, 0]
        shards = self.cp_group.size()
        rows = pack_rows(packed_seq_params, projected.size(0), shards, projected.device)
        if shards > 1:
            projected = rows_to_channels(projected, rows, self.cp_group)
        if self.is_recomputed and self.training:
            output = tensor_parallel.checkpoint(lambda x: self._mix(x, rows), False, projected)
        else:
            output = self._mix(projected, rows)
        if shards > 1:
            output = channels_to_rows(output, rows, self.cp_group)
        return self.out_proj(output[:, None])

    def _mix(self, projected: Tensor, rows: PackRows) -> Tensor:
        """Return the normalised and gated output of all rows.

        Shapes: [t, blocks * projected] -> [t, blocks * output]. The blocks are those of this rank: with
        context parallelism a part of those whose weights it holds. The recurrence and the statistics are in
        fp32, as in transformers.
        """
        mixer, each = self.mixer, self.mixer.heads_per_block
        filters, a_log, dt_bias = map(self._of_this_rank, (self.conv_weight[:, 0], self.A_log, self.dt_bias))
        projected = projected.unflatten(1, (-1, sum(mixer.projected_parts)))
        mixed, z, b, a = projected.split(
            (sum(mixer.convolved_parts), each * mixer.value_dim, each, each), dim=-1
        )
        mixed = F.silu(self.recurrence.convolve(mixed.flatten(1), filters, rows))
        q, k, v = mixed.unflatten(1, (-1, sum(mixer.convolved_parts))).split(mixer.convolved_parts, dim=-1)
        q, k = (_unit(_wide(x)).repeat_interleave(each, dim=1) for x in (q, k))
        v, z = (x.reshape(x.size(0), -1, mixer.value_dim) for x in (v, z))
        b, a = (x.reshape(x.size(0), -1) for x in (b, a))
        g = -_wide(a_log).exp() * F.softplus(_wide(a) + dt_bias)
        output = self.recurrence.delta_rule(q * mixer.key_dim**-0.5, k, _wide(v), g, _wide(b.sigmoid()), rows)
        return self._gated_norm(output.to(projected.dtype), z).flatten(1)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:  # [t, heads, dv] twice -> the same
        """Return RMSNorm of every head times SiLU of the gate."""
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        return ((weight * (wide * scale).to(x.dtype)) * F.silu(_wide(gate))).to(x.dtype)

    def _of_this_rank(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter, cut by blocks, that this context-parallel rank computes with.

        Its gradient is 0 elsewhere. DDP sums over the context-parallel ranks.
        """
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return Megatron's sharded state: parameters of blocks are cut over tensor parallel."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = dict(self.named_parameters(recurse=False))
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(OF_BLOCKS, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "out_proj"):
            linear = getattr(self, name)
            state |= linear.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return state


def _wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor) -> Tensor:
    """Return `x` with vectors of length 1 in the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
