"""The image settings of a run, checked before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mkd.config.load import load_config
from mkd.config.schema import TeacherConfig
from mkd.data.images.processors import PREPROCESSOR_FILE
from mkd.resolve.image_reader import open_images
from mkd.tokenizers.hugging_face import load_hugging_face
from tests.data.images.tiny_processors import make_qwen, make_smolvlm
from tests.reported import refused
from tests.tiny_models import add_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_smolvlm(tmp_path_factory.mktemp("student"))


def open_(folder, *flags, teachers=()):
    config = load_config([str(word) for word in flags]).config
    config = replace(config, teachers=tuple(TeacherConfig(hf=str(one)) for one in teachers))
    tokenizer = load_hugging_face(str(folder))
    return open_images(config, folder, teachers, tokenizer)


def test_the_flags_reach_the_reader(folder, tmp_path):
    images = open_(folder, "--image-root", tmp_path, "--max-image-pixels", 99, "--max-image-side", 40)
    assert images.source.root == str(tmp_path) and images.source.max_pixels == 99
    assert images.processor.backend.size["longest_edge"] == 32
    assert open_(folder, teachers=[folder]).source.root is None


def test_a_root_that_cannot_be_used_is_refused(folder, tmp_path):
    with refused("path-not-found: --image-root"):
        open_(folder, "--image-root", tmp_path / "missing")
    with refused("remove-flag: --image-root is given, and the"):
        open_(add_tokenizer(tmp_path), "--image-root", tmp_path)


def test_a_teacher_that_sees_other_images_is_refused(folder, tmp_path):
    finer = make_smolvlm(tmp_path / "finer", tiles=4)
    with refused("image-processors-differ"):
        open_(folder, teachers=[finer])
    with refused("tokenizer-of-another-model: the tokenizer has no token"):
        open_(folder, teachers=[make_qwen(tmp_path / "qwen")])
    images = open_(folder, "--max-image-side", 40, teachers=[finer])
    assert images is not None, "with the same limit both make the same tiles"


def test_a_model_whose_image_token_is_not_the_tokenizers_is_refused(folder, tmp_path):
    """transformers would find no place for the features in such an export."""
    other = make_smolvlm(tmp_path / "other")
    path = other / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_token_id": 5}))
    with refused("tokenizer-of-another-model: but the tokenizer's image token"):
        open_(other)
    with refused("tokenizer-of-another-model: but the tokenizer's image token"):
        open_(folder, teachers=[other])


def test_beside_a_teacher_of_text_the_run_reads_text_alone(folder, tmp_path):
    text = add_tokenizer(tmp_path / "text")
    assert open_(folder, teachers=[text]) is None
    with refused("image-processors-differ"):
        open_(folder, "--image-root", tmp_path, teachers=[text])


def test_a_teacher_of_images_without_its_processor_is_refused(folder, tmp_path):
    """It is no teacher of text. The order of the teachers does not matter."""
    bare = make_smolvlm(tmp_path / "bare")
    (bare / PREPROCESSOR_FILE).unlink()
    text, finer = add_tokenizer(tmp_path / "text"), make_smolvlm(tmp_path / "finer", tiles=4)
    for teachers in ([bare], [text, bare], [bare, text], [text, finer], [finer, text]):
        with refused("image-processors-differ"):
            open_(folder, teachers=teachers)


def test_an_unknown_family_and_a_damaged_processor_are_refused(folder, tmp_path):
    copy = make_smolvlm(tmp_path)
    (copy / PREPROCESSOR_FILE).write_text("{")
    with refused("image-processor-not-valid: the image processor cannot be"):
        open_(copy)
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "llava"}))
    with refused("model-type-not-supported: models are not supported"):
        open_(copy)
