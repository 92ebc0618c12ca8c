"""Files that count as a model, and the replacement of one, which never loses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mkd.checkpoint.hf.hf_folder import NEW, OLD, model_files, model_in_the_way, publish, start_writing
from mkd.checkpoint.own_exports import OwnExports

MINE = {"README.md": "mine", "corpus.bin": "tokens"}
OLD_MODEL = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
OLD_MODEL |= {"model.safetensors.index.json": "index", "config.json": "old", "vocab.json": "old"}
OTHER_FORMS = {"adapter_config.json": "a", "adapter_model.safetensors": "a", "consolidated.safetensors": "c"}
OTHER_FORMS |= {"pytorch_model.bin": "p", "generation_config.json": "g"}
OLD_TOKENIZER = {"vocab.json": "old", "tokenization_old.py": "old"}
NEW_MODEL = {"model.safetensors": "new", "config.json": "new"}


def fill(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "x.safetensors", "pytorch_model-00001-of-00002.bin", "config.json", "q4.gguf"]
    + [
        "adapter_config.json",
        "tokenization_x.py",
        "tokenizer.json",
        "additional_chat_templates",
        "pytorch_model.bin.index.json",
    ],
)
def test_a_file_of_a_model_is_in_the_way(name, tmp_path):
    fill(tmp_path, MINE)
    assert model_files(tmp_path) == [] and model_in_the_way("--out", tmp_path / "missing") is None
    assert model_in_the_way("--out", tmp_path) is None
    (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).touch()
    error = model_in_the_way("--out", tmp_path)
    assert error.what == f"--out {tmp_path} holds a model: {name}" and "--overwrite" in error.do


def test_a_new_model_takes_the_place_of_the_old_one(tmp_path):
    fill(tmp_path, MINE | OLD_MODEL)
    fill(start_writing(tmp_path), NEW_MODEL)
    assert texts(tmp_path) == MINE | OLD_MODEL
    publish(tmp_path)
    assert texts(tmp_path) == MINE | NEW_MODEL | {"vocab.json": "old"} and not list(tmp_path.glob(".mkd*"))


def test_no_file_of_the_old_model_stays(tmp_path):
    """Readers prefer an adapter or other weights to the new model's. A tokenizer goes if another comes."""
    for new in (NEW_MODEL, NEW_MODEL | {"tokenizer.json": "new"}):
        fill(tmp_path, MINE | OLD_MODEL | OTHER_FORMS | OLD_TOKENIZER)
        fill(start_writing(tmp_path), new)
        publish(tmp_path)
        assert texts(tmp_path) == MINE | new | (OLD_TOKENIZER if new == NEW_MODEL else {})


@pytest.mark.parametrize("place", range(1, 7))
def test_a_failure_puts_the_old_model_back(place, tmp_path, monkeypatch):
    fill(tmp_path, MINE | OLD_MODEL)
    fill(start_writing(tmp_path), NEW_MODEL)
    replace, calls = Path.replace, iter(range(1, 100))

    def fail_once(self, target):
        if next(calls) == place:
            raise OSError("no room")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_once)
    with pytest.raises(OSError, match="no room"):
        publish(tmp_path)
    assert texts(tmp_path) == MINE | OLD_MODEL and texts(tmp_path / NEW) == NEW_MODEL
    assert not (tmp_path / OLD).exists()


def test_a_run_knows_its_own_exports(tmp_path):
    save, out = fill(tmp_path / "save", {}), fill(tmp_path / "out", MINE)
    own = OwnExports(save)
    assert own.has_written(out)  # nothing is there
    fill(out, NEW_MODEL)
    assert not own.has_written(out)
    for model in (OLD_MODEL, NEW_MODEL):  # the second replaces the first
        own.record(out, fill(start_writing(out), model))
        if model is NEW_MODEL:
            assert own.has_written(out)  # before, and wherever the export is killed
            (out / OLD).mkdir()
            (out / "config.json").rename(out / OLD / "config.json")
            assert own.has_written(out)
        publish(out)
        assert own.has_written(out) and not own.has_written(fill(tmp_path / "copy", model))
    (out / "model.gguf").symlink_to("gone")
    assert not own.has_written(out)
    (out / "model.gguf").unlink()
    os.utime(out / "config.json", ns=(1, 1))
    assert not own.has_written(out) and not OwnExports(tmp_path).has_written(out)
