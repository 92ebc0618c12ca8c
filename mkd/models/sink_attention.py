"""Packed causal attention with sinks: a learned logit of each head that takes part in every softmax.

A sink weakens a query's output where no key matters, as in GPT-OSS (OpenAI 2025, model card, section 2.2).
Transformer Engine's kernels take no learned softmax with packs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mkd.models.attention import PackedAttention, _causal_mask, sharded_by_heads
from mkd.models.packed import PackedDocuments


class SinkAttention(PackedAttention):
    """Core attention with a sink for each head of this tensor-parallel rank.

    On GPUs the whole pack is one call of flex_attention, whose block mask skips other documents and keys
    beyond the window; the output is scaled by `sigmoid(log-sum-exp - sink)`. On the CPU there is a call for
    each document, with a further key of zeros. Context parallelism is refused before models are built.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        assert config.context_parallel_size == 1, "check_heads refuses context parallelism"
        super().__init__(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
        )
        self.tp_group = None if pg_collection is None else pg_collection.tp
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        device = torch.cuda.current_device()
        self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
        config.init_method(self.softmax_offset)
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,  # [t, heads, d]
        key: Tensor,  # [t, groups, d]
        value: Tensor,  # [t, groups, d]
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedDocuments,
    ) -> Tensor:  # [t, heads * d]
        if query.is_cuda:
            return self.whole_pack(query, key, value, packed_seq_params)
        return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params)

    def whole_pack(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedDocuments) -> Tensor:
        """Attend in one call: [t, heads, d], [t, groups, d] twice -> [t, heads * d].

        Padding attends to its document, which changes no other position. flex_attention has no backward on
        the CPU.
        """
        output, log_sum = _flex_attention(query.is_cuda)(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            block_mask=block_mask(packed, query.size(0), self.window, query.device),
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
            return_lse=True,
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # its kernel for short texts may not compile
        )
        share = torch.sigmoid(log_sum - self.softmax_offset.float()[None, :, None])  # of the keys, fp32
        output = (output * share[..., None]).to(query.dtype)
        return output[0].transpose(0, 1).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the causal attention of the last n of m tokens, with a key and value of zeros for the sink.

        Shapes: [n, heads, d], [m, groups, d] twice -> [n, heads, d].
        """
        n, m, heads = query.size(0), key.size(0), query.size(1)
        if n == 0:
            return query
        key, value = (x.repeat_interleave(heads // x.size(1), dim=1) for x in (key, value))
        key, value = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key, value))
        visible = _causal_mask(n, m, self.window or m, query.device)
        bias = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -torch.inf)
        sinks = self.softmax_offset.to(query.dtype)[:, None, None].expand(-1, n, 1)
        output = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            attn_mask=torch.cat((bias.expand(heads, -1, -1), sinks), dim=-1)[None],
            scale=self.scale,
        )
        return output[0].transpose(0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return Megatron's sharded state: sinks are cut over tensor parallel by heads."""
        return sharded_by_heads(self, "softmax_offset", self.tp_group, prefix, sharded_offsets, metadata)


def block_mask(packed: PackedDocuments, tokens: int, window: int | None, device: torch.device) -> BlockMask:
    """Return which keys the queries of a pack of `tokens` see. All layers with one window share the mask."""
    if window not in packed.block_masks:
        borders = packed.cu_seqlens_q_padded[1:].to(device)
        document = torch.searchsorted(borders, torch.arange(tokens, device=device), right=True)

        def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (document[query] == document[key]) & (query >= key)
            return seen if window is None else seen & (query - key < window)

        packed.block_masks[window] = create_block_mask(
            is_visible, None, None, tokens, tokens, device=device.type, _compile=device.type == "cuda"
        )
    return packed.block_masks[window]


@cache
def _flex_attention(is_compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(flex_attention) if is_compiled else flex_attention
