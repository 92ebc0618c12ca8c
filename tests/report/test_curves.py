from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mkd.__main__ import main as mkd
from mkd.commands.report import main
from tests.commands.test_compare_runs import write_run
from tests.reported import reported_codes

ROOT = Path(__file__).resolve().parents[2]


def colours(png) -> int:
    """Return the number of different colours of a picture."""
    from PIL import Image

    return len(Image.open(png).convert("RGB").getcolors(2**24))


def test_curves_of_one_and_of_two_runs(tmp_path, capsys):
    a, b = write_run(tmp_path / "a", [3.0, 2.0]), write_run(tmp_path / "b", [3.0, 1.0])
    one, both = tmp_path / "one.png", tmp_path / "both.png"
    assert main([a, "--png", str(one), "--keys", "loss"]) == 0
    assert capsys.readouterr().out.strip() == str(one)
    keys = ("--keys", "loss", "step_time_ms", "top1_agreement")
    assert main([a, f"{b}/metrics.jsonl", "--png", str(both), *keys]) == 0
    assert colours(both) > colours(one) > 2  # more lines, more colours
    assert not list(tmp_path.rglob("*.html"))
    assert main([a, "--png", str(one)]) == 64
    assert reported_codes(capsys.readouterr().err) == ["already-exists: exists"]
    assert main([a, "--png", str(one), "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (
            ["--png", "not/there.png"],
            ["not/there.png cannot be written: No such file or directory", "in a folder that exists"],
        ),
        (["--png", "curves.xyz"], ["curves.xyz is not the name of a picture", "give one with .png"]),
        (["--png", "curves"], ["curves is not the name of a picture"]),
        (
            ["--png", "curves.png", "--keys", "loss", "los"],
            ["no record has a number for los\n", "name some of loss, top1_agreement"],
        ),
        (["--keys", "loss"], ["--keys has no effect", "add --png FILE"]),
        (["--png", "curves.png", "--title", "A"], ["--title has no effect", "leave out --title"]),
        (["--png", "curves.png", "--out", "a.html"], ["--out has no effect", "leave out --out"]),
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
    assert main([run, "--png", str(tmp_path / "a.png")]) == 0
    assert main([run, "--keys", "top1_agreement", "--png", str(tmp_path / "b.png")]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"iteration": 1, "loss": 3.0, "kd_loss": null}\n')
    assert main([run, "--png", str(tmp_path / "c.png")]) == 64
    assert "no record has a number for kd_loss, ce_loss" in capsys.readouterr().err


def test_refusals(tmp_path, monkeypatch, capsys):
    argv = [str(tmp_path), "--png", str(tmp_path / "a.png")]
    assert main(argv) == 64 and "it has no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(argv) == 65 and "no records" in capsys.readouterr().err
    # Python's own mark of a module that cannot be imported
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(argv) == 64 and "matplotlib is not installed" in capsys.readouterr().err


def test_the_command_of_earlier_versions_names_the_new_one(capsys):
    assert mkd(["plot", "runs/a"]) == 64
    assert "do:  use `mkd report RUN --png FILE`" in capsys.readouterr().err


def test_the_tool_draws_into_the_folder_of_the_first_run(tmp_path):
    a, b = write_run(tmp_path / "a", [3.0, 2.0]), write_run(tmp_path / "b", [3.0, 1.0])
    command = [sys.executable, ROOT / "tools" / "plot_run.py", a, b, "--keys", "loss"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{a}/metrics.png\n", done.stderr
    assert colours(tmp_path / "a" / "metrics.png") > 2
