"""Token counts, prompts and pixels equal those of transformers' own processors."""

from __future__ import annotations

import io
import json
import shutil
import sys

import numpy as np
import pytest
from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor

from mkd.data.images.processors import PREPROCESSOR_FILE, PROCESSOR_FILE, load_image_processor
from mkd.tokenizers.hugging_face import load_hugging_face
from tests.data.images.tiny_processors import make_smolvlm, picture
from tests.reported import refused

SIZES = [(40, 40), (100, 33), (31, 57), (8, 200), (5, 3)]


def load(folder, **options):
    return load_image_processor(folder, load_hugging_face(str(folder)), **options)


@pytest.mark.parametrize("family", ["smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("max_side", [None, 40])
def test_shapes_and_pixels_are_those_of_the_image_processor(folders, family, max_side, tmp_path):
    """`save` writes settings with which transformers makes the same pixels, --max-image-side included."""
    processor = load(folders[family], max_side=max_side)
    processor.save(tmp_path)
    own = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for width, height in SIZES:
        image = picture(width, height)
        values = own(image, return_tensors="np", input_data_format="channels_last")["pixel_values"]
        values = values.reshape(-1, *processor.width)
        pixels, shape = processor.pixels(image), processor.shape(height, width)
        assert pixels.dtype == np.uint8 and pixels.shape == values.shape
        scaled = pixels * processor.scale.numpy() + processor.shift.numpy()
        np.testing.assert_allclose(scaled, values, atol=1e-6, rtol=0)
        num_tokens = int((shape.ids == processor.image_token_id).sum())
        assert num_tokens * processor.merge**2 == np.prod(shape.grid)
        if family.startswith("qwen"):
            assert np.prod(shape.grid) == len(values) == own.get_number_of_image_patches(height, width)
        else:
            assert shape.grid[0] == len(values)


def test_a_prompt_is_that_of_idefics3(folders):
    """The expanded ids equal the tokens of the expanded text, with text on both sides."""
    folder = folders["idefics3"]
    ours, hf = load(folder), AutoTokenizer.from_pretrained(folder)
    theirs = Idefics3Processor(ours.backend, hf, image_seq_len=4)
    for width, height in SIZES:
        wanted = theirs(images=[picture(width, height)], text=["fox\n<image>\n\ndog"])["input_ids"][0]
        before, after = (hf(text)["input_ids"] for text in ("fox\n", "\n\ndog"))
        assert [*before, *ours.shape(height, width).ids.tolist(), *after] == list(wanted)


def test_a_side_that_is_no_multiple_of_a_tile_is_refused(tmp_path):
    folder = make_smolvlm(tmp_path)
    settings = json.loads((folder / PREPROCESSOR_FILE).read_text())
    (folder / PREPROCESSOR_FILE).write_text(json.dumps({**settings, "size": {"longest_edge": 70}}))
    with refused("image-processor-not-valid: the image processor enlarges"):
        load(folder)


def test_the_processor_of_transformers_5_is_read_and_written(tmp_path):
    """It stands in processor_config.json, which counts before a file of the older kind."""
    folder, out = make_smolvlm(tmp_path / "a", tiles=3), tmp_path / "b"
    original = load(folder).fingerprint
    settings = json.loads((folder / PREPROCESSOR_FILE).read_text())
    (folder / PREPROCESSOR_FILE).unlink()
    written = {"image_processor": settings, "image_seq_len": 4, "processor_class": "SmolVLMProcessor"}
    (folder / PROCESSOR_FILE).write_text(json.dumps(written))
    assert load(folder).fingerprint == original
    reduced = load(folder, max_side=64)
    shutil.copytree(folder, out)
    reduced.save(out)
    assert load(out).fingerprint == reduced.fingerprint != original
    found = json.loads((out / PROCESSOR_FILE).read_text())
    assert found["image_processor"]["size"] == {"longest_edge": 64} and found["image_seq_len"] == 4


def test_the_patches_of_a_tile_count_in_the_fingerprint(tmp_path):
    """They stand in config.json, and decide the tokens of a tile."""
    folder = make_smolvlm(tmp_path)
    before = load(folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["patch_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    after = load(folder)
    assert len(after.shape(40, 40).ids) < len(before.shape(40, 40).ids)
    assert after.fingerprint != before.fingerprint


def test_code_of_a_folder_is_not_run(tmp_path, monkeypatch):
    """Nobody is asked whether it may run: a `y` on stdin changes nothing."""
    folder, mark = make_smolvlm(tmp_path / "model"), tmp_path / "was run"
    (folder / "remote.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Remote: ...\n")
    settings = json.loads((folder / PREPROCESSOR_FILE).read_text())
    settings |= {"image_processor_type": "Remote", "auto_map": {"AutoImageProcessor": "remote.Remote"}}
    (folder / PREPROCESSOR_FILE).write_text(json.dumps(settings))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with refused("image-processor-not-valid: the image processor cannot be"):
        load(folder)
    assert not mark.exists()


def test_a_text_model_has_no_image_processor(tmp_path, folders):
    assert load_image_processor(tmp_path, load_hugging_face(str(folders["smolvlm"]))) is None
