"""Run the quickstart with images on few pictures and steps, from the downloads to the picture."""

from __future__ import annotations

import shutil
import sys

import pytest
from PIL import Image

from tools import quickstart_vlm
from tools.quickstart_vlm import NAMES, RIGHT, SWAPPED, table_lines
from tools.vlm.picture_answers import ExamResult


def test_the_table_has_right_and_swapped_pictures_of_every_model():
    values = dict(exact_name=0.5, name_of_4=0.75, group=1.0, ce=2.0, kl=0.25, top1=0.625)
    one = ExamResult(**values)
    lines = table_lines({name: {RIGHT: one, SWAPPED: ExamResult(**values | {"kl": 1.5})} for name in NAMES})
    assert lines[2].split() == ["KL", "to", "the", "teacher", *["0.250", "1.500"] * 3]
    assert all(name in lines[0] for name in NAMES) and len(lines) == 2 + len(values)


@pytest.mark.slow
@pytest.mark.download
@pytest.mark.ranks
def test_quickstart_runs_from_the_downloads_to_the_picture(smollm2, tmp_path, monkeypatch, capsys):
    if shutil.which("npm") is None:
        pytest.skip("npm is missing")
    (tmp_path / "smollm2").symlink_to(smollm2)
    options = {"copies": 1, "matched": 640, "captions": 128, "teacher-steps": 4, "steps": 4}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--folder", str(tmp_path), "--groups", "activities", "food & drink"]
    monkeypatch.setattr(sys, "argv", ["x", *words])
    assert quickstart_vlm.main() in (0, None)
    printed = capsys.readouterr().out
    assert "KL to the teacher" in printed and "What is it?" in printed
    with Image.open(tmp_path / "quickstart_vlm.png") as picture:
        assert picture.size[0] > 1000
    assert (tmp_path / "distilled" / "preprocessor_config.json").exists()
