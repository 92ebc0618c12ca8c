"""Test named pictures: the list, their variations, and conversations about them."""

from __future__ import annotations

import io
import json

import numpy as np
import torch
from PIL import Image

from tests.tools.vlm.small_pictures import write_pictures
from tools.vlm.emoji_pictures import (
    QUESTIONS,
    STYLES,
    on_white,
    read_list,
    read_pixels,
    varied,
    write_held_out,
    write_training,
)


def record(name, group="Food & Drink", **styles):
    has = {"has_img_twitter": True, "has_img_google": True} | styles
    return {"name": name, "category": group, "image": f"{name}.png", **has}


def test_the_list_has_each_name_once_and_no_skin_colours():
    records = [record("TACO"), record("TACO"), record("PIE", has_img_google=False), record("X", "Component")]
    (taco,) = read_list(records)
    assert (taco.name, taco.group, taco.file) == ("taco", "food & drink", "TACO.png")


def test_a_transparent_picture_gets_a_white_ground():
    file = io.BytesIO()
    Image.new("RGBA", (2, 1), (9, 9, 9, 0)).save(file, "PNG")
    with Image.open(io.BytesIO(on_white(file.getvalue()))) as image:
        assert image.mode == "RGB" and (np.asarray(image) == 255).all()


def test_variations_follow_the_seed_and_strength_0_keeps_the_picture():
    pixels = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def drawn(seed, strength=1.0):
        return varied(pixels, torch.Generator().manual_seed(seed), strength)

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    assert torch.allclose(drawn(1, 0.0), pixels, atol=1e-5)
    assert drawn(1).min() >= -1 and drawn(1).max() <= 1


def test_training_sees_one_style_and_the_held_out_set_the_other(tmp_path):
    named = write_pictures(tmp_path)
    write_training(tmp_path, tmp_path / "train.jsonl", named, 2, seed=1)
    write_held_out(tmp_path / "valid.jsonl", named)
    train, valid = (
        [json.loads(line)["messages"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "valid")
    )
    assert len(train) == 3 * len(named) and len(valid) == len(QUESTIONS) * len(named)
    paths = [{turns[0]["content"][0]["image"] for turns in each} for each in (train, valid)]
    assert all(path.startswith(f"varied-{STYLES[0]}-") and (tmp_path / path).exists() for path in paths[0])
    assert paths[1] == {f"{STYLES[1]}/{one.file}" for one in named}
    assert valid[0][1]["content"] == [{"type": "text", "text": named[0].name}]
    assert valid[-1][1]["content"] == [{"type": "text", "text": named[-1].group}]
    assert read_pixels(tmp_path, STYLES[1], named).shape == (len(named), 3, 64, 64)
