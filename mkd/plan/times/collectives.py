"""Collectives of tensor, context, expert and data parallelism: the time that nothing hides.

On n processes with a bus bandwidth of B an all-gather or a reduce-scatter takes S (n - 1) / n / B, where each
process has S bytes in full, and an all-reduce of S bytes twice that (NCCL tests, doc/PERFORMANCE.md).

A layer has two blocks that tensor parallelism splits, attention and MLP. Each begins with column-parallel
products and ends with a row-parallel one. Hidden states [t, h] need, in each block,

                 without sequence parallelism        with it
    forward      all-reduce of the output            all-gather of the input
                                                     reduce-scatter of the output
    backward     all-reduce of the input's gradient  all-gather of the output's gradient
                 (weight gradient)                   all-gather of the input (input's gradient)
                                                     reduce-scatter of the input's gradient (weight gradient)

Those with a product in brackets are started beside it. They count all the same: a product takes all
multiprocessors, so that a collective waits for its end. Only 33 of 233 ms ran beside other kernels
(docs/performance.md, "Tensor parallelism and the CPU"). Latent attention gathers its latents in place of the
input. Routed experts are whole, so that a layer with experts has a second block only for shared ones.

With context parallelism, keys and values of each of n processes go round in n - 1 sends. Each send runs
beside the attention to one n-th of the keys. Backward sends gradients too and computes twice as much. Models
with sliding windows exchange queries, keys, values and outputs in all-to-alls instead, which nothing hides.
So do mixers with the output of their first products and the input of their last.

With expert parallelism, n neighbouring processes share the experts, and each sends the hidden state of its t
tokens to k experts. If all experts are chosen equally often, 1/n of the rows stay, and one all-to-all moves
out of each process

    t k h e (n - 1) / n    bytes, for hidden size h and e bytes an element.

A forward has two of them (to the experts and back), a backward two. On one machine they use the links between
its GPUs. On several machines of m GPUs, (m - 1) / n of the rows stay on the machine and (n - m) / n cross the
network. Both move at the same time, so that the slower part counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mkd.families.layer_shape import LayerShape
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.times.hardware import (
    COLLECTIVE_BYTES_PER_MS,
    EXCHANGE_BYTES_PER_MS,
    LINK_BYTES_PER_MS,
    MACHINE,
    NETWORK_BYTES_PER_MS,
    PAIR_BYTES_PER_MS,
)


def gather_ms(nbytes: float, processes: int) -> float:
    """Return the milliseconds of an all-gather to, or a reduce-scatter from, `nbytes` on each process.

    An all-reduce takes twice as long. Neighbouring processes share it.
    """
    moved = nbytes * (processes - 1) / processes
    return moved / _bandwidth(processes, PAIR_BYTES_PER_MS if processes == 2 else COLLECTIVE_BYTES_PER_MS)


def replicas_gather_ms(nbytes: float, copies: int, on_machine: int) -> float:
    """Return the milliseconds of such a collective of `copies` processes, so many of them on each machine.

    Across machines each of them sends over a network link of its own.
    """
    if copies <= on_machine:
        return gather_ms(nbytes, copies)
    bandwidth = min(COLLECTIVE_BYTES_PER_MS, on_machine * NETWORK_BYTES_PER_MS)
    return nbytes * (copies - 1) / copies / bandwidth


def _bandwidth(span: int, on_machine: float) -> float:
    """Return bytes per ms between processes that span so many neighbours."""
    return on_machine if span <= MACHINE else NETWORK_BYTES_PER_MS


def split_widths(shape: ModelShape, layer: LayerShape) -> Iterator[int]:
    """Yield the channels of a token that enter the blocks of a layer that tensor parallelism splits."""
    shape, mla = shape.for_layer(layer), layer.mla
    if layer.mixes_tokens:
        if mla is None or layer.mixer is not None:
            yield shape.hidden_size
        else:
            yield (mla.q_lora_rank or shape.hidden_size) + mla.kv_lora_rank + mla.qk_rope_head_dim
    if layer.moe.shared_ffn_hidden_size if layer.moe else layer.ffn_hidden_size:
        yield shape.hidden_size


@dataclass(frozen=True)
class ModelCollectives:
    """Gives the times of one model's collectives for a micro-batch."""

    sizes: Sizes
    sequence_parallel: bool
    shape: ModelShape
    channel_bytes: float  # of one channel, for all tokens of a context-parallel process

    def forward_ms(self, width: int) -> float:
        """Return the time of the collectives in forward of a block that so many channels enter."""
        entering = width if self.sequence_parallel else self.shape.hidden_size
        return self._gather_ms(entering) + self._gather_ms(self.shape.hidden_size)

    def backward_ms(self, width: int) -> float:
        """Return the time of its collectives in backward."""
        entering_ms = 2 * self._gather_ms(width)
        return entering_ms + self.sequence_parallel * self._gather_ms(self.shape.hidden_size)

    def layer_ms(self, layer: LayerShape) -> tuple[float, float]:
        """Return the time of forward and backward in a layer, without context parallelism."""
        widths = list(split_widths(self.shape, layer))
        return sum(map(self.forward_ms, widths)), sum(map(self.backward_ms, widths))

    def shared_experts_ms(self, layer: LayerShape) -> float:
        """Return the time of the forward of a layer's shared experts."""
        return (
            sum(map(self.forward_ms, list(split_widths(self.shape, layer))[layer.mixes_tokens :]))
            if layer.moe
            else 0.0
        )

    def context_ms(self, layer: LayerShape, attention_ms: float) -> tuple[float, float]:
        """Return the time of context parallelism in forward and backward beside attention's forward time."""
        tensor, context = self.sizes.tensor, self.sizes.context
        if not layer.mixes_tokens:
            return 0.0, 0.0
        if layer.mixer is not None:
            both_ms = self._exchange_ms((layer.mixer.projected_width + layer.mixer.output_width) // tensor)
            return both_ms, both_ms
        shape = self.shape.for_layer(layer)
        groups = shape.padded_query_groups(tensor) // tensor
        of_group = shape.head_dim + shape.value_dim
        if shape.sliding_windows:
            both_ms = self._exchange_ms(groups * (1 + shape.heads_per_group) * of_group)
            return both_ms, both_ms
        send_ms = groups * of_group * self.channel_bytes / _bandwidth(self.sizes.row, LINK_BYTES_PER_MS)
        late_ms = (context - 1) * max(0.0, send_ms - attention_ms / context)
        return late_ms, 2 * late_ms

    def _exchange_ms(self, channels: int) -> float:
        """Return the time of all-to-alls over context parallel that move so many channels of every token."""
        moved = channels * self.channel_bytes * (self.sizes.context - 1) / self.sizes.context
        return moved / _bandwidth(self.sizes.row, EXCHANGE_BYTES_PER_MS)

    def embedding_ms(self) -> tuple[float, float]:
        """Return the time of forward and backward around a vocabulary-parallel embedding."""
        gather_ms = self._gather_ms(self.shape.hidden_size)
        return (gather_ms, gather_ms) if self.sequence_parallel else (2 * gather_ms, 0.0)

    def head_ms(self, reads: float, gradients: float) -> tuple[float, float]:
        """Return the time of forward and backward around a vocabulary-parallel head.

        Forward reads the hidden states so many times, and backward has the gradients of some.
        """
        gather_ms = self._gather_ms(self.shape.hidden_size)
        if self.sequence_parallel:
            return reads * gather_ms, gradients * gather_ms
        return 0.0, 2 * gradients * gather_ms

    def _gather_ms(self, channels: int) -> float:
        return gather_ms(channels * self.channel_bytes, self.sizes.tensor)


def exchange_ms(rows: int, hidden_size: int, element: int, expert_parallel: int) -> float:
    """Return the milliseconds of one all-to-all of `rows` (tokens x experts of a token).

    It is 0 if one process has all experts.
    """
    each = rows * hidden_size * element / expert_parallel  # to one process
    near = min(expert_parallel, MACHINE) - 1
    far = max(0, expert_parallel - MACHINE)
    return max(near * each / EXCHANGE_BYTES_PER_MS, far * each / NETWORK_BYTES_PER_MS)
