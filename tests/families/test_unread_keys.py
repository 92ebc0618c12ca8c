"""Keys without effect are named, all problems of a config.json come at once."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from mkd.errors import ErrorList, MkdError
from mkd.families.registry import FAMILIES
from mkd.plan.models.model_shape import ModelShape
from tests.reported import refused
from tests.tiny_models import config_of

WITHOUT_DEFAULTS = {"kimi_k2"}  # transformers has no class of its own


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - WITHOUT_DEFAULTS))
def test_what_transformers_writes_has_an_effect(family):
    """The configuration of each family as transformers writes it has no key that mkd would warn of."""
    config = AutoConfig.for_model(family).to_dict()
    try:
        shape = ModelShape.from_hf_config(config)
    except MkdError:  # defaults that no released model has
        return
    assert shape.unread_keys() == []


def llama(**more):
    return ModelShape.from_hf_config(config_of("llama") | more)


def test_keys_of_other_families_and_misspelt_ones_are_named():
    assert llama().unread_keys() == []
    assert llama(attn_logit_softcapping=50.0, sliding_window=4096).unread_keys() == [
        "attn_logit_softcapping 50.0",
        "sliding_window 4096",
    ]
    assert llama(attn_logit_softcapping=None, logits_scaling=1.0, mlp_bias=False).unread_keys() == []
    assert llama(auto_map={"AutoConfig": "x"}, unsloth_fixed=True, _name_or_path="y").unread_keys() == []
    config = config_of("llama")
    config["num_key_value_head"] = config.pop("num_key_value_heads")
    (misspelt,) = ModelShape.from_hf_config(config).unread_keys()
    assert misspelt.endswith("(did you mean num_key_value_heads?)")


def test_everything_that_is_not_supported_is_named_at_once():
    with pytest.raises(ErrorList) as caught:
        llama(is_causal=False, hidden_act="relu")
    assert ["is_causal" in str(caught.value), "hidden_act" in str(caught.value)] == [True, True]
    assert caught.value.codes == ["model-feature-not-supported"] * 2
    with pytest.raises(ErrorList) as caught:
        llama(hidden_size="64", tie_word_embeddings="no", rms_norm_eps=-1)
    assert caught.value.codes == ["model-config-not-valid"] * 3
    with refused("model-feature-not-supported: hidden_act"):
        llama(hidden_act="relu")
