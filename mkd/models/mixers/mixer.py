"""`Mixer`: what all mixers share, a module in the place of attention for packed documents.

The rows of the input projection, the channels of the convolution and the heads are all in the order of
blocks, see `MixerShape`. Tensor-parallel ranks hold runs of whole blocks, and context-parallel ranks compute
a run of those, so every parameter is a plain shard of the whole one. Megatron's own modules order channels by
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from mkd.families.mixer_shape import MixerShape
from mkd.models.mixers.fused_recurrence import FusedRecurrence, require_kernels
from mkd.models.mixers.pack_rows import PackRows, channels_to_rows, pack_rows, rows_to_channels
from mkd.models.mixers.recurrence import PackedRecurrence
from mkd.models.packed import PackedDocuments
from mkd.plan.models.mixer_kernels import unfused_reason


@dataclass(frozen=True)
class MixerParts:
    """The linear layers of a mixer: Megatron's local ones or Transformer Engine's."""

    column_linear: type  # without a norm inside
    row_linear: type


class Mixer(MegatronModule):
    """A projection, then what a kind of mixer does with the rows of a pack, and a projection."""

    of_blocks: ClassVar[tuple[str, ...]]  # names of the parameters that are cut by blocks

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerParts,
        layer_number: int,
        *,
        mixer: MixerShape,
        pg_collection: ProcessGroupCollection,
        **unused: object,  # what Megatron's layer hands to every attention
    ) -> None:
        super().__init__(config=config)
        self.mixer: Any = mixer  # of the kind of the class
        self.recurrence = _recurrence(config, mixer)
        self.is_recomputed = (
            config.recompute_granularity == "selective" and "mixer" in config.recompute_modules
        )
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.blocks = mixer.blocks // self.tp_group.size()
        assert mixer.blocks % (self.tp_group.size() * self.cp_group.size()) == 0, "check_mixers refuses it"
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
        self._build_parameters(dict(dtype=config.params_dtype, device=torch.cuda.current_device()))
        for name in self.of_blocks:
            set_tensor_model_parallel_attributes(getattr(self, name), is_parallel=True, dim=0, stride=1)
        self.out_proj = submodules.row_linear(
            mixer.output_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="out_proj",
            **options,
        )

    def _build_parameters(self, options: dict[str, Any]) -> None:
        """Build the parameters between the projections, with transformers' first values.

        `options` are dtype and device.
        """
        raise NotImplementedError

    def _build_convolution(self, options: dict[str, Any]) -> None:
        """Build the filters of the convolution."""
        channels = self.blocks * sum(self.mixer.convolved_parts)
        self.conv_weight = nn.Parameter(torch.empty(channels, 1, self.mixer.kernel_size, **options))
        self.config.init_method(self.conv_weight)

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
        context parallelism a part of those whose weights it holds.
        """
        raise NotImplementedError

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
            dict.fromkeys(self.of_blocks, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "out_proj"):
            linear = getattr(self, name)
            state |= linear.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return state


def _recurrence(config: TransformerConfig, mixer: MixerShape) -> PackedRecurrence:
    """Return the operations of a mixer: fused kernels on GPUs where they can run.

    Raises UsageError if fla-core is installed, and its kernels cannot be imported.
    """
    settings = dict(is_bf16=config.params_dtype == torch.bfloat16, is_exact=config.deterministic_mode)
    if not torch.cuda.is_available() or unfused_reason(mixer, **settings) is not None:
        return PackedRecurrence()
    require_kernels()
    return FusedRecurrence()
