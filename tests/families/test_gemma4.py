"""Check Gemma 4's config.json, in its newer and older spelling, against transformers."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from mkd.errors import MkdError
from mkd.plan.advice.cuda_graphs import _of_shape
from mkd.plan.checks.parallel import check_heads
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import active_parameters, model_parameters
from mkd.pruning.cut import Cut, first_parts, may_end
from mkd.pruning.request import refuse_other_kinds
from mkd.pruning.sizes import StudentSizes
from tests.plan.shapes import STUDENT, config
from tests.reported import refused
from tests.run_facts import facts_of
from tests.tiny_families import FURTHER
from tests.tiny_models import FAMILIES as TINY
from tests.tiny_models import config_of

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = dict(
    model_type="gemma4_text",
    num_hidden_layers=8,
    hidden_size=48,
    intermediate_size=96,
    num_attention_heads=8,
    vocab_size=300,
    hidden_size_per_layer_input=0,
)
SHARED = dict(attention_k_eq_v=True, num_global_key_value_heads=2)
ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.4},
    SLIDING: {"rope_type": "default", "rope_theta": 3e4},
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        SHARED | {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"},
        SHARED | {"global_head_dim": 40, "head_dim": 20, "num_key_value_heads": 8, "rope_parameters": ROPES},
        {"num_global_key_value_heads": 2},  # transformers ignores it unless keys are values
        dict(enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=20),
        {"layer_types": 4 * [FULL, SLIDING], "tie_word_embeddings": False, "sliding_window": 7},
    ],
)
def test_layers_are_those_of_transformers(more):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(**copy.deepcopy(SIZES | more))
    ours = ModelShape.from_hf_config(SIZES | more)
    assert ours.num_layers == len(theirs.layer_types) and theirs.layer_types[-1] == FULL
    for index, (kind, layer) in enumerate(zip(theirs.layer_types, ours.layers, strict=True)):
        is_full, own, shape = kind == FULL, theirs.per_layer_config[index], ours.for_layer(layer)
        sizes = own.num_attention_heads, own.num_key_value_heads, own.head_dim
        assert (shape.num_attention_heads, shape.num_query_groups, shape.head_dim) == sizes
        assert layer.sliding_window == (None if is_full else theirs.sliding_window)
        assert layer.shared_key_value == (is_full and theirs.attention_k_eq_v)
        rope = theirs.rope_parameters[kind]
        assert (layer.rope.kind, layer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert layer.rope.rotary_dim == own.head_dim
        turning = int(rope.get("partial_rotary_factor", 1.0) * own.head_dim // 2) if is_full else 0
        assert layer.rope.turning_pairs == turning
        assert layer.qk_norm and layer.value_norm and layer.post_norms and layer.output_scale
    assert (ours.attention_scale, ours.embedding_scale) == (1.0, theirs.hidden_size**0.5)
    assert ours.logits_cap == theirs.final_logit_softcapping and not ours.zero_centered_norms
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    moe = ours.moe
    found = moe and (moe.num_experts, moe.top_k, moe.ffn_hidden_size, moe.shared_ffn_hidden_size)
    given = (theirs.num_experts, theirs.top_k_experts, theirs.moe_intermediate_size, 96)
    assert found == (given if theirs.enable_moe_block else None)
    written = ModelShape.from_hf_config(json.loads(theirs.to_json_string()))
    assert ours.differences(written) == []


@pytest.mark.parametrize(
    ("code", "more"),
    [
        (
            "model-feature-not-supported: hidden_size_per_layer_input 256",
            {"hidden_size_per_layer_input": 256},
        ),
        ("model-feature-not-supported: num_kv_shared_layers", {"num_kv_shared_layers": 2}),
        ("model-feature-not-supported: attention_bias", {"attention_bias": True}),
        ("model-feature-not-supported: use_bidirectional_attention", {"use_bidirectional_attention": "all"}),
        ("model-feature-not-supported: hidden_activation", {"hidden_activation": "gelu"}),
        ("model-feature-not-supported: layer type 'chunked", {"layer_types": 8 * ["chunked_attention"]}),
        (
            "model-feature-not-supported: rope type 'yarn'",
            {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}},
        ),
        (
            "model-feature-not-supported: per_layer_config has other",
            {"per_layer_config": {"1": {"head_dim": 12}}},
        ),
        ("model-config-not-valid: key 'num_experts' is missing", {"enable_moe_block": True}),
        ("model-config-not-valid: per_layer_config is 3", {"per_layer_config": 3}),
        ("model-config-not-valid: num_attention_heads 8 is no", SHARED | {"num_global_key_value_heads": 3}),
    ],
)
def test_what_mkd_cannot_run_exactly_is_refused(code, more):
    with refused(code, MkdError):
        ModelShape.from_hf_config(SIZES | more)


def test_a_released_small_model_is_refused_by_default():
    """E2B and E4B have embeddings for each layer, also where config.json does not say so."""
    given = {name: value for name, value in SIZES.items() if name != "hidden_size_per_layer_input"}
    with refused("model-feature-not-supported: hidden_size_per_layer_input 256"):
        ModelShape.from_hf_config(given)


def test_released_sizes_have_as_many_parameters_as_in_transformers():
    """Counted by transformers' modules on the meta device; the towers are apart."""
    released = dict(head_dim=256, global_head_dim=512, attention_k_eq_v=True, vocab_size=262144)
    large = dict(num_hidden_layers=60, hidden_size=5376, intermediate_size=21504, num_attention_heads=32)
    large |= dict(num_key_value_heads=16, num_global_key_value_heads=4)
    assert model_parameters(ModelShape.from_hf_config(SIZES | released | large)).total == 30_697_345_280
    small = dict(num_hidden_layers=30, hidden_size=2816, intermediate_size=2112, num_attention_heads=16)
    small |= dict(num_key_value_heads=8, num_global_key_value_heads=2, enable_moe_block=True)
    small |= dict(num_experts=128, top_k_experts=8, moe_intermediate_size=704)
    shape = ModelShape.from_hf_config(SIZES | released | small)
    assert model_parameters(shape).total == 25_233_141_760 and active_parameters(shape) == 3_822_530_560


@pytest.mark.parametrize(
    ("groups", "head_dim", "tensor", "context", "divides"),
    [
        (2, 16, 1, 2, True),
        (1, 16, 1, 2, False),
        (1, 16, 2, 1, True),
        (1, 512, 1, 2, True),
        (4, 16, 1, 4, True),
    ],
)
def test_context_parallelism_divides_the_heads_of_every_layer(groups, head_dim, tensor, context, divides):
    """But for wide heads, whose attention gathers keys and values: windows have 4 key/value heads here."""
    more = dict(attention_k_eq_v=True, num_global_key_value_heads=groups, global_head_dim=head_dim)
    shape = ModelShape.from_hf_config(SIZES | more)
    sizes = "--tensor-model-parallel-size", tensor, "--context-parallel-size", context
    found = list(check_heads(facts_of(config(*sizes), 16, shape, (STUDENT,))))
    assert [one.code for one in found] == ([] if divides else ["model-not-divisible"])


def test_wide_heads_run_without_graphs():
    assert "wide heads" in str(_of_shape(ModelShape.from_hf_config(SIZES)))
    assert _of_shape(ModelShape.from_hf_config(SIZES | {"global_head_dim": 256})) is None


def test_a_released_folder_is_not_cut():
    released = {"model_type": "gemma4", "text_config": SIZES, "vision_config": {}}
    with refused("cut-not-supported: mkd cannot cut a gemma4 model"):
        refuse_other_kinds(ModelShape.from_hf_config(released))


def test_a_cut_keeps_full_attention_at_its_end():
    """The values of layers move with them, and no other cut can be written."""
    from transformers import AutoConfig

    written = json.loads(AutoConfig.for_model(**SIZES, **SHARED).to_json_string())
    teacher = ModelShape.from_hf_config(written)
    assert [may_end(teacher, layer) for layer in range(8)] == [False] * 5 + [True, False, True]
    config = Cut((0, 2, 5)).config(teacher)
    assert config["per_layer_config"] == {"2": written["per_layer_config"]["5"]}
    assert ModelShape.from_hf_config(config).layers == tuple(teacher.layers[layer] for layer in (0, 2, 5))
    assert first_parts(StudentSizes(3, 96, 4, 48), teacher).layers == (0, 1, 7)


def test_the_page_of_families_names_those_with_soft_caps():
    """The others ignore the key and say so, or refuse it."""
    capped, refusing = set(), set()
    for json_of in map(config_of, TINY | FURTHER):
        try:
            shape = ModelShape.from_hf_config(json_of | {"final_logit_softcapping": 9.0})
        except MkdError as refusal:
            assert refusal.code == "model-feature-not-supported", refusal
            refusing.add(json_of["model_type"])
        else:
            capped |= {json_of["model_type"]} if shape.logits_cap == 9.0 else set()
    assert refusing == {"gemma3_text"}
    (sentence,) = re.findall(r"^\* (Soft-capped .*?),", Path("docs/families.md").read_text(), re.M | re.S)
    assert set(re.findall(r"`(gemma\w+)`", sentence)) == capped | {"gemma4"} and "gemma4_text" in capped
