"""Check what mkd says of every model_type that transformers knows."""

from __future__ import annotations

import logging

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from mkd.errors import MkdError
from mkd.families.registry import FAMILIES
from mkd.families.vision import REFUSED, VISION_FAMILIES
from mkd.plan.models.model_shape import ModelShape

NOT_SUPPORTED = "model-type-not-supported"
KNOWN = {*FAMILIES, *VISION_FAMILIES}
# Values as other models have them, and a text model that mkd runs.
FOREIGN = dict(num_hidden_layers=[2, 2], image_size=[8, 8], intermediate_size=[3], sliding_window=0)
FOREIGN |= dict(vision_config=3, text_config={"model_type": "llama"})


def problem(config) -> MkdError | None:
    try:
        ModelShape.from_hf_config(config)
    except MkdError as error:
        return error
    return None


def assert_true(model_type: str, found: MkdError | None, text: str | None) -> None:
    """Raise AssertionError unless the type itself is the reason if mkd does not run it, and else is none."""
    if model_type in KNOWN:
        assert found is None or found.code != NOT_SUPPORTED, found
        return
    assert found is not None and found.code == NOT_SUPPORTED, f"{model_type}: {found}"
    assert repr(model_type) in found.what
    if model_type in REFUSED:
        assert found.why == REFUSED[model_type]
    else:
        listed = found.why.removeprefix("mkd knows ").partition(" (")[0].split(", ")
        assert listed == sorted(FAMILIES)
        hint = f"or its text model ({text}), which this saves"
        assert (hint in found.do) == (text in FAMILIES)


def test_the_type_is_the_reason_whatever_its_keys_hold():
    assert len(CONFIG_MAPPING_NAMES) > 300
    for model_type in CONFIG_MAPPING_NAMES:
        assert_true(model_type, problem({"model_type": model_type} | FOREIGN), "llama")
    assert not REFUSED.keys() & KNOWN and REFUSED.keys() <= CONFIG_MAPPING_NAMES.keys()


@pytest.mark.slow
def test_default_configurations_are_read_or_refused_by_their_type():
    """A known model may have a part that mkd names as not supported, or a default that contradicts itself."""
    logging.disable(logging.WARNING)
    read = 0
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        try:
            config = CONFIG_MAPPING[model_type]().to_dict()
        except Exception:  # noqa: S112 some types have no default configuration
            continue
        text = (config.get("text_config") or {}).get("model_type")
        found = problem(config)
        assert_true(config["model_type"], found, text)  # not always the type that it is found by
        read += found is None
    logging.disable(logging.NOTSET)
    assert read > 25
