"""Check that every other `model_type` of transformers is refused by name, with a reason that is true."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from mkd.errors import UsageError
from mkd.families.registry import FAMILIES
from mkd.families.vision import REFUSED, VISION_FAMILIES
from mkd.plan.models.model_shape import ModelShape


def test_every_other_type_is_refused_by_name():
    known = FAMILIES.keys() | VISION_FAMILIES.keys()
    others = sorted(CONFIG_MAPPING_NAMES.keys() - known)
    assert len(others) > 300 and not REFUSED.keys() & known
    for name in others:
        with pytest.raises(UsageError) as caught:
            ModelShape.from_hf_config({"model_type": name, "text_config": {"model_type": f"{name}_text"}})
        error = caught.value
        assert error.code == "model-type-not-supported" and repr(name) in error.what
        assert error.why == REFUSED[name] if name in REFUSED else "qwen3_5_text" in error.why, error.why
        saved_alone = f"{name}_text" in FAMILIES
        assert saved_alone == ("saved on its own" in error.do), error.do
