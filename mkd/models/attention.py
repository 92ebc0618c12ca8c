"""Packed (THD) causal attention, one SDPA call per document.

Used on machines without Transformer Engine, or without its kernel.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mkd.models.packed import PackedDocuments
from mkd.parallel.zigzag import RowShard


class PackedAttention(nn.Module):
    """Core attention that Megatron's `SelfAttention` calls; documents of a pack never see each other.

    Padding (the positions between a document's real and padded length) gives zeros and is never attended to.
    With context parallelism a rank's queries attend to the keys and values of the whole pack, all-gathered
    over the group.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        cp_comm_type=None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,  # sizes follow from the tensors
        v_channels: int | None = None,
        pg_collection=None,
    ):
        super().__init__()
        self.scale = softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None
        self.deterministic = config.deterministic_mode  # in backward, the other kernels add up in any order
        self.shard, self.cp_group = RowShard(), None
        if config.context_parallel_size > 1:
            self.cp_group = pg_collection.cp
            self.shard = RowShard(self.cp_group.rank(), config.context_parallel_size)

    def forward(
        self,
        query: Tensor,  # [t, heads, d], t the tokens of this context-parallel rank
        key: Tensor,  # [t, groups, d]
        value: Tensor,  # [t, groups, v]
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedDocuments,
    ) -> Tensor:  # [t, heads * v]
        assert attention_mask is None and attention_bias is None, (
            "packs carry their structure in packed_seq_params"
        )
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        spans = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
        if not self.shard.is_whole:
            key, value = self._whole_pack(key, value, packed_seq_params.cu_seqlens_q_padded)
        queries = query.split([span // self.shard.size for span in spans])
        # Empty outputs, but part of the graph: a rank with padding only must join the reduction in backward.
        outputs = [tensor[:0].reshape(0, query.size(1), value.size(2)) for tensor in (key, value)]
        for length, span, q, k, v in zip(
            lengths, spans, queries, key.split(spans), value.split(spans), strict=True
        ):
            parts = self.shard.parts(span)
            for (first, last), part in zip(
                parts, q.split([last - first for first, last in parts]), strict=True
            ):
                end = max(first, min(last, length))  # the end of the part's real tokens
                attended = self._attend(part[: end - first], k[:end], v[:end])
                outputs.append(F.pad(attended, (0, 0, 0, 0, 0, last - end)))
        return torch.cat(outputs).flatten(1)

    def _whole_pack(self, key: Tensor, value: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all ranks in document order.

        Shapes: [t, groups, d] and [t, groups, v] -> the same with cp * t rows. All-gather over context
        parallel. Backward: reduce-scatter SUM, each rank gets the gradient of its rows.
        """
        gathered = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=self.cp_group)
        shards = (RowShard(rank, self.shard.size) for rank in range(self.shard.size))
        rows = [shard.rows(cu_seqlens_padded) for shard in shards]
        order = torch.cat(rows).argsort().to(key.device)  # the inverse of the permutation that the ranks hold
        return gathered[order].split((key.size(-1), value.size(-1)), dim=-1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the causal attention of the last n of m tokens.

        Shapes: [n, heads, d], [m, groups, d], [m, groups, v] -> [n, heads, v].
        """
        n, m = query.size(0), key.size(0)
        if n == 0:
            return query.reshape(0, query.size(1), value.size(2))
        masked = n < m or (self.window is not None and m > self.window)
        # The kernels for these cases take no groups of heads.
        if query.is_cuda and (masked or query.dtype == torch.float32):
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
        with sdpa_kernel(SDPBackend.MATH) if self.deterministic else nullcontext():
            output = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                attn_mask=_causal_mask(n, m, self.window or m, query.device) if masked else None,
                is_causal=not masked,
                scale=self.scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        return output[0].transpose(0, 1)


def _causal_mask(n: int, m: int, window: int, device: torch.device) -> Tensor:
    """Return the mask, bool [n, m], of the last n of m positions.

    The query at position i sees the key at position j if 0 <= i - j < window.
    """
    position = torch.arange(m, device=device)
    distance = position[m - n :, None] - position[None, :]
    return (distance >= 0) & (distance < window)
