from __future__ import annotations

import sys

from tests.tools.test_compare_runs import write_run
from tools.plot_run import main, names


def colours(png) -> int:
    """Different colours of a picture."""
    from PIL import Image

    return len(Image.open(png).convert("RGB").getcolors(2**24))


def test_curves_of_one_and_of_two_runs(tmp_path, capsys):
    a, b = write_run(tmp_path / "a", [3.0, 2.0]), write_run(tmp_path / "b", [3.0, 1.0])
    assert main([a, "--keys", "loss"]) == 0
    assert capsys.readouterr().out.strip() == f"{a}/metrics.png"
    out = tmp_path / "both.png"
    assert main([a, f"{b}/metrics.jsonl", "--out", str(out), "--keys", "loss", "step_time_ms", "eval/x/accuracy"]) == 0
    assert colours(out) > colours(tmp_path / "a" / "metrics.png") > 2  # more lines, more colours


def test_runs_are_told_apart(tmp_path):
    assert names([tmp_path / "a", tmp_path / "b" / "metrics.jsonl"]) == ["a", "b"]
    same = [tmp_path / "x" / "log", tmp_path / "y" / "log"]
    assert names(same) == [str(path) for path in same]


def test_refusals(tmp_path, monkeypatch, capsys):
    assert main([str(tmp_path)]) == 65 and "metrics.jsonl cannot be read" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 65 and "no records" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # how Python itself marks a module that cannot be imported
    assert main([str(tmp_path)]) == 64 and "matplotlib is not installed" in capsys.readouterr().err
