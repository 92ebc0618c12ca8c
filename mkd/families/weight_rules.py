"""Weight tables: which Hugging Face tensors make which Megatron parameter.

Every parameter is a run of equal *blocks* along one dimension (vocabulary rows, attention groups, MLP
slices). A block is made of *parts* that come from different Hugging Face tensors, in the order of the table:
query, key and value heads of one attention group, gate and up rows of one slice. Tensor-parallel rank r owns
an equal run of whole blocks; blocks beyond the real number are zero padding. `mkd/checkpoint/hf/hf_names.py`
reads the tables.

Names of tensors contain `{layer}`, and `{expert}` if each expert has its own tensor. A `Stack` describes
tensors that hold all experts of a layer. Either way each expert of a rank has its own `{expert}` parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from mkd.families.layer_shape import LayerShape, MoEShape


class ModelSizes(Protocol):
    """The sizes of a model that rules read; `ModelShape` has them."""

    hidden_size: int
    head_dim: int
    vocab_size: int
    num_query_groups: int
    heads_per_group: int


@dataclass(frozen=True)
class Rule:
    """Rule that cuts a kind of parameter. Functions get (model, layer); `ranks` is the tensor-parallel size.

    `model` has the heads of the layer. `layer` is None for parameters outside the layers. A part of length 0
    has no tensor.
    """

    blocks: Callable[[ModelSizes, LayerShape | None, int], int]  # (.., ranks) -> real blocks over all ranks
    parts: Callable[[ModelSizes, LayerShape | None, int], tuple[int, ...]]  # (.., ranks) -> part lengths
    dim: int = 0  # the dimension that is cut
    # Lengths of the dimensions that are not cut, in their order.
    other_dims: Callable[[ModelSizes, LayerShape | None], tuple[int, ...]] = lambda model, layer: (
        model.hidden_size,
    )
    replicated: bool = False  # every rank holds the whole parameter
    any_padding: bool = False  # padded beyond the next multiple of tp blocks
    experts: Callable[[ModelSizes, LayerShape | None], int] | None = None  # number of experts over all ranks


@dataclass(frozen=True)
class Stack:
    """Form of a Hugging Face tensor [experts, ...] with the weights or biases of all experts of a layer."""

    is_transposed: bool = False  # each expert's matrix is [in, out]
    interleaved: int = 1  # output channels of this many parts alternate


@dataclass(frozen=True)
class Entry:
    """A row of a table: each part's Hugging Face tensor. A repeated name is one fused tensor."""

    rule: Rule
    tensors: tuple[str, ...]
    needs: str = ""  # attribute of `LayerShape`, maybe dotted, without which the parameter does not exist
    stack: Stack | None = None  # form of a tensor that holds all experts; None: no tensor does


def _vector(rule: Rule) -> Rule:
    """Return the rule of the bias that belongs to a matrix cut by rows."""
    return Rule(rule.blocks, rule.parts, other_dims=lambda model, layer: ())


def _whole(length: Callable[[ModelSizes, LayerShape | None], int]) -> Rule:
    """Return the rule of a vector that every rank holds."""
    return Rule(
        lambda model, layer, ranks: 1,
        lambda model, layer, ranks: (length(model, layer),),
        other_dims=lambda model, layer: (),
        replicated=True,
    )


def _ffn_slice(layer: LayerShape | None, ranks: int) -> int:
    assert layer is not None, "an MLP belongs to a layer"
    return layer.ffn_hidden_size // ranks


def _value_dim(model: ModelSizes, layer: LayerShape | None) -> int:
    return 0 if layer is not None and layer.shared_key_value else model.head_dim


HIDDEN = _whole(lambda model, layer: model.hidden_size)
HEAD = _whole(lambda model, layer: model.head_dim)
ONE_NUMBER = _whole(lambda model, layer: 1)
VOCABULARY = Rule(lambda m, layer, ranks: m.vocab_size, lambda m, layer, ranks: (1,), any_padding=True)
QKV = Rule(
    lambda m, layer, ranks: m.num_query_groups,
    lambda m, layer, ranks: (m.heads_per_group * m.head_dim, m.head_dim, _value_dim(m, layer)),
)
HEADS = Rule(
    lambda m, layer, ranks: m.num_query_groups,
    lambda m, layer, ranks: (m.heads_per_group * m.head_dim,),
    dim=1,
)
SINKS = Rule(
    lambda m, layer, ranks: m.num_query_groups,
    lambda m, layer, ranks: (m.heads_per_group,),
    other_dims=lambda model, layer: (),
)
QUERIES = Rule(
    lambda m, layer, ranks: m.num_query_groups,
    lambda m, layer, ranks: (m.heads_per_group * m.head_dim,),
    other_dims=lambda model, layer: (),
)
KEYS = replace(QUERIES, parts=lambda m, layer, ranks: (m.head_dim,))
GATE_UP = Rule(lambda m, layer, ranks: ranks, lambda m, layer, ranks: (_ffn_slice(layer, ranks),) * 2)
FFN = Rule(lambda m, layer, ranks: ranks, lambda m, layer, ranks: (_ffn_slice(layer, ranks),), dim=1)
UP = Rule(lambda m, layer, ranks: ranks, lambda m, layer, ranks: (_ffn_slice(layer, ranks),))  # without gates
QKV_BIAS, GATE_UP_BIAS, UP_BIAS = _vector(QKV), _vector(GATE_UP), _vector(UP)


def _moe(layer: LayerShape | None) -> MoEShape:
    assert layer is not None and layer.moe is not None, "experts belong to a layer with experts"
    return layer.moe


def _num_experts(model: ModelSizes, layer: LayerShape | None) -> int:
    return _moe(layer).num_experts


def _expert_width(model: ModelSizes, layer: LayerShape | None) -> tuple[int, ...]:
    return (_moe(layer).expert_width(model.hidden_size),)


def _latent_size(model: ModelSizes, layer: LayerShape | None) -> int:
    return _moe(layer).latent_size


# One expert is whole on a process: tensor parallelism does not cut it.
EXPERT_GATE_UP = Rule(
    lambda m, layer, ranks: 1,
    lambda m, layer, ranks: (_moe(layer).ffn_hidden_size,) * 2,
    other_dims=_expert_width,
    replicated=True,
    experts=_num_experts,
)
EXPERT_DOWN = Rule(
    lambda m, layer, ranks: 1,
    lambda m, layer, ranks: (_moe(layer).ffn_hidden_size,),
    dim=1,
    other_dims=_expert_width,
    replicated=True,
    experts=_num_experts,
)
EXPERT_UP = replace(EXPERT_GATE_UP, parts=EXPERT_DOWN.parts)  # without gates
EXPERT_GATE_UP_BIAS = replace(EXPERT_GATE_UP, other_dims=lambda model, layer: ())
EXPERT_DOWN_BIAS = replace(EXPERT_GATE_UP_BIAS, parts=lambda model, layer, ranks: (model.hidden_size,))
ROUTER = Rule(lambda m, layer, ranks: 1, lambda m, layer, ranks: (_moe(layer).num_experts,), replicated=True)
ROUTER_BIAS = replace(ROUTER, other_dims=lambda model, layer: ())


def _shared_slice(layer: LayerShape | None, ranks: int) -> int:
    return _moe(layer).shared_ffn_hidden_size // ranks


SHARED_GATE_UP = Rule(
    lambda m, layer, ranks: ranks, lambda m, layer, ranks: (_shared_slice(layer, ranks),) * 2
)
SHARED_UP = replace(SHARED_GATE_UP, parts=lambda m, layer, ranks: (_shared_slice(layer, ranks),))
SHARED_DOWN = Rule(
    lambda m, layer, ranks: ranks, lambda m, layer, ranks: (_shared_slice(layer, ranks),), dim=1
)

TO_LATENTS = Rule(  # [latents, h]
    lambda m, layer, ranks: 1, lambda m, layer, ranks: (_latent_size(m, layer),), replicated=True
)
FROM_LATENTS = replace(TO_LATENTS, dim=1)  # [h, latents]

LAYER = "model.layers.{layer}."
_ATTENTION, _MLP = f"{LAYER}self_attn.", f"{LAYER}mlp."


def layer_table(qkv: tuple[str, ...], gate_up: tuple[str, ...]) -> dict[str, Entry]:
    """Return the parameters of a pre-norm layer, named relative to it, in the order of the export.

    `gate_up` has one name if the MLP has no gates.
    """
    is_gated = len(gate_up) == 2

    def tensors(modules: tuple[str, ...], kind: str) -> tuple[str, ...]:
        return tuple(f"{module}.{kind}" for module in modules)

    return {
        "input_layernorm.weight": Entry(HIDDEN, (f"{LAYER}input_layernorm.weight",)),
        "self_attention.linear_qkv.weight": Entry(QKV, tensors(qkv, "weight")),
        "self_attention.linear_qkv.bias": Entry(QKV_BIAS, tensors(qkv, "bias"), "qkv_bias"),
        "self_attention.q_layernorm.weight": Entry(HEAD, (f"{_ATTENTION}q_norm.weight",), "qk_norm"),
        "self_attention.k_layernorm.weight": Entry(HEAD, (f"{_ATTENTION}k_norm.weight",), "qk_norm"),
        "self_attention.joint_query_norm.weight": Entry(
            QUERIES, (f"{_ATTENTION}q_norm.weight",), "joint_qk_norm"
        ),
        "self_attention.joint_key_norm.weight": Entry(KEYS, (f"{_ATTENTION}k_norm.weight",), "joint_qk_norm"),
        "self_attention.core_attention.softmax_offset": Entry(
            SINKS, (f"{_ATTENTION}sinks",), "attention_sinks"
        ),
        "self_attention.linear_proj.weight": Entry(HEADS, (f"{_ATTENTION}o_proj.weight",)),
        "self_attention.linear_proj.bias": Entry(
            HIDDEN, (f"{_ATTENTION}o_proj.bias",), "attention_output_bias"
        ),
        "pre_mlp_layernorm.weight": Entry(HIDDEN, (f"{LAYER}post_attention_layernorm.weight",)),
        "mlp.linear_fc1.weight": Entry(GATE_UP if is_gated else UP, tensors(gate_up, "weight")),
        "mlp.linear_fc1.bias": Entry(
            GATE_UP_BIAS if is_gated else UP_BIAS, tensors(gate_up, "bias"), "mlp_bias"
        ),
        "mlp.linear_fc2.weight": Entry(FFN, (f"{_MLP}down_proj.weight",)),
        "mlp.linear_fc2.bias": Entry(HIDDEN, (f"{_MLP}down_proj.bias",), "mlp_bias"),
    }


SEPARATE = MappingProxyType(
    layer_table(tuple(f"{_ATTENTION}{part}_proj" for part in "qkv"), (f"{_MLP}gate_proj", f"{_MLP}up_proj"))
)
FUSED = MappingProxyType(layer_table((f"{_ATTENTION}qkv_proj",) * 3, (f"{_MLP}gate_up_proj",) * 2))


def with_post_norms(table: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return `table` with norms of the outputs of attention and MLP, and without those in front of them."""
    found = {}
    for name, entry in table.items():
        if name not in ("input_layernorm.weight", "pre_mlp_layernorm.weight"):
            found[name] = entry
        if name == "self_attention.linear_proj.bias":
            post = Entry(HIDDEN, (f"{LAYER}post_attention_layernorm.weight",))
            found["self_attention.linear_proj.post_layernorm.weight"] = post
    post = Entry(HIDDEN, (f"{LAYER}post_feedforward_layernorm.weight",))
    return found | {"mlp.linear_fc2.post_layernorm.weight": post}


def with_experts(
    table: Mapping[str, Entry], gate_up: tuple[str, ...], down: str, router: str
) -> Mapping[str, Entry]:
    """Return `table` for layers with experts too. Names of tensors are relative to the layer."""
    dense = {
        name: replace(entry, needs="is_dense") if name.startswith("mlp.") else entry
        for name, entry in table.items()
        if not (name.startswith("mlp.") and name.endswith(".bias"))
    }
    expert = "mlp.experts.local_experts.{expert}."
    return MappingProxyType(
        dense
        | {
            "mlp.router.weight": Entry(ROUTER, (f"{LAYER}{router}",), "moe"),
            f"{expert}linear_fc1.weight": Entry(
                EXPERT_GATE_UP, tuple(f"{LAYER}{name}" for name in gate_up), "moe"
            ),
            f"{expert}linear_fc2.weight": Entry(EXPERT_DOWN, (f"{LAYER}{down}",), "moe"),
        }
    )


# Ends of the names of tensors that have no dimension in files, and one element of one dimension in models.
SCALARS = (".act_fn.beta", ".act_fn.eps")
KEPT_IN_FP32 = (".e_score_correction_bias",)  # ends of names; small differences of it change routes
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"

LAYER_TENSOR = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.")  # starts of names


def model_table(embedding: str, norm: str) -> Mapping[str, Entry]:
    """Return the parameters outside the layers: embedding, final norm and head, in this order."""
    return MappingProxyType(
        {
            "embedding.word_embeddings.weight": Entry(VOCABULARY, (embedding,)),
            "decoder.final_layernorm.weight": Entry(HIDDEN, (norm,)),
            "output_layer.weight": Entry(VOCABULARY, (LM_HEAD,)),
        }
    )


MODEL_TABLE = model_table(EMBEDDING, "model.norm.weight")

FUSED_NORMS = MappingProxyType(  # Transformer Engine keeps a norm inside the linear layer that follows it
    {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
)
