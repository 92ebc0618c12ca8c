"""Configurations of models with images: nested and flat ones, and models that are refused by name."""

from __future__ import annotations

import pytest

from mkd.errors import CheckpointError, UsageError
from mkd.families.vision import REFUSED, TOWER_ACTIVATIONS
from mkd.plan.models.model_shape import ModelShape
from tests.reported import Reported, refused
from tests.tiny_vision_models import FAMILIES, vision_config

HUB_QWEN = {  # the keys of a hub file of Qwen2.5-VL 3B, which are flat
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "temporal_patch_size": 2,
    },
}
HUB_SMOLVLM = {  # SmolVLM 256M: transformers completes the tower's depth and width
    "model_type": "idefics3",
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "max_position_embeddings": 8192,
        "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "smolvlm",
        "num_attention_heads": 12,
        "patch_size": 16,
    },
}


def test_a_flat_hub_file_is_what_transformers_nests():
    from transformers import Qwen2_5_VLConfig

    flat = ModelShape.from_hf_config(HUB_QWEN)
    nested = Qwen2_5_VLConfig(**HUB_QWEN).to_dict()
    assert "text_config" in nested and flat.differences(ModelShape.from_hf_config(nested)) == []
    assert flat.family == "qwen2" and flat.tie_word_embeddings and flat.vision.window_size == 112
    (rope,) = flat.ropes
    assert (rope.kind, rope.theta, rope.sections) == ("default", 1e6, (16, 24, 24))
    assert flat.vision.pixel_unit == (3 * 2 * 14 * 14,) and not flat.sliding_windows


def test_missing_sizes_of_a_tower_are_those_of_transformers():
    from transformers import Idefics3Config

    ours = ModelShape.from_hf_config(HUB_SMOLVLM)
    theirs = ModelShape.from_hf_config(Idefics3Config(**HUB_SMOLVLM).to_dict())
    assert ours.differences(theirs) == []
    assert (ours.vision.depth, ours.vision.ffn_hidden_size) == (12, 3072)
    assert ours.vision.pixel_unit == (3, 512, 512) and ours.family == "llama"


def test_sections_alternate_in_newer_qwen():
    shapes = {name: ModelShape.from_hf_config(vision_config(name).to_dict()) for name in FAMILIES}
    ropes = {name: shape.common("rope") for name, shape in shapes.items()}
    newer = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
    assert [name for name, rope in ropes.items() if rope.interleaved_sections] == newer
    assert [name for name, rope in ropes.items() if rope.sections] == ["qwen2_5_vl", *newer]
    assert [name for name, shape in shapes.items() if shape.vision.deepstack] == newer[:2]


@pytest.mark.parametrize("kind", ["Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"])
def test_missing_keys_of_newer_qwen_are_those_of_transformers(kind):
    """A config.json that says next to nothing is what transformers completes."""
    import transformers

    theirs = getattr(transformers, f"{kind}Config")()
    least = {"model_type": theirs.model_type, "vision_config": {}}
    given = {**theirs.text_config.to_dict(), "rope_parameters": None, "layer_types": None}
    ours = ModelShape.from_hf_config(least | {"text_config": given})
    assert ours.differences(ModelShape.from_hf_config(theirs.to_dict())) == []
    assert ours.vision.image_token_id == theirs.image_token_id


@pytest.mark.parametrize("model_type", REFUSED)
def test_known_models_are_refused_by_name(model_type):
    with pytest.raises(UsageError) as error:
        ModelShape.from_hf_config({"model_type": model_type, "text_config": {}, "vision_config": {}})
    assert error.value.code == "model-type-not-supported" and REFUSED[model_type] in error.value.report()


@pytest.mark.parametrize(
    "change, code",
    [
        ({"vision_config": None}, "model-config-not-valid: vision_config"),
        (
            {"vision_config": HUB_SMOLVLM["vision_config"] | {"patch_size": 0}},
            "model-config-not-valid: patch_size",
        ),
        (
            {"vision_config": HUB_SMOLVLM["vision_config"] | {"patch_size": 24}},
            "model-config-not-valid: is not a multiple of patch_size",
        ),
        (
            {"vision_config": HUB_SMOLVLM["vision_config"] | {"num_attention_heads": 5}},
            "model-config-not-valid: heads do not divide the width",
        ),
        ({"text_config": {"model_type": "bert"}}, "model-type-not-supported: is not supported"),
        *(
            (
                {"text_config": vision_config("smolvlm").text_config.to_dict() | one},
                "model-type-not-supported: whose text model is of",
            )
            for one in (
                {"model_type": "gemma3_text"},
                {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
            )
        ),
    ],
)
def test_broken_configurations_are_named(change, code):
    with pytest.raises((CheckpointError, UsageError)) as error:
        ModelShape.from_hf_config(HUB_SMOLVLM | change)
    assert Reported.of(error.value) == code


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tower_has_an_activation_of_transformers(name):
    from transformers.activations import ACT2FN

    assert all(one in ACT2FN for one in TOWER_ACTIVATIONS)
    config = vision_config(name).to_dict()
    assert config["vision_config"]["hidden_act"] in TOWER_ACTIVATIONS
    config["vision_config"]["hidden_act"] = "nonsense"
    with refused("model-feature-not-supported: is not supported", UsageError) as caught:
        ModelShape.from_hf_config(config, "folder/config.json")
    assert "folder/config.json" in caught.value.report() and "nonsense" in caught.value.report()


def test_features_come_after_blocks_that_exist():
    config = vision_config("qwen3_vl", vision={"deepstack_visual_indexes": [0, 7]}).to_dict()
    with refused("model-config-not-valid: deepstack_visual_indexes", CheckpointError):
        ModelShape.from_hf_config(config)


def test_sections_must_make_up_half_a_head():
    rope = {"type": "mrope", "mrope_section": [16, 24, 16]}
    with pytest.raises(CheckpointError) as error:
        ModelShape.from_hf_config(HUB_QWEN | {"rope_scaling": rope})
    assert Reported.of(error.value) == "model-config-not-valid: does not make up"
