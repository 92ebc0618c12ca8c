"""An export with --reference-hf has the image processor from which the student has learned."""

from __future__ import annotations

import json

import pytest

from mkd.checkpoint.folders import HF_FOLDER
from mkd.convert.mcore_to_hf import assets_of
from mkd.data.images.processors import PREPROCESSOR_FILE
from tests.data.images.tiny_processors import make_smolvlm


@pytest.mark.parametrize("has_own", [True, False])
def test_the_processor_of_the_checkpoint_counts(has_own, tmp_path):
    reference, folder = make_smolvlm(tmp_path / "reference", tiles=4), tmp_path / "iter_0000001"
    if has_own:
        make_smolvlm(folder / HF_FOLDER, tiles=2)
    assets_of(folder, reference).copy_to(tmp_path / "out")
    found = json.loads((tmp_path / "out" / PREPROCESSOR_FILE).read_text())
    assert found["size"] == {"longest_edge": 64 if has_own else 128}
