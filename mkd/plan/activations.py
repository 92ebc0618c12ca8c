"""The memory that one micro-batch of a model keeps, tensor by tensor.

The count is for a pre-norm layer with a gated MLP and grouped-query attention. Megatron-core 0.16.1 runs it
with Transformer Engine 2.11 on packed (THD) batches. It has t tokens, hidden size h, query width q, key/value
width k and MLP width f. q, k and f are those of one tensor-parallel process; h-wide tensors are divided by tp
with sequence parallelism. Backward needs, in elements:

    attention norm   input t h, output t h (LayerNormLinear saves both; the residual is the same input)
    q and k norm     inputs t (q + k) (Qwen3; before them the joint projection is freed)
    attention        q, k, v after RoPE t (q + 2 k), output t q (also the projection's input),
                     softmax statistics t heads fp32
    MLP norm         input t h, output t h
    post norms       inputs t h each (Gemma 3; their outputs are only added)
    gated MLP        input 2 t f, output t f (also the projection's input)

and one fp32 value per row for every norm. RoPE saves its angles only, dropout is off, bias and residual
additions save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkd.config.schema import Config
from mkd.families.layer_shape import LayerShape, MLAShape
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
        """Tokens of a micro-batch on this context-parallel process."""
        tokens = self.config.training.micro_batch_size * self.seq_length
        return tokens // self.config.parallel.context_parallel_size

    @property
    def is_sharded(self) -> bool:
        """True if hidden states are split over the tensor-parallel processes."""
        return self.config.parallel.sequence_parallel and self.config.parallel.tensor_model_parallel_size > 1

    @property
    def full_hidden_bytes(self) -> int:
        """Size of one hidden state of all tokens, [t, h]."""
        return self.tokens * self.shape.hidden_size * self.element

    @property
    def hidden_bytes(self) -> int:
        """Size of one hidden state between layers, [t(/tp), h]."""
        shards = self.config.parallel.tensor_model_parallel_size if self.is_sharded else 1
        return self.full_hidden_bytes // shards

    @property
    def _heads(self) -> tuple[int, int]:
        """(query heads, key/value heads) of one process, padded ones included."""
        tensor = self.config.parallel.tensor_model_parallel_size
        groups = self.shape.padded_query_groups(tensor) // tensor
        return groups * self.shape.heads_per_group, groups

    @property
    def _widest_ffn(self) -> int:
        """MLP width of the widest layer, before tensor parallelism."""
        return max(layer.ffn_hidden_size for layer in self.shape.layers)

    @property
    def _recompute_num_layers(self) -> int:
        number = self.config.training.recompute_num_layers
        assert number is not None, "check_recomputation requires it for full recomputation"
        return number

    def _ffn_bytes(self, width: int) -> int:
        """Return the size of [t, f] on one process for an MLP of `width` channels."""
        return self.tokens * width // self.config.parallel.tensor_model_parallel_size * self.element

    def layer_bytes(self, layer: LayerShape) -> int:
        """Return what one decoder layer keeps until its backward."""
        heads, groups = self._heads
        width = self.tokens * self.shape.head_dim * self.element
        query, key_value, statistics = heads * width, groups * width, self.tokens * heads * 4
        if layer.mla is not None:
            attention = self._latent_attention_bytes(layer.mla, heads) + statistics
        else:
            attention = 2 * query + 2 * key_value + statistics
        if self.config.training.recompute_granularity == "selective":
            # v keeps the joint projection alive
            attention += query + key_value - statistics if layer.mla is None else -statistics
        norms = 4 * self.hidden_bytes + 2 * 4 * self.tokens
        if layer.post_norms:
            norms += 2 * self.hidden_bytes + 2 * 4 * self.tokens
        if layer.qk_norm:
            norms += query + key_value + 4 * self.tokens * (heads + groups)
        return attention + norms + 3 * self._ffn_bytes(layer.ffn_hidden_size)

    def _latent_attention_bytes(self, mla: MLAShape, heads: int) -> int:
        """Return what latent attention keeps: queries, keys, values, output and the latents around norms."""
        per_head = 2 * mla.qk_head_dim + 2 * mla.v_head_dim
        latents = mla.kv_lora_rank + (mla.q_lora_rank or 0)
        shards = self.config.parallel.tensor_model_parallel_size if self.is_sharded else 1
        return self.tokens * self.element * (heads * per_head + 2 * latents // shards)

    def part_bytes(self, layers: Sequence[LayerShape], is_last: bool) -> int:
        """Return what a stage of `layers` keeps until its backward; the last one also has the final norm."""
        training = self.config.training
        kept = sum(map(self.layer_bytes, layers))
        if training.recompute_granularity == "full" and training.recompute_method == "uniform":
            kept = -(-len(layers) // self._recompute_num_layers) * self.hidden_bytes
        elif training.recompute_granularity == "full":
            again = min(self._recompute_num_layers, len(layers))
            kept = sum(map(self.layer_bytes, layers[again:])) + again * self.hidden_bytes
        return kept + is_last * (2 * self.hidden_bytes + 4 * self.tokens)

    def forward_bytes(self) -> int:
        """Return the peak of a forward without gradients (a teacher's) beside its weights.

        The peak is in the MLP of the widest layer. It holds the layer's input and the residual. It also holds
        the input and output of the gated MLP, or the norm's (gathered) output and the input of the gated MLP.
        """
        ffn = self._ffn_bytes(self._widest_ffn)
        gathered = self.hidden_bytes + self.is_sharded * self.full_hidden_bytes
        return 2 * self.hidden_bytes + max(3 * ffn, 2 * ffn + gathered)

    def backward_bytes(self) -> int:
        """Return the peak of a layer's backward beside what the layer kept.

        It holds the gradients around the MLP and of its first weight. With full recomputation it also holds
        everything that the recomputed layers keep.
        """
        training = self.config.training
        tensor = self.config.parallel.tensor_model_parallel_size
        weight = 2 * self.shape.hidden_size * self._widest_ffn // tensor * self.element
        again = 0
        if training.recompute_granularity == "full":
            layers = self._recompute_num_layers if training.recompute_method == "uniform" else 1
            again = layers * max(map(self.layer_bytes, self.shape.layers))
        gathered = self.is_sharded * self.full_hidden_bytes
        return self.hidden_bytes + gathered + 2 * self._ffn_bytes(self._widest_ffn) + weight + again
