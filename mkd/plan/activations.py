"""What one micro-batch of a model keeps in memory, tensor by tensor.

Counted for a pre-norm SwiGLU layer with grouped-query attention, as Megatron-core 0.16.1 runs it with Transformer Engine 2.11
on packed (THD) batches. For t tokens, hidden size h, query width q, key/value width k, MLP width f (q, k, f of one
tensor-parallel process; h-wide tensors are divided by tp with sequence parallelism), backward needs, in elements:

    attention norm     input t h, output t h (LayerNormLinear saves both; the residual is the same input)
    q and k norm       inputs t (q + k)                     (Qwen3; before them the joint projection is freed)
    attention          q, k, v after RoPE t (q + 2 k), output t q (also the projection's input), softmax statistics t heads fp32
    MLP norm           input t h, output t h
    SwiGLU             input 2 t f, output t f (also the projection's input)

and one fp32 value per row for every norm. RoPE saves its angles only, dropout is off, bias and residual additions save nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.schema import Config
from mkd.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Activations:
    """Sizes of one model's activations on one process, bytes per micro-batch."""

    config: Config
    shape: ModelShape
    element: int  # bytes of an activation
    seq_length: int  # tokens of a pack

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on this context-parallel process."""
        return (
            self.config.training.micro_batch_size
            * self.seq_length
            // self.config.parallel.context_parallel_size
        )

    @property
    def is_sharded(self) -> bool:
        """Whether hidden states are split over the tensor-parallel processes."""
        return self.config.parallel.sequence_parallel and self.config.parallel.tensor_model_parallel_size > 1

    @property
    def full_hidden_bytes(self) -> int:
        """One hidden state of all tokens, [t, h]."""
        return self.tokens * self.shape.hidden_size * self.element

    @property
    def hidden_bytes(self) -> int:
        """One hidden state as it lies between layers, [t(/tp), h]."""
        return self.full_hidden_bytes // (
            self.config.parallel.tensor_model_parallel_size if self.is_sharded else 1
        )

    @property
    def _heads(self) -> tuple[int, int]:
        """(query heads, key/value heads) of one process, padded ones included."""
        tensor = self.config.parallel.tensor_model_parallel_size
        groups = self.shape.padded_query_groups(tensor) // tensor
        return groups * self.shape.heads_per_group, groups

    @property
    def _ffn_bytes(self) -> int:
        """[t, f] of one process."""
        return (
            self.tokens
            * self.shape.ffn_hidden_size
            // self.config.parallel.tensor_model_parallel_size
            * self.element
        )

    def layer_bytes(self) -> int:
        """What one decoder layer keeps until its backward.

        Selective recomputation drops the softmax statistics only, and keeps the joint projection alive through v.
        """
        heads, groups = self._heads
        width = self.tokens * self.shape.head_dim * self.element
        query, key_value, statistics = heads * width, groups * width, self.tokens * heads * 4
        attention = 2 * query + 2 * key_value + statistics
        if self.config.training.recompute_granularity == "selective":
            attention += query + key_value - statistics
        norms = 4 * self.hidden_bytes + 2 * 4 * self.tokens
        if self.shape.qk_norm:
            norms += query + key_value + 4 * self.tokens * (heads + groups)
        return attention + norms + 3 * self._ffn_bytes

    def chunk_bytes(self, layers: int, is_last: bool) -> int:
        """What a stage of `layers` layers keeps until its backward; the last one also the final norm's input and output."""
        training = self.config.training
        kept = layers * self.layer_bytes()
        if training.recompute_granularity == "full" and training.recompute_method == "uniform":
            kept = -(-layers // training.recompute_num_layers) * self.hidden_bytes
        elif training.recompute_granularity == "full":
            again = min(training.recompute_num_layers, layers)
            kept = (layers - again) * self.layer_bytes() + again * self.hidden_bytes
        return kept + is_last * (2 * self.hidden_bytes + 4 * self.tokens)

    def forward_bytes(self) -> int:
        """Peak of a forward without gradients (a teacher's) beside its weights: the MLP of one layer.

        The layer's input and the residual, with the SwiGLU's input and output, or with the norm's (gathered) output and the
        SwiGLU's input.
        """
        gathered = self.hidden_bytes + self.is_sharded * self.full_hidden_bytes
        return 2 * self.hidden_bytes + max(3 * self._ffn_bytes, 2 * self._ffn_bytes + gathered)

    def backward_bytes(self) -> int:
        """Peak of a layer's backward beside what it kept: gradients around the SwiGLU and of its first weight.

        With full recomputation, also everything that the recomputed layers keep for it.
        """
        training = self.config.training
        tensor = self.config.parallel.tensor_model_parallel_size
        weight = 2 * self.shape.hidden_size * self.shape.ffn_hidden_size // tensor * self.element
        again = 0
        if training.recompute_granularity == "full":
            layers = training.recompute_num_layers if training.recompute_method == "uniform" else 1
            again = layers * self.layer_bytes()
        gathered = self.is_sharded * self.full_hidden_bytes
        return self.hidden_bytes + gathered + 2 * self._ffn_bytes + weight + again
