"""Which Hugging Face tensors make which Megatron parameter: tables, and the one rule that reads them.

Every parameter is a run of equal *blocks* along one dimension (vocabulary rows, attention groups, MLP slices). A block is
made of *parts* that come from different Hugging Face tensors, in the order of the table: query, key and value heads of one
attention group, gate and up rows of one slice. Tensor-parallel rank r owns an equal run of whole blocks; blocks beyond
the real number are zero padding. `pieces` lists the copies between a parameter and its tensors; reading follows them
forwards and writing backwards, so that the two cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mkd.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Rule:
    """How one kind of parameter is cut. `dim` is the cut dimension; other dimensions are `hidden_size` long."""

    blocks: Callable[[ModelShape, int], int]  # (shape, tp) -> real blocks over all ranks
    parts: Callable[[ModelShape, int], tuple[int, ...]]  # (shape, tp) -> length of each part of a block
    dim: int = 0
    replicated: bool = False  # every rank holds the whole parameter
    any_padding: bool = False  # padded further than to the next multiple of tp blocks


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "hidden": Rule(lambda s, tp: 1, lambda s, tp: (s.hidden_size,), replicated=True),
        "head": Rule(lambda s, tp: 1, lambda s, tp: (s.head_dim,), replicated=True),
        "vocabulary": Rule(lambda s, tp: s.vocab_size, lambda s, tp: (1,), any_padding=True),
        "qkv": Rule(
            lambda s, tp: s.num_query_groups,
            lambda s, tp: (s.heads_per_group * s.head_dim, s.head_dim, s.head_dim),
        ),
        "heads": Rule(
            lambda s, tp: s.num_query_groups, lambda s, tp: (s.heads_per_group * s.head_dim,), dim=1
        ),
        "gate_up": Rule(lambda s, tp: tp, lambda s, tp: (s.ffn_hidden_size // tp, s.ffn_hidden_size // tp)),
        "ffn": Rule(lambda s, tp: tp, lambda s, tp: (s.ffn_hidden_size // tp,), dim=1),
    }
)


@dataclass(frozen=True)
class Entry:
    """A row of a table: the Hugging Face tensor of each part. A repeated name is one fused tensor, parts in order."""

    rule: str
    tensors: tuple[str, ...]
    needs: str = ""  # switch of `ModelShape` without which the parameter does not exist


_ATTENTION, _MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
_QKV = tuple(f"{_ATTENTION}{part}_proj." for part in "qkv")
_GATE_UP = (f"{_MLP}gate_proj.", f"{_MLP}up_proj.")


def _layer_table(qkv: tuple[str, ...], gate_up: tuple[str, ...]) -> dict[str, Entry]:
    """Parameters of one decoder layer, named relative to it, in the order in which they are exported."""

    def of(tensors: tuple[str, ...], kind: str) -> tuple[str, ...]:
        return tuple(tensor + kind for tensor in tensors)

    return {
        "input_layernorm.weight": Entry("hidden", ("model.layers.{layer}.input_layernorm.weight",)),
        "self_attention.linear_qkv.weight": Entry("qkv", of(qkv, "weight")),
        "self_attention.linear_qkv.bias": Entry("qkv", of(qkv, "bias"), "qkv_bias"),
        "self_attention.q_layernorm.weight": Entry("head", (f"{_ATTENTION}q_norm.weight",), "qk_norm"),
        "self_attention.k_layernorm.weight": Entry("head", (f"{_ATTENTION}k_norm.weight",), "qk_norm"),
        "self_attention.linear_proj.weight": Entry("heads", (f"{_ATTENTION}o_proj.weight",)),
        "self_attention.linear_proj.bias": Entry(
            "hidden", (f"{_ATTENTION}o_proj.bias",), "attention_output_bias"
        ),
        "pre_mlp_layernorm.weight": Entry(
            "hidden", ("model.layers.{layer}.post_attention_layernorm.weight",)
        ),
        "mlp.linear_fc1.weight": Entry("gate_up", of(gate_up, "weight")),
        "mlp.linear_fc1.bias": Entry("gate_up", of(gate_up, "bias"), "mlp_bias"),
        "mlp.linear_fc2.weight": Entry("ffn", (f"{_MLP}down_proj.weight",)),
        "mlp.linear_fc2.bias": Entry("hidden", (f"{_MLP}down_proj.bias",), "mlp_bias"),
    }


SEPARATE = MappingProxyType(_layer_table(_QKV, _GATE_UP))
FUSED = MappingProxyType(_layer_table((f"{_ATTENTION}qkv_proj.",) * 3, (f"{_MLP}gate_up_proj.",) * 2))

LAYER_TABLES: Mapping[str, Mapping[str, Entry]] = MappingProxyType(
    {"llama": SEPARATE, "mistral": SEPARATE, "qwen2": SEPARATE, "qwen3": SEPARATE, "phi3": FUSED}
)

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"

MODEL_TABLE: Mapping[str, Entry] = MappingProxyType(
    {
        "embedding.word_embeddings.weight": Entry("vocabulary", (EMBEDDING,)),
        "decoder.final_layernorm.weight": Entry("hidden", ("model.norm.weight",)),
        "output_layer.weight": Entry("vocabulary", (LM_HEAD,)),
    }
)

FUSED_NORMS = MappingProxyType(  # Transformer Engine keeps a norm inside the linear layer that follows it
    {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
)

_LAYER_PARAMETER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Piece:
    """`length` rows (columns where `dim` is 1) that a parameter's shard and a Hugging Face tensor have in common."""

    tensor: str
    tensor_start: int
    shard_start: int
    length: int


@dataclass(frozen=True)
class TensorMap:
    """One Megatron parameter of one model, bound to its Hugging Face tensors."""

    shape: ModelShape
    rule: Rule
    tensors: tuple[str, ...]
    is_matrix: bool

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> full shape."""
        blocks, lengths = self.rule.blocks(self.shape, 1), dict.fromkeys(self.tensors, 0)
        for tensor, part in zip(self.tensors, self.rule.parts(self.shape, 1), strict=True):
            lengths[tensor] += blocks * part
        return {tensor: self._with_other_dim(length) for tensor, length in lengths.items()}

    def fits(self, shard_shape: tuple[int, ...], tp_size: int) -> bool:
        """Whether a parameter of `shard_shape` on each of `tp_size` ranks holds whole blocks, and all of them."""
        if len(shard_shape) <= self.rule.dim or shard_shape != self._with_other_dim(
            shard_shape[self.rule.dim]
        ):
            return False
        ranks = 1 if self.rule.replicated else tp_size
        blocks, remainder = divmod(shard_shape[self.rule.dim], sum(self.rule.parts(self.shape, ranks)))
        needed = -(-self.rule.blocks(self.shape, ranks) // ranks)
        return remainder == 0 and (blocks >= needed if self.rule.any_padding else blocks == needed)

    def pieces(self, shard_length: int, tp_rank: int, tp_size: int) -> list[Piece]:
        """What rank `tp_rank` copies. `shard_length` is its parameter's length along the cut dimension, padding included."""
        rank, ranks = (0, 1) if self.rule.replicated else (tp_rank, tp_size)
        parts, real = self.rule.parts(self.shape, ranks), self.rule.blocks(self.shape, ranks)
        owned = shard_length // sum(parts)
        first = rank * owned
        count = max(0, min(owned, real - first))
        if len(parts) == 1:  # neighbouring blocks touch on both sides: one copy
            return [Piece(self.tensors[0], first * parts[0], 0, count * parts[0])] if count else []
        tensor_starts = self._part_starts(parts, real)
        return [
            Piece(
                tensor, tensor_start + (first + block) * part, block * sum(parts) + sum(parts[:index]), part
            )
            for block in range(count)
            for index, (tensor, tensor_start, part) in enumerate(
                zip(self.tensors, tensor_starts, parts, strict=True)
            )
        ]

    def _part_starts(self, parts: tuple[int, ...], blocks: int) -> list[int]:
        """Where each part begins in its tensor; only a fused tensor has starts other than 0."""
        filled: dict[str, int] = {}
        starts = []
        for tensor, part in zip(self.tensors, parts, strict=True):
            starts.append(filled.get(tensor, 0))
            filled[tensor] = starts[-1] + blocks * part
        return starts

    def _with_other_dim(self, length: int) -> tuple[int, ...]:
        if not self.is_matrix:
            return (length,)
        return (length, self.shape.hidden_size) if self.rule.dim == 0 else (self.shape.hidden_size, length)


def find_map(shape: ModelShape, parameter: str, first_layer: int) -> TensorMap | None:
    """The map of a parameter of a pipeline chunk whose layer 0 is the model's layer `first_layer`; None if unknown."""
    match = _LAYER_PARAMETER.fullmatch(parameter)
    if match is None:
        entry = MODEL_TABLE.get(parameter)
        return None if entry is None else _bind(shape, entry)
    layer, name = first_layer + int(match.group(1)), match.group(2)
    entry = LAYER_TABLES[shape.family].get(FUSED_NORMS.get(name, name))
    if entry is None or layer >= shape.num_layers or (entry.needs and not getattr(shape, entry.needs)):
        return None
    return _bind(shape, entry, layer)


def hf_tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a complete checkpoint, in the order of the model. A tied head is the embedding: not listed."""
    embedding, norm, head = MODEL_TABLE.values()
    layer_entries = [e for e in LAYER_TABLES[shape.family].values() if not e.needs or getattr(shape, e.needs)]
    maps = [_bind(shape, embedding)]
    maps += [_bind(shape, entry, layer) for layer in range(shape.num_layers) for entry in layer_entries]
    maps += [_bind(shape, norm), _bind(shape, head)]
    return {tensor: full for tensor_map in maps for tensor, full in tensor_map.tensor_shapes().items()}


def _bind(shape: ModelShape, entry: Entry, layer: int = 0) -> TensorMap:
    tensors = tuple(tensor.format(layer=layer) for tensor in entry.tensors)
    if shape.tie_word_embeddings and tensors == (LM_HEAD,):
        tensors = (EMBEDDING,)
    rule = RULES[entry.rule]
    return TensorMap(shape, rule, tensors, is_matrix=tensors[0].endswith(".weight") and not rule.replicated)
