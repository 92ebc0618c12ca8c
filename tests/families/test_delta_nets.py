"""Check how configurations of models with gated delta nets read, and what mkd refuses for them."""

from __future__ import annotations

import pytest

from mkd.errors import CheckpointError, MkdError, UsageError
from mkd.families.mixer_shape import DeltaShape
from mkd.plan.checks.expert_limits import check_experts
from mkd.plan.checks.parallel import check_heads
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.request import refuse_other_kinds
from tests.plan.shapes import QWEN3_5_9B, STUDENT, config
from tests.reported import refused
from tests.run_facts import facts_of
from tests.tiny_models import config_of

MIXER, ATTENTION = "linear_attention", "full_attention"


def read(family: str, **more: object) -> ModelShape:
    return ModelShape.from_hf_config(config_of(family) | more)


def test_a_configuration_with_sizes_alone_is_the_published_one():
    mixer = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel_size=4)
    assert [layer.has_attention for layer in QWEN3_5_9B.layers] == 8 * [False, False, False, True]
    assert {layer.mixer for layer in QWEN3_5_9B.layers} == {mixer, None}
    assert (QWEN3_5_9B.head_dim, QWEN3_5_9B.common("rope").rotary_dim) == (256, 64)
    assert QWEN3_5_9B.zero_centered_norms and QWEN3_5_9B.common("output_gate")


def test_kinds_of_layers_are_named_or_counted():
    named = read("qwen3_5", layer_types=[ATTENTION, MIXER, MIXER, ATTENTION])
    assert [layer.has_attention for layer in named.layers] == [True, False, False, True]
    counted = read("qwen3_5", layer_types=None, full_attention_interval=2)
    assert [layer.has_attention for layer in counted.layers] == 2 * [False, True]
    experts = read("qwen3_next", mlp_only_layers=[], decoder_sparse_step=2).layers
    assert [layer.is_dense for layer in experts] == 2 * [True, False] and experts[1].has_shared_gate


@pytest.mark.parametrize(
    ("more", "code", "error"),
    [
        ({"attention_bias": True}, "model-feature-not-supported: attention_bias true", UsageError),
        ({"layer_types": 4 * ["sliding_attention"]}, "model-feature-not-supported", UsageError),
        ({"layer_types": [MIXER]}, "model-config-not-valid: layer_types names 1", CheckpointError),
        ({"linear_num_value_heads": 6}, "model-config-not-valid: linear_num_value_heads 6", CheckpointError),
        ({"linear_conv_kernel_dim": 0}, "model-config-not-valid", CheckpointError),
    ],
)
def test_what_cannot_run_exactly_is_refused(more, code, error):
    with refused(code, error):
        read("qwen3_5", **more)


def test_differences_name_the_sizes_of_mixers():
    other = read("qwen3_5", linear_value_head_dim=20)
    assert read("qwen3_5").differences(other) == ["layer 0: mixer.value_dim 12 instead of 20"]


def problems(check, *flags: object, teacher: ModelShape = STUDENT) -> list[str]:
    """Return the errors of a run whose student is Qwen3.5-9B on 64 processes."""
    facts = facts_of(config(*flags), 64, QWEN3_5_9B, (teacher,))
    found: list[MkdError] = list(check(facts))
    return [f"{one.code}: {one.what}" for one in found]


def test_limits_are_found_before_the_run():
    sizes = "--tensor-model-parallel-size", 8, "--context-parallel-size", 4
    (heads,) = problems(check_heads, *sizes)
    assert heads.startswith("model-not-divisible: the student's 16 key heads") and "8 x context" in heads
    assert problems(check_heads, *sizes[:3], 2) == []
    with refused("cut-not-supported: mkd cannot cut a qwen3_5_text model", UsageError):
        refuse_other_kinds(QWEN3_5_9B)


def test_recomputation_of_mixers_needs_mixers():
    flags = "--recompute-granularity", "selective", "--recompute-modules", "mixer"
    assert problems(check_experts, *flags) == []
    facts = facts_of(config(*flags), 1, STUDENT, (STUDENT,))
    (unused,) = check_experts(facts)
    assert "recompute-modules mixer" in unused.what and "no mixers" in unused.why
