"""Pictures of packs: images as the model sees them, and a file that a person can open."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from PIL import Image

from mkd.commands.inspect import main
from mkd.data.pack_view import GRID, LONGEST_SIDE, WITH_LOSS
from mkd.errors import UsageError
from tests.data.images.test_conversation import asked
from tests.data.images.tiny_processors import image_file, picture


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3"])
def test_pixels_become_the_picture_again(reader, family):
    """Images that need no change of size come back from patches and tiles to the last bit."""
    processor = reader(family).processor
    for width, height in [(64, 64)] if family in ("smolvlm", "idefics3") else [(40, 24), (16, 64)]:
        image = picture(width, height)
        seen = processor.seen(processor.pixels(image), (height, width))
        np.testing.assert_array_equal(seen[:height, :width], image)
        tokens = (seen[:height, :width].shape[0] * width) // processor.token_side**2
        assert tokens <= len(processor.shape(height, width).ids)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_the_command_draws_packs_with_their_images(folders, family, tmp_path, capsys):
    (tmp_path / "red.png").write_bytes(image_file(np.full((32, 64, 3), (200, 0, 7), np.uint8)))
    lines = [json.dumps(record) + "\n" for record in (asked("red.png"), {"text": "the quick brown fox"})]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    argv = ["--input", tmp_path / "a.jsonl", "--student", folders[family], "--image-root", tmp_path]
    argv += ["--seq-length", 128, "--picture", tmp_path / "pack.png"]
    assert main([str(word) for word in argv]) == 0
    drawn = np.asarray(Image.open(tmp_path / "pack.png"))

    def count(colour) -> int:
        return int((drawn == colour).all(axis=2).sum())

    rgb = [tuple(int(one[i : i + 2], 16) for i in (1, 3, 5)) for one in (WITH_LOSS[0], GRID)]
    assert count((200, 0, 7)) > LONGEST_SIDE**2 / 4, "the image is there"
    assert count(rgb[0]) > 1000, "tokens with loss have their colour"
    assert count(rgb[1]) > 4 * LONGEST_SIDE, "the squares of the tokens are drawn"
    assert (
        main([str(word) for word in [*argv[:-1], tmp_path / "missing" / "pack.png"]]) == UsageError.exit_code
    )
    assert "error[not-writable]" in capsys.readouterr().err


def test_missing_pillow_is_reported_before_anything_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    argv = ["--input", tmp_path / "none.jsonl", "--student", tmp_path, "--picture", tmp_path / "pack.png"]
    assert main([str(word) for word in argv]) == UsageError.exit_code
    assert "error[package-missing]" in capsys.readouterr().err
