from __future__ import annotations

import sys

import pytest

from mkd.commands.plot import main, names
from tests.commands.test_compare_runs import write_run


def colours(png) -> int:
    """Return the number of different colours of a picture."""
    from PIL import Image

    return len(Image.open(png).convert("RGB").getcolors(2**24))


def test_curves_of_one_and_of_two_runs(tmp_path, capsys):
    a, b = write_run(tmp_path / "a", [3.0, 2.0]), write_run(tmp_path / "b", [3.0, 1.0])
    assert main([a, "--keys", "loss"]) == 0
    assert capsys.readouterr().out.strip() == f"{a}/metrics.png"
    out = tmp_path / "both.png"
    assert (
        main([a, f"{b}/metrics.jsonl", "--out", str(out), "--keys", "loss", "step_time_ms", "top1_agreement"])
        == 0
    )
    assert colours(out) > colours(tmp_path / "a" / "metrics.png") > 2  # more lines, more colours


def test_runs_are_told_apart(tmp_path):
    assert names([tmp_path / "a", tmp_path / "b" / "metrics.jsonl"]) == ["a", "b"]
    same = [tmp_path / "x" / "log", tmp_path / "y" / "log"]
    assert names(same) == [str(path) for path in same]


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (
            ["--out", "not/there.png"],
            ["not/there.png cannot be written: No such file or directory", "in a folder that exists"],
        ),
        (["--out", "curves.xyz"], ["curves.xyz is not the name of a picture", "give one with .png"]),
        (["--out", "curves"], ["curves is not the name of a picture"]),
        (
            ["--keys", "loss", "los"],
            ["no record has a number for los\n", "name some of loss, top1_agreement"],
        ),
    ],
)
def test_pictures_that_cannot_be_are_refused(argv, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([write_run(tmp_path / "a", [3.0, 2.0]), *argv]) == 64
    printed = capsys.readouterr()
    assert printed.out == "" and all(text in printed.err for text in texts), printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_default_panels_are_those_that_were_recorded(tmp_path, capsys):
    """Only one of four default keys is recorded; without any the tool reports it."""
    run = write_run(tmp_path / "a", [3.0, 2.0])
    assert main([run, "--out", str(tmp_path / "a.png")]) == 0
    assert main([run, "--keys", "top1_agreement", "--out", str(tmp_path / "b.png")]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"iteration": 1, "loss": 3.0, "kd_loss": null}\n')
    assert main([run]) == 64 and "no record has a number for kd_loss, ce_loss" in capsys.readouterr().err


def test_refusals(tmp_path, monkeypatch, capsys):
    assert main([str(tmp_path)]) == 65 and "metrics.jsonl cannot be read" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 65 and "no records" in capsys.readouterr().err
    # Python's own mark of a module that cannot be imported
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(tmp_path)]) == 64 and "matplotlib is not installed" in capsys.readouterr().err
