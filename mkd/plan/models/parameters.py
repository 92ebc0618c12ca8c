"""Parameters of models and processes, and their size on disk. Those of routed experts are counted apart.

Expert parallelism spreads whole experts over the processes of a pipeline stage, tensor-parallel ones
included. Copies of experts, and shards of their optimizer state, are therefore on other processes than those
of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkd.config.models import EMA
from mkd.config.schema import Config
from mkd.families.layer_shape import LayerShape
from mkd.plan.models.flops import expert_parameters, projection_parameters
from mkd.plan.models.lora_shape import LoRAShape
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.towers import tower_parameters
from mkd.plan.parallel_sizes import ONE_PROCESS, Sizes

ADAM_BYTES = 8  # two fp32 moments of a parameter
MASTER_BYTES = 4  # the fp32 copy of a bf16 one


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    dense: int  # of everything but routed experts: attention, norms, embedding, head, router, shared experts
    experts: int = 0  # of routed experts

    @property
    def total(self) -> int:
        """All parameters."""
        return self.dense + self.experts

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)


def model_parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of a model, its vision tower included.

    A head that is tied to the embedding counts once.
    """
    text = stage_parameters(shape, shape.layers, ONE_PROCESS, shape.vocab_size, True, True)
    return text + Parameters(tower_parameters(shape).total)


def weight_bytes(shape: ModelShape, bf16: bool) -> int:
    """Return the bytes of a model's weights alone, as in a Hugging Face export."""
    return model_parameters(shape).total * (2 if bf16 else 4)


def checkpoint_bytes(shape: ModelShape, bf16: bool, train_parts: Sequence[str]) -> int:
    """Return the bytes of weights, and of fp32 copies and moments of what learns: text and `train_parts`.

    Small entries add a few percent.
    """
    tower = tower_parameters(shape)
    learned = model_parameters(shape).total - tower.total + tower.trained(train_parts)
    return weight_bytes(shape, bf16) + learned * (MASTER_BYTES * bf16 + ADAM_BYTES)


def saved_bytes(config: Config, shape: ModelShape) -> int:
    """Return the `checkpoint_bytes` of a run's student: of its adapters alone, if these learn.

    Teachers that average its weights add their averages.
    """
    bf16, lora = config.training.bf16, LoRAShape.of(config)
    count = config.needs_models * sum(one.weights == EMA for one in config.teachers)
    if lora is None:
        averages = count * MASTER_BYTES * model_parameters(shape).total
        return checkpoint_bytes(shape, bf16, config.student.train_parts) + averages
    each = (2 if bf16 else 4) + MASTER_BYTES * (bf16 + count) + ADAM_BYTES
    return lora.parameters(shape, shape.layers) * each


def active_parameters(shape: ModelShape) -> int:
    """Count the parameters that one token uses: all but the experts that its routers do not choose."""
    experts = (layer.moe for layer in shape.layers if layer.moe)
    unused = sum((moe.num_experts - moe.top_k) * expert_parameters(shape, moe) for moe in experts)
    return model_parameters(shape).total - unused


def stage_parameters(
    shape: ModelShape, layers: Sequence[LayerShape], sizes: Sizes, vocab_rows: int, *ends: bool
) -> Parameters:
    """Count the parameters of one process: `layers`, and what the first and the last stage add (`ends`).

    Vision towers do not count. Attention groups are padded to a multiple of `sizes.tensor`. Each embedding or
    head holds `vocab_rows` rows.
    """
    is_first, is_last = ends
    tables = is_first + is_last - (is_first and is_last and shape.tie_word_embeddings)
    of_ends = Parameters((tables * vocab_rows + is_last) * shape.hidden_size)
    of_layers = (layer_parameters(shape, layer, sizes) for layer in layers)
    return sum(of_layers, start=of_ends)


def layer_parameters(shape: ModelShape, layer: LayerShape, sizes: Sizes) -> Parameters:
    """Count the parameters of one decoder layer on one process."""
    shape = shape.for_layer(layer)
    hidden, groups = shape.hidden_size, shape.padded_query_groups(sizes.tensor) // sizes.tensor
    query, key_value = groups * shape.heads_per_group * shape.head_dim, groups * shape.head_dim
    dense = projection_parameters(shape, layer, sizes.tensor)
    dense += (layer.mixes_tokens + layer.has_mlp) * hidden * (layer.pre_norms + layer.post_norms)
    dense += (query + 2 * key_value) * layer.qkv_bias + hidden * layer.attention_output_bias
    dense += 2 * shape.head_dim * (layer.qk_norm or layer.qk_norm_turned)
    dense += 2 * (layer.activation == "xielu")
    dense += (query + key_value) * (layer.joint_qk_norm is not None)
    dense += groups * shape.heads_per_group * layer.attention_sinks
    if layer.mla is not None:
        dense += layer.mla.kv_lora_rank + (layer.mla.q_lora_rank or 0)  # norms of the latents
    if layer.mixer is not None:
        dense += layer.mixer.cut_parameters // sizes.tensor + layer.mixer.shared_parameters
    moe, width, experts = layer.moe, layer.ffn_hidden_size, 0
    if moe is not None:
        width = moe.shared_ffn_hidden_size
        dense += (hidden + moe.biases) * moe.num_experts  # router, on every process
        dense += (moe.shared_gate + 2 * moe.latent_size) * hidden
        dense += moe.inner_norms * (4 * hidden + moe.num_experts)  # three norms, the router's scales
        experts = moe.num_experts // sizes.expert * expert_parameters(shape, moe)
    ffn = width // sizes.tensor
    dense += layer.mlp_matrices * hidden * ffn
    dense += ((layer.mlp_matrices - 1) * ffn + hidden) * layer.mlp_bias
    return Parameters(dense, experts)


def product_parameters(shape: ModelShape, layer: LayerShape, sizes: Sizes) -> int:
    """Count the weights of the linear layers of a dense decoder layer on one process."""
    mlp = layer.mlp_matrices * shape.hidden_size * layer.ffn_hidden_size // sizes.tensor
    return projection_parameters(shape, layer, sizes.tensor) + mlp
