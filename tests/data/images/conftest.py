"""Tiny vision-language folders and their image readers."""

from __future__ import annotations

import pytest

from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_files import ImageSource
from mkd.data.images.processors import load_image_processor
from mkd.tokenizers.hugging_face import load_hugging_face
from tests.data.conftest import make_store, write_jsonl  # noqa: F401
from tests.data.images.tiny_processors import make_qwen, make_smolvlm

MAX_PIXELS = 1 << 20


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return family -> folder of a tiny model."""
    parent = tmp_path_factory.mktemp("vlm")
    return {
        "smolvlm": make_smolvlm(parent / "smolvlm"),
        "idefics3": make_smolvlm(parent / "idefics3", kind="Idefics3"),
        "qwen2_5_vl": make_qwen(parent / "qwen2_5_vl"),
        "qwen3_vl": make_qwen(parent / "qwen3_vl", "Qwen3VL"),
    }


@pytest.fixture
def reader(folders, tmp_path):
    """Return reader(family) -> ConversationImages whose paths lie below tmp_path / "pictures"."""
    (tmp_path / "pictures").mkdir()

    def open_(family="qwen2_5_vl", **options):
        tokenizer = load_hugging_face(str(folders[family]))
        processor = load_image_processor(folders[family], tokenizer, **options)
        return ConversationImages(processor, ImageSource(str(tmp_path / "pictures"), MAX_PIXELS))

    return open_


@pytest.fixture
def no_network(monkeypatch):
    """Make every connection fail."""

    def refuse(*arguments):
        raise AssertionError(f"a connection was opened: {arguments}")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
