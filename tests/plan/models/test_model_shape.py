"""Check damaged and invented Hugging Face configurations: they give a named error, never a later crash."""

from __future__ import annotations

import copy
import json

import pytest

from mkd.errors import CheckpointError, UsageError
from mkd.families.registry import FAMILIES
from mkd.plan.models.model_shape import ModelShape
from tests.reported import refused

CONFIG = dict(
    model_type="llama",
    num_hidden_layers=2,
    hidden_size=48,
    intermediate_size=96,
    num_attention_heads=4,
    vocab_size=300,
)
WINDOW = dict(
    model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=0, layer_types=None
)
ROPES = (
    dict(
        rope_type="llama3",
        factor=8,
        low_freq_factor=1,
        high_freq_factor=4,
        original_max_position_embeddings=64,
    ),
    dict(
        type="longrope",
        rope_theta=1e4,
        factor=8.0,
        attention_factor=1.0,
        short_factor=[1.0] * 6,
        long_factor=[2.0] * 6,
    ),
    dict(rope_type="default", partial_rotary_factor=0.5),
)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_hidden_layers", "2", "num_hidden_layers is '2'"),
        ("num_hidden_layers", True, "num_hidden_layers is True"),
        ("hidden_size", None, "key 'hidden_size' is missing or null"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_attention_heads", [4], "num_attention_heads is [4]"),
        ("vocab_size", 3.5, "vocab_size is 3.5"),
        ("vocab_size", -3, "vocab_size is -3"),
        ("head_dim", "x", "head_dim is 'x'"),
        ("max_position_embeddings", "a", "max_position_embeddings is 'a'"),
        ("model_type", ["llama"], "model_type is ['llama']"),
        ("hidden_act", ["silu"], "hidden_act is ['silu']"),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false'"),  # the text is true in Python
        ("attention_bias", 0.5, "attention_bias is 0.5"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5'"),
        ("initializer_range", float("nan"), "initializer_range is nan"),
        ("rope_theta", "x", "rope_theta is 'x'"),
        ("rope_theta", -1, "rope_theta is -1"),
        ("rope_scaling", [1], "rope_scaling is [1]"),
        ("rope_scaling", {"rope_type": {}}, "rope_scaling: rope_type is {}"),
        ("rope_parameters", {"rope_type": "linear", "factor": True}, "rope_parameters: factor is True"),
        ("rope_parameters", {"rope_type": "longrope", "short_factor": [1, "2"]}, "short_factor is [1, '2']"),
    ],
)
def test_a_value_of_a_wrong_kind_is_named(name, value, text, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, name: value}))
    with pytest.raises(CheckpointError) as caught:
        ModelShape.from_hf_dir(tmp_path)
    assert (
        str(tmp_path / "config.json") in caught.value.what and text in caught.value.what and caught.value.do
    )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("wrong", ["x", True, -1, 0, 2.5, [[]], {"x": None}, float("inf"), None])
def test_no_value_ends_in_a_traceback(wrong, rope):
    """Every key that is read, with every kind of JSON value, is refused by a named error or has no effect."""
    full = {**CONFIG, **WINDOW, "rope_parameters": rope}
    damaged = [
        {**full, name: wrong}
        for name in (*full, "hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias")
    ]
    damaged += [{**full, "rope_parameters": {**rope, name: wrong}} for name in rope]
    for config in damaged:
        try:
            shape = ModelShape.from_hf_config(config)
        except (CheckpointError, UsageError) as error:
            assert error.what and error.why
        else:
            assert shape.common("rope").theta > 0 < shape.norm_epsilon and shape.sliding_windows in ((), (8,))


def test_null_is_not_given():
    nulls = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings", "rms_norm_eps")
    )
    shape = ModelShape.from_hf_config({**CONFIG, **nulls})
    assert (shape.num_query_groups, shape.head_dim, shape.max_position_embeddings) == (4, 12, 2048)
    assert shape.norm_epsilon == 1e-6 and shape.hf_config == {**CONFIG, **nulls}


def test_code_of_the_configuration_is_not_run(tmp_path):
    """`auto_map` is ignored: the configuration is read as JSON."""
    mark = tmp_path / "was run"
    (tmp_path / "remote.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Remote: ...\n")
    auto_map = {"AutoConfig": "remote.Remote", "AutoModelForCausalLM": "remote.Remote"}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "auto_map": auto_map}))
    assert ModelShape.from_hf_dir(tmp_path).num_layers == 2 and not mark.exists()


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_the_kinds_of_layers_decide_the_window(family):
    """This holds for a mistral model too, which transformers then calls ministral."""
    config = CONFIG | {
        "model_type": family,
        "num_key_value_heads": 4,
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    windows = [
        ModelShape.from_hf_config(config | {"layer_types": 2 * [kind]}).common("sliding_window")
        for kind in (FULL, SLIDING)
    ]
    assert windows == [None, 8]
    mixed = ModelShape.from_hf_config(config | {"layer_types": [FULL, SLIDING]})
    assert [layer.sliding_window for layer in mixed.layers] == [None, 8] and mixed.sliding_windows == (8,)
    with refused("model-feature-not-supported: layer type"):
        ModelShape.from_hf_config(config | {"layer_types": [FULL, "chunked_attention"]})
    with refused("model-config-not-valid: layers, num_hidden_layers is"):
        ModelShape.from_hf_config(config | {"layer_types": [FULL, SLIDING, FULL]})
    nothing = config | {"sliding_window": None, "max_window_layers": 0}
    assert ModelShape.from_hf_config(nothing).sliding_windows == ()
    with refused("model-config-not-valid: sliding_window is missing or null", CheckpointError):
        ModelShape.from_hf_config(nothing | {"layer_types": [FULL, SLIDING]})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_used_but_not_given(family):
    from transformers import AutoConfig

    config = CONFIG | {
        "model_type": family,
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "max_window_layers": 0,
    }
    assert (
        ModelShape.from_hf_config(config).common("sliding_window")
        == AutoConfig.for_model(**config).sliding_window
        == 4096
    )


def test_a_model_that_looks_ahead_is_refused():
    with refused("model-feature-not-supported: is_causal false is not supported"):
        ModelShape.from_hf_config(CONFIG | {"is_causal": False})


@pytest.mark.parametrize("groups", [3, 8])
def test_key_value_heads_that_do_not_divide_the_heads(groups):
    with refused("model-config-not-valid: num_key_value_heads"):
        ModelShape.from_hf_config(CONFIG | {"num_key_value_heads": groups})


def test_differences_are_those_that_change_what_the_weights_compute():
    ours = ModelShape.from_hf_config(CONFIG | {"rope_theta": 1e4})
    same = {"max_position_embeddings": 64, "initializer_range": 0.5, "use_cache": False}
    assert ours.differences(ModelShape.from_hf_config(CONFIG | same)) == []
    theirs = ModelShape.from_hf_config(
        CONFIG | {"num_key_value_heads": 2, "rope_theta": 5e5, "tie_word_embeddings": True}
    )
    changed = ["num_query_groups 4 instead of 2", "tie_word_embeddings False instead of True"]
    assert ours.differences(theirs) == [*changed, "rope.theta 10000.0 instead of 500000.0"]


# They follow the factor of rotated channels.
HALVED = "phi3", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
# transformers does not know the alias; the others have attention or layers of other kinds
OTHERS = {"kimi_k2", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "smollm3", "ministral3", "granitemoehybrid"}
OTHERS |= {"olmo3", "exaone4", "nemotron_h", "gemma4_text"}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - OTHERS))
def test_what_a_configuration_lacks_is_what_transformers_takes(family):
    from transformers import AutoConfig

    sizes = CONFIG | {"model_type": family, "num_attention_heads": 32, "hidden_size": 2048}
    sizes |= {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    theirs, ours = AutoConfig.for_model(**sizes), ModelShape.from_hf_config(sizes)
    head_dim = getattr(theirs, "head_dim", None) or 64
    assert (ours.head_dim, ours.num_query_groups) == (head_dim, theirs.num_key_value_heads)
    assert (ours.norm_epsilon, ours.common("sliding_window")) == (
        theirs.rms_norm_eps,
        getattr(theirs, "sliding_window", None),
    )
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    # the others ignore the factor
    assert ours.common("rope").rotary_dim == (head_dim // 2 if family in HALVED else head_dim)
    nothing = sizes | {"sliding_window": None, "num_key_value_heads": None}
    if family == "gemma3_text":  # its layers have kinds
        with refused("model-config-not-valid: sliding_window is missing or null", CheckpointError):
            ModelShape.from_hf_config(nothing)
    else:
        shape = ModelShape.from_hf_config(nothing)
        assert shape.sliding_windows == () and shape.num_query_groups == 32
    few = CONFIG | {"model_type": family, "num_attention_heads": 64, "hidden_size": 2048}
    assert ModelShape.from_hf_config(few).num_query_groups == AutoConfig.for_model(**few).num_key_value_heads


def test_a_difference_in_some_layers_names_the_first_of_them():
    config = CONFIG | {"model_type": "qwen3", "num_hidden_layers": 3, "sliding_window": 8}
    config |= {"use_sliding_window": True, "num_key_value_heads": 4, "head_dim": 12}
    ours = ModelShape.from_hf_config(config | {"max_window_layers": 1})
    theirs = ModelShape.from_hf_config(config | {"max_window_layers": 2})
    assert ours.differences(theirs) == ["layer 1: sliding_window 8 instead of None"]
    assert theirs.differences(ours) == ["layer 1: sliding_window None instead of 8"]
    fewer = ModelShape.from_hf_config(config | {"max_window_layers": 1, "num_hidden_layers": 2})
    assert ours.differences(fewer) == ["num_layers 3 instead of 2"]
    wider = ModelShape.from_hf_config(config | {"max_window_layers": 0, "sliding_window": 9})
    all_narrow = ModelShape.from_hf_config(config | {"max_window_layers": 0})
    assert all_narrow.differences(wider) == ["sliding_window 8 instead of 9"]


LLAMA3, LONG = {"rope_theta": 1e4, **ROPES[0]}, {**ROPES[1], "rope_type": "longrope"}


@pytest.mark.parametrize(("family", "rope"), [("llama", LLAMA3), ("llama", LONG), ("phi3", LONG)])
@pytest.mark.parametrize("own", [None, 16])
@pytest.mark.parametrize("of_rope", [None, 64])
def test_the_original_context_is_what_transformers_takes(family, rope, own, of_rope):
    """The original context is the model's own key, that of its rope parameters, or the model's context.

    Phi-3 has another default.
    """
    from transformers import AutoConfig

    name = "original_max_position_embeddings"
    rope = {key: value for key, value in rope.items() if key not in (name, "type")} | (
        {name: of_rope} if of_rope else {}
    )
    config = CONFIG | {
        "model_type": family,
        "rope_parameters": rope,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    config |= {name: own} if own else {}
    theirs = AutoConfig.for_model(**copy.deepcopy(config))
    theirs.standardize_rope_params()  # as its models do before they compute frequencies
    assert (
        ModelShape.from_hf_config(config).common("rope").original_max_position_embeddings
        == theirs.rope_parameters[name]
    )


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_longrope_has_a_factor_for_each_pair_of_channels(name, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "rope_parameters": {**LONG, name: [1.0, 2.0]}})
    )
    with pytest.raises(CheckpointError) as caught:
        ModelShape.from_hf_dir(tmp_path)
    assert caught.value.what == f"{tmp_path / 'config.json'}: the rope parameters have 2 numbers of {name}"
    assert "12 channels" in caught.value.why


def test_the_older_rope_key_comes_first():
    from transformers import AutoConfig

    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": dict(LLAMA3)}
    theirs = AutoConfig.for_model(**copy.deepcopy({**CONFIG, **both})).rope_parameters
    ours = ModelShape.from_hf_config({**CONFIG, **both}).common("rope")
    assert (ours.kind, ours.theta) == (theirs["rope_type"], theirs["rope_theta"]) == ("llama3", 1e4)
