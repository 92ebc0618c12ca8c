"""`LanguageModel`: one model part, from token ids or the previous stage to the final hidden state."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mkd.models.fp8_layers import with_fp8_products
from mkd.models.graphs.graphed_decoder import GraphedDecoder
from mkd.models.moe.balance import RouterRecord
from mkd.models.moe.router import DocumentRouter
from mkd.models.moe.token_documents import give_documents, token_documents
from mkd.models.packed import PackedDocuments
from mkd.models.placed.released_layers import with_released_layers
from mkd.models.rope import query_factors, rotary_embedding
from mkd.models.specs import block_spec
from mkd.models.stored_head import selected_rows
from mkd.models.transformer_config import ModelOptions, transformer_config
from mkd.models.vision.deepstack import with_deepstack
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape

PADDED_BY_HEADS = (  # parameters whose number of heads is padded to a multiple of the tensor-parallel size
    *(".linear_qkv.weight", ".linear_qkv.bias", ".linear_proj.weight"),
    *(f".{name}.lora_b" for name in ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")),
    ".linear_proj.lora_a",
    *(".linear_q_proj.weight", ".linear_q_up_proj.weight", ".linear_kv_up_proj.weight", ".softmax_offset"),
    *(".joint_query_norm.weight", ".joint_key_norm.weight"),
)


class LMHead(ColumnParallelLinear):
    """Megatron's vocabulary-parallel head. Called without an input, it returns its weight.

    In that case it makes no logits; a loss can compute them itself. Asking for the weight calls the module on
    purpose, so that hooks see it. With overlapped parameter gathers, Megatron's DDP waits for a module's
    parameters in its forward pre-hook.
    """

    def forward(
        self, input_: Tensor | None, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:
        """Return Megatron's (logits, bias) of `input_`, or the weight if there is no input."""
        if input_ is None:
            return self.weight if weight is None else weight
        return super().forward(input_, weight, runtime_gather_output)


class LanguageModel(LanguageModule):
    """One model part: the decoder layers of one pipeline stage, with embedding or head where they belong.

    It ends at the final hidden state, so that the loss decides how and when logits are made. Rotary angles
    come from the shapes of the layers. Names and checkpoint keys are those of Megatron's GPTModel. Entries
    whose padding depends on the tensor-parallel size (vocabulary rows, attention groups) may be loaded at
    another size.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: PipelineLayout,
        options: ModelOptions,
        context: ParallelContext,
        *,
        virtual_stage: int = 0,
        padded_vocab_size: int | None = None,
    ):
        config = transformer_config(shape, layout, options, context)
        if len(shape.ropes) == 1:  # else layers have their own; Megatron has one factor per model
            _set_attention_factor(config, shape.ropes[0].attention_factor)
        first_layer, num_layers = layout.for_rank(context.pp_rank, virtual_stage)
        # Transformer Engine supports context parallelism in 16 bits only.
        in_fp32 = context.cp_size > 1 and options.dtype == torch.float32
        own_attention = options.own_attention or in_fp32
        layers = shape.layers[first_layer : first_layer + num_layers]
        has_te = context.platform.transformer_engine
        kinds = options.lora, options.norms_apart
        spec = block_spec(layers, shape.ropes, has_te, own_attention, context.groups, *kinds)
        if shape.vision is not None and shape.vision.deepstack > first_layer:
            spec = with_deepstack(spec, shape.vision.deepstack - first_layer)
        spec = with_released_layers(spec) if options.releases_layers else spec
        spec = spec if options.fp8_recipe is None else with_fp8_products(spec, options.fp8_recipe)
        super().__init__(config, context.groups)
        self.shape, self.context = shape, context
        self.has_adapters = options.lora is not None
        self.has_own_attention = own_attention  # which waits for the lengths of documents
        self.multiplies_in_fp8 = options.fp8_recipe is not None  # in training
        self.first_layer = first_layer
        self.vp_stage = virtual_stage if context.virtual_stages > 1 else None
        self.pre_process = context.is_first_stage(virtual_stage)
        self.post_process = context.is_last_stage(virtual_stage)
        self.share_embeddings_and_output_weights = shape.tie_word_embeddings
        self._build_modules(spec, padded_vocab_size or shape.padded_vocab_size(context.tp_size))
        self.rotary_pos_emb = rotary_embedding(shape.ropes, context.device)
        # Rounded to the dtype of the embeddings, as in transformers.
        self.embedding_scale = float(torch.tensor(shape.embedding_scale).to(options.dtype))
        self._drop_absent_biases()
        self.router_record = self._record_routers(options)
        self.graphs: GraphedDecoder | None = None  # None: the decoder layers never run as CUDA graphs
        # Makes the context in which the decoder layers run; see fp8_weights.py.
        self.running_layers: Callable[[], AbstractContextManager[None]] = nullcontext

    def _record_routers(self, options: ModelOptions) -> RouterRecord | None:
        """Let the routers of this part share one record; return None for a dense model."""
        if self.shape.moe is None:
            return None
        size = self.shape.num_layers, self.shape.num_experts + 2
        sums = torch.zeros(size, dtype=torch.float64, device=self.context.device)
        record = RouterRecord(self.shape.moe, options.balance_coeff, options.z_coeff, sums)
        for layer in self._layers_with_experts:
            layer.mlp.router.record = record
            layer.register_forward_pre_hook(give_documents, with_kwargs=True)
        return record

    @property
    def routers(self) -> list[DocumentRouter]:
        """Routers of this part's layers with experts."""
        return [layer.mlp.router for layer in self._layers_with_experts]

    @property
    def _layers_with_experts(self) -> list[torch.nn.Module]:
        return [one for one in self.decoder.layers if not self.shape.layers[one.layer_number - 1].is_dense]

    def _build_modules(self, spec: TransformerBlockSubmodules, vocab_size: int) -> None:
        """Build embedding, layers and head in Megatron's order, which random weights depend on.

        Collective over the first and last stage if the head is tied to the embedding.
        """
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=self.config,
                vocab_size=vocab_size,
                max_sequence_length=self.shape.max_position_embeddings,
                position_embedding_type="none",
                tp_group=self.pg_collection.tp,
            )
        self.decoder = TransformerBlock(
            config=self.config,
            spec=spec,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
        )
        if self.post_process:
            self.output_layer = LMHead(
                self.config.hidden_size,
                vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=self.pg_collection.tp,
            )
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def _drop_absent_biases(self) -> None:
        """Remove biases that the layers do not have.

        Megatron has one switch for all biases, Hugging Face models have several.
        """
        for layer in self.decoder.layers if self.config.add_bias_linear else ():
            shape = self.shape.layers[layer.layer_number - 1]
            if not shape.qkv_bias:
                layer.self_attention.linear_qkv.register_parameter("bias", None)
            if not shape.attention_output_bias:
                layer.self_attention.linear_proj.register_parameter("bias", None)
            if shape.is_dense and not shape.mlp_bias:
                layer.mlp.linear_fc1.register_parameter("bias", None)
                layer.mlp.linear_fc2.register_parameter("bias", None)

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Take the hidden state of the previous stage, [t(/tp), 1, h]; `forward` reads it."""
        self.decoder.set_input_tensor(input_tensor)

    def forward(self, tokens: Tensor, position_ids: Tensor, packed_seq_params: PackedDocuments) -> Tensor:
        """Run this part on one pack: [1, t] int64 twice -> hidden state [t(/tp), 1, h].

        It is the final one, after the last norm, on the last stage. Other stages than the first ignore
        `tokens`; no position embedding is learned, so all ignore `position_ids`.
        """
        return self._decoded(self._embedded(tokens, position_ids), tokens, packed_seq_params)

    def _embedded(self, tokens: Tensor, position_ids: Tensor) -> Tensor | None:
        """Return the embedding of the tokens, [t(/tp), 1, h]; None unless this is the first part."""
        if not self.pre_process:
            return None
        hidden = self.embedding(input_ids=tokens, position_ids=position_ids)
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    def _decoded(
        self,
        hidden: Tensor | None,  # [t(/tp), 1, h]; None: the previous part's
        tokens: Tensor,
        packed_seq_params: PackedDocuments,
        layer_inputs: Tensor | None = None,  # handed to every layer as Megatron's `context`
    ) -> Tensor:
        """Run the layers.

        A hidden state gets the strides of a new tensor first. Otherwise `torch.matmul` turns the product of a
        frozen model, [t, 1, h] x [h, n], into t products of vectors: slower, and with other bits than the
        same product of a model that is trained.
        """
        if hidden is not None:
            hidden = hidden.flatten().view(hidden.shape)
            if self.has_adapters and torch.is_grad_enabled():
                # The embedding is frozen, and recomputation skips the backward of what needs no gradient.
                hidden.requires_grad_()
        if self.router_record is not None and self.training:
            packed_seq_params.documents_of_tokens = token_documents(
                packed_seq_params, tokens.size(1), self.context, self.config.sequence_parallel
            )
        packed_seq_params.query_factors = query_factors(
            self.shape.ropes, packed_seq_params, tokens.size(1), self.context.row_shard
        )
        with self.running_layers():
            if self.graphs is not None and layer_inputs is None:
                output = self.graphs(hidden, tokens.size(1), packed_seq_params)
            else:
                output = self.decoder(
                    hidden_states=hidden,
                    attention_mask=None,
                    context=layer_inputs,
                    rotary_pos_emb=self.rotary_pos_emb(packed_seq_params),
                    packed_seq_params=packed_seq_params,
                )
        return self.as_head_input(output) if self.post_process else output

    def as_head_input(self, hidden: Tensor) -> Tensor:
        """Return final hidden states [.., h], after the last norm, of which the head makes logits."""
        return hidden if self.shape.logits_divisor == 1.0 else hidden / self.shape.logits_divisor

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Apply the head: final hidden states [t(/tp), 1, h] -> logits [t, 1, v/tp].

        The hidden states are divided by tp with sequence parallelism. Backward: the gradient of
        `hidden_states` is summed over the tensor-parallel group (all-reduce, or reduce-scatter with sequence
        parallelism).
        """
        logits, cap = self.output_layer(hidden_states, weight=self._tied_weight)[0], self.shape.logits_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the LM head, [v/tp, h]; if tied, the parameter of the embedding.

        The head's forward pre-hooks run first: they wait for parameters that are still being gathered.
        """
        return self.output_layer(None, weight=self._tied_weight)

    @torch.no_grad()
    def select_head_rows(self, ids: Tensor, tp_group: dist.ProcessGroup) -> None:
        """Replace this rank's rows of the head by those of the vocabulary `ids` [w]; see `selected_rows`.

        Use it for a frozen model of which only the head's products are read. Afterwards a column is no longer
        an id, and a tied head is separate from the embedding. Collective.
        """
        rows = selected_rows(self.head_weight(), ids, tp_group)
        self.share_embeddings_and_output_weights = False
        self.output_layer.weight = torch.nn.Parameter(rows, requires_grad=False)

    @property
    def _tied_weight(self) -> Tensor | None:
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Return Megatron's sharded state with layout-dependent padding marked as such.

        Transformer Engine's state of a module stays empty, as in bf16. After a product in FP8 it would be the
        recipe, pickled.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)  # it is empty, and old checkpoints have none
        for name, entry in state.items():
            if name.endswith(PADDED_BY_HEADS):
                entry.allow_shape_mismatch = True
            elif self.multiplies_in_fp8 and name.endswith("._extra_state"):
                entry.data = torch.empty(0, dtype=torch.uint8)
        return state


def _set_attention_factor(config: TransformerConfig, factor: float) -> None:
    """Let Megatron multiply the cosine and sine of all rotations by `factor`.

    Its factor is (0.1 mscale ln(scale) + 1) / (0.1 mscale_all_dim ln(scale) + 1), and 1 up to a scale of 1.
    """
    if factor != 1.0:
        config.yarn_rotary_scaling_factor = math.e
        config.yarn_mscale, config.yarn_mscale_all_dim = (factor - 1.0) / 0.1, 0.0
