"""Make the table of all model families: what mkd does with each, by its own checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mkd.errors import UsageError
from mkd.families.registry import FAMILIES
from mkd.families.vision import VISION_FAMILIES
from mkd.kinds.sampled.rollout_limits import sampling_limit
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.request import refuse_other_kinds

_INTRODUCTION = """# Models: what mkd does with each family

Every family trains, teaches and is exported, in all layouts. [Families](families.md) says which
releases these are and how they differ; [models with images](vision.md) and [experts](moe.md) have
pages of their own. Every family has a [card](cards/index.md): what was verified, and what was not.

| column | yes: |
|---|---|
| experts | its layers may have experts |
| images | its vision tower runs and may learn |
| rollouts | a student may [sample](on-policy.md), from prompts without images |
| make-student | [`mkd make-student`](make-student.md) cuts it |

| `model_type` | text | experts | images | rollouts | make-student |
|---|---|---|---|---|---|
"""
_SIZES: Mapping[str, Any] = MappingProxyType(  # of a small model that every family could be
    dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=128, head_dim=16)
    | dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
    | dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2)
    | dict(hidden_size_per_layer_input=0)
    | dict(moe_intermediate_size=24, shared_expert_intermediate_size=32, n_shared_experts=1)
    | dict(n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=1.0)
    | dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16)
)
_FURTHER: Mapping[str, Mapping[str, Any]] = MappingProxyType(  # keys without which mkd refuses the family
    {
        "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0},
        "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "mlp"]},
    }
)


def models_page() -> str:
    """Return the page."""
    shapes = dict(_shapes())
    return _INTRODUCTION + "".join(_row(name, shape) for name, shape in shapes.items())


def _shapes() -> Iterator[tuple[str, ModelShape]]:
    """Yield the shape of a small model of every family."""
    for name in FAMILIES:
        yield name, ModelShape.from_hf_config({**_SIZES, **_FURTHER.get(name, {}), "model_type": name})
    for name, family in VISION_FAMILIES.items():
        text = {**_SIZES, "model_type": family.text_family or "llama"}
        rope = {"mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
        parts = {"text_config": text | {"rope_parameters": rope}, "vision_config": {"image_size": 256}}
        yield name, ModelShape.from_hf_config({"model_type": name, **parts})


def _row(name: str, shape: ModelShape) -> str:
    limit = sampling_limit(shape, length=1)
    has_experts = any("{expert}" in tensor for tensor in FAMILIES[shape.family].tensors)
    can = ("yes", _yes(has_experts), _yes(shape.vision is not None))
    rollouts = "yes" if limit is None else f"no: {limit}"
    return f"| `{name}` | {' | '.join(can)} | {rollouts} | {_yes(_is_cut(shape))} |\n"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _is_cut(shape: ModelShape) -> bool:
    try:
        refuse_other_kinds(shape)
    except UsageError:
        return False
    return True
