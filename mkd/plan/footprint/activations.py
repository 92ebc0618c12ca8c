"""The memory that one micro-batch of a model keeps, tensor by tensor.

The count is for a pre-norm layer with a gated MLP and grouped-query attention. Megatron-core 0.16.1 runs it
with Transformer Engine 2.11 on packed (THD) batches. It has t tokens, hidden size h, query width q, key/value
width k and MLP width f. q, k and f are those of one tensor-parallel process; h-wide tensors are divided by tp
with sequence parallelism. Backward needs, in elements:

    attention norm   input t h, output t h (LayerNormLinear saves both; the residual is the same input)
    q and k norm     inputs t (q + k) (Qwen3; before them the joint projection is freed)
    no pre-norm      the inputs of attention and MLP, t h each, instead of the norms' inputs and outputs
    attention        q, k, v after RoPE t (q + 2 k), output t q (also the projection's input),
                     softmax statistics t heads fp32
    MLP norm         input t h, output t h
    value norm       inputs t k (Gemma 4)
    post norms       inputs t h each (Gemma 3; their outputs are only added)
    gated MLP        input 2 t f, output t f (also the projection's input); without gates the input is t f

and one fp32 value per row for every norm. RoPE saves its angles only, dropout is off, bias and residual
additions save nothing.

In a layer with experts each token is copied to k experts of width f. These rows are sent to the experts'
processes and back. With t' = t (/tp with sequence parallelism) and E experts in the model, the layer keeps

    router           weights and choice of all experts, the permutation: 13 bytes t' E
    experts          input t' k h, gated MLP 3 t' k f; 12 bytes a row for its weight and place;
                     with biases, a row's weight for each of the process's experts
                     experts of latents: rows as narrow as these, and the sums in front of the way back
    shared experts   gated MLP 3 t f, f divided by tp

A gated delta net keeps what mixer_bytes.py counts in place of attention. Gated attention keeps t q twice
more: the sigmoid, and the product with it.

It is the mean over processes: one whose experts are chosen more often keeps more rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mkd.config.schema import Config
from mkd.families.layer_shape import LayerShape, MLAShape, MoEShape
from mkd.families.mixer_shape import MixerShape
from mkd.plan.footprint.mixer_bytes import mixer_bytes, mixer_forward_bytes, mixer_gradient_bytes
from mkd.plan.models.lora_shape import LoRAShape
from mkd.plan.models.mixer_kernels import runs_fused
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import product_parameters
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.work import StudentProducts

ROUTER_BYTES = 13  # of a token for every expert: fp32 weight, choice, two int32 of the permutation
ROW_BYTES = 12  # of a row that an expert computes: fp32 weight, its place before and after the exchange


@dataclass(frozen=True)
class Activations:
    """Sizes of one model's activations on one process, bytes per micro-batch."""

    config: Config
    shape: ModelShape
    element: int  # bytes of an activation
    seq_length: int  # tokens of a pack
    sizes: Sizes  # processes along each axis
    lora: LoRAShape | None = None  # adapters, which alone learn; None: it is a teacher, or all weights learn
    products: StudentProducts | None = None  # of a student; None: they have the precision of the run

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this context-parallel process."""
        tokens = self.config.training.micro_batch_size * self.seq_length
        return tokens // self.sizes.context

    @property
    def is_sharded(self) -> bool:
        """True if hidden states are split over the tensor-parallel processes."""
        return self.config.parallel.sequence_parallel and self.sizes.tensor > 1

    @property
    def full_hidden_bytes(self) -> int:
        """Size of one hidden state of all tokens, [t, h]."""
        return self.tokens * self.shape.hidden_size * self.element

    @property
    def hidden_bytes(self) -> int:
        """Size of one hidden state between layers, [t(/tp), h]."""
        shards = self.sizes.tensor if self.is_sharded else 1
        return self.full_hidden_bytes // shards

    def _heads(self, layer: LayerShape) -> tuple[int, int, int]:
        """Return (query heads, key/value heads, their channels) of one process, padded ones included."""
        tensor, shape = self.sizes.tensor, self.shape.for_layer(layer)
        groups = shape.padded_query_groups(tensor) // tensor
        return groups * shape.heads_per_group, groups, shape.head_dim

    @property
    def _recompute_num_layers(self) -> int:
        number = self.config.training.recompute_num_layers
        assert number is not None, "check_recomputation requires it for full recomputation"
        return number

    def _ffn_bytes(self, width: int) -> int:
        """Return the size of [t, f] on one process for an MLP of `width` channels."""
        return self.tokens * width // self.sizes.tensor * self.element

    def _recomputes(self, module: str) -> bool:
        """Return True if selective recomputation covers this part of a layer."""
        training = self.config.training
        return training.recompute_granularity == "selective" and module in training.recompute_modules

    def layer_bytes(self, layer: LayerShape) -> int:
        """Return what one decoder layer keeps until its backward."""
        heads, groups, head_dim = self._heads(layer)
        width = self.tokens * head_dim * self.element
        query, key_value, statistics = heads * width, groups * width, self.tokens * heads * 4
        if not layer.mixes_tokens:
            attention = 0
        elif layer.mixer is not None:
            attention = self._mixer_bytes(layer.mixer, is_kept=not self._recomputes("mixer"))
        elif layer.mla is not None:
            attention = self._latent_attention_bytes(layer.mla, heads) + statistics
        else:
            attention = (2 + 2 * layer.output_gate) * query + 2 * key_value + statistics
        if self._recomputes("core_attn") and layer.has_attention:
            # v keeps the joint projection alive
            attention += query + key_value - statistics if layer.mla is None else -statistics
        blocks = layer.mixes_tokens + layer.has_mlp
        norms = blocks * (2 * self.hidden_bytes + 4 * self.tokens if layer.pre_norms else self.hidden_bytes)
        if layer.post_norms:
            norms += blocks * (self.hidden_bytes + 4 * self.tokens)
        if layer.qk_norm or layer.qk_norm_turned:
            norms += query + key_value + 4 * self.tokens * (heads + groups)
        if layer.joint_qk_norm is not None:
            norms += query + key_value + 4 * self.tokens * 2
        norms += layer.value_norm * (key_value + 4 * self.tokens * groups)
        if layer.has_inner_norms:  # two outputs, the experts' input and the router's
            norms += 4 * (self.hidden_bytes + 4 * self.tokens)
        norms += layer.output_scale * self.hidden_bytes  # the sum behind the last residual addition
        if layer.moe and self._recomputes("moe"):
            return attention + norms  # the experts' input is the norm's output
        kept = attention + norms + self._mlp_bytes(layer) + self._adapter_bytes(layer)
        return kept if self.products is None else kept + self._rounded_bytes(layer, self.products)

    def _rounded_bytes(self, layer: LayerShape, products: StudentProducts) -> int:
        """Return what a dense layer keeps more if its products have a precision of their own.

        Weights are there in it, too. The inputs take the place of the outputs of norms and gate. Attention
        needs its own output besides.
        """
        heads, _, head_dim = self._heads(layer)
        weights = product_parameters(self.shape, layer, self.sizes)
        replaced = (2 * self.hidden_bytes + self._ffn_bytes(layer.ffn_hidden_size)) // self.element
        attention = self.tokens * heads * head_dim
        inputs = (replaced + attention) * products.input_bytes - replaced * self.element
        return round(weights * products.weight_bytes + inputs)

    def _adapter_bytes(self, layer: LayerShape) -> int:
        """Return what adapters keep: A x of each, whose input is kept as that of a learned weight is."""
        if self.lora is None:
            return 0
        return len(self.lora.linears(self.shape, layer)) * self.tokens * self.lora.rank * self.element

    def _mixer_bytes(self, mixer: MixerShape, is_kept: bool) -> int:
        """Return what a mixer keeps from its first product on.

        Unless its computation `is_kept`, that is the first product's output, from which it is computed again.
        """
        tensor = self.sizes.tensor
        is_fused = runs_fused(mixer, self.config.training)
        recomputed = mixer.projected_width * self.element
        inside = mixer_bytes(mixer, self.element, is_fused) if is_kept else recomputed
        return self.tokens * (inside + mixer.output_width * self.element) // tensor

    def _mlp_bytes(self, layer: LayerShape) -> int:
        """Return what the MLP of a layer, or its router and experts, keep behind the norm."""
        moe = layer.moe
        if moe is None:
            return layer.mlp_matrices * self._ffn_bytes(layer.ffn_hidden_size)
        rows, matrices = self._expert_rows(moe), moe.mlp_matrices
        width = moe.expert_width(self.shape.hidden_size)
        kept = rows * (width + matrices * moe.ffn_hidden_size) * self.element
        kept += rows * ROW_BYTES + rows // moe.top_k * moe.latent_size * self.element
        kept += rows // moe.top_k * moe.num_experts * ROUTER_BYTES
        kept += moe.biases * rows * moe.num_experts // self.sizes.expert * self.element
        return kept + matrices * self._ffn_bytes(moe.shared_ffn_hidden_size)

    def _expert_rows(self, moe: MoEShape) -> int:
        """Return the rows that the experts of a process compute, if all experts are chosen equally often."""
        shards = self.sizes.tensor if self.is_sharded else 1
        return self.tokens // shards * moe.top_k

    def _latent_attention_bytes(self, mla: MLAShape, heads: int) -> int:
        """Return what latent attention keeps: queries, keys, values, output and the latents around norms."""
        per_head = 2 * mla.qk_head_dim + 2 * mla.v_head_dim
        latents = mla.kv_lora_rank + (mla.q_lora_rank or 0)
        shards = self.sizes.tensor if self.is_sharded else 1
        return self.tokens * self.element * (heads * per_head + 2 * latents // shards)

    def part_bytes(self, layers: Sequence[LayerShape], is_last: bool) -> int:
        """Return what a stage of `layers` keeps until its backward; the last one also has the final norm."""
        training = self.config.training
        if training.recompute_granularity == "full" and training.recompute_method == "uniform":
            kept = -(-len(layers) // self._recompute_num_layers) * self.hidden_bytes
        elif training.recompute_granularity == "full":
            again = min(self._recompute_num_layers, len(layers))
            kept = self._layers_bytes(layers[again:]) + again * self.hidden_bytes
        else:
            kept = self._layers_bytes(layers)
        return kept + is_last * (2 * self.hidden_bytes + 4 * self.tokens)

    def _layers_bytes(self, layers: Sequence[LayerShape]) -> int:
        """Return what these layers keep; equal ones are calculated once."""
        return sum(number * self.layer_bytes(layer) for layer, number in Counter(layers).items())

    def forward_bytes(self, input_bytes: int = 0, decodes: bool = False) -> int:
        """Return the peak of a forward without gradients (a teacher's) beside its weights.

        The peak is in the widest MLP, or in a mixer (see mixer_bytes.py). The MLP holds the
        layer's input and the residual. It also holds the input and output of the gated MLP, or the norm's
        (gathered) output and the input of the gated MLP.

        `input_bytes`: bytes of each input of a product that it makes in a precision of its own. It then
        holds the input of the MLP's second product in that precision as well.

        With experts it holds the norm's output, and rows: their input with input and output of the gated MLP
        and the result, or four results around the second exchange. If it `decodes` their matrices, those of
        one product exist beside its input and result.
        """
        layers = set(self.shape.layers)
        mixers = [self._mixer_forward_bytes(layer.mixer) for layer in layers if layer.mixer]
        widest = max(self._mlp_forward_bytes(layer, input_bytes, decodes) for layer in layers)
        return 2 * self.hidden_bytes + max([widest, *mixers])

    def _mixer_forward_bytes(self, mixer: MixerShape) -> int:
        of_token = mixer_forward_bytes(mixer, self.element, runs_fused(mixer, self.config.training))
        return self.tokens * of_token // self.sizes.tensor

    def _mlp_forward_bytes(self, layer: LayerShape, input_bytes: int, decodes: bool) -> int:
        gathered = self.hidden_bytes + self.is_sharded * self.full_hidden_bytes
        if layer.moe is None:
            ffn, parts = self._ffn_bytes(layer.ffn_hidden_size), layer.mlp_matrices
            return max(parts * ffn + input_bytes * ffn // self.element, (parts - 1) * ffn + gathered)
        width, own = layer.moe.expert_width(self.shape.hidden_size), layer.moe.ffn_hidden_size
        ffn, entering = layer.moe.mlp_matrices * own, layer.moe.mlp_matrices - 1
        rows = self._expert_rows(layer.moe) * self.element
        shared = self.full_hidden_bytes * layer.has_shared_experts  # their output waits for the experts
        inside = rows * max(2 * width + ffn, 4 * width)
        if decodes:
            matrix = layer.moe.num_experts // self.sizes.expert * width * own * self.element
            first = rows * (width + entering * own) + entering * matrix
            inside = max(inside, first, rows * (2 * width + own) + matrix)
        return self.hidden_bytes + shared + inside

    def backward_bytes(self) -> int:
        """Return the peak of a layer's backward beside what the layer kept.

        It holds the gradients around the MLP and of its first weight. With recomputation it also holds
        everything that the recomputed parts keep.
        """
        training = self.config.training
        again = 0
        if training.recompute_granularity == "full":
            layers = self._recompute_num_layers if training.recompute_method == "uniform" else 1
            again = layers * max(map(self.layer_bytes, set(self.shape.layers)))
        elif self._recomputes("moe"):
            again = max((self._mlp_bytes(layer) for layer in set(self.shape.layers) if layer.moe), default=0)
        mixers = {layer.mixer for layer in self.shape.layers if layer.mixer}
        gathered = self.is_sharded * self.full_hidden_bytes
        around = max(map(self._mlp_backward_bytes, set(self.shape.layers)))
        around = max([around + again, *map(self._mixer_backward_bytes, mixers)])
        return self.hidden_bytes + gathered + around

    def _mixer_backward_bytes(self, mixer: MixerShape) -> int:
        """Return the gradients inside a mixer, and what it keeps if it is computed again."""
        tensor = self.sizes.tensor
        again = self._mixer_bytes(mixer, is_kept=True) if self._recomputes("mixer") else 0
        is_fused = runs_fused(mixer, self.config.training)
        return again + self.tokens * mixer_gradient_bytes(mixer, self.element, is_fused) // tensor

    def _mlp_backward_bytes(self, layer: LayerShape) -> int:
        """Return the gradients inside an MLP and of its first weight, or of the experts' first weights.

        Experts have the gradients of rows on two sides of an exchange or of a product. Before that their
        forward ends with three results beside what it keeps.
        """
        hidden, moe = self.shape.hidden_size, layer.moe
        if moe is None:
            entering, tensor = layer.mlp_matrices - 1, self.sizes.tensor
            weight = entering * hidden * layer.ffn_hidden_size // tensor * self.element
            if self.lora is not None and not self.lora.is_rounded:  # else a dense weight is in its place
                weight = 0  # frozen weights have no gradient
            return entering * self._ffn_bytes(layer.ffn_hidden_size) + weight
        rows, ffn = self._expert_rows(moe) * self.element, moe.ffn_hidden_size
        entering, width = moe.mlp_matrices - 1, moe.expert_width(hidden)
        weights = moe.num_experts // self.sizes.expert * entering * width * ffn * self.element
        inside = max(width + entering * ffn, (entering + 1) * ffn)
        return max(rows * 3 * width, rows * inside + weights)
