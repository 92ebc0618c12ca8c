from __future__ import annotations

import json

import pytest

from mkd.commands.compare import main


def write_run(folder, losses, agreement=0.5, time_ms=100.0, share=0.25):
    folder.mkdir()
    lines = [
        {
            "iteration": step,
            "loss": loss,
            "top1_agreement": agreement,
            "step_time_ms": time_ms,
            "teacher_share": share,
        }
        for step, loss in enumerate(losses, 1)
    ]
    lines.append({"iteration": len(losses), "split": "valid", "loss": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture
def run(tmp_path):
    return lambda name, *args, **more: write_run(tmp_path / name, *args, **more)


def row(shown: str, split: str, key: str) -> list[str]:
    (line,) = [line for line in shown.splitlines() if line.split()[:2] == [split, key]]
    return line.split()[2:]


def test_equal_runs_are_equal_to_the_bit_and_times_do_not_count(run, capsys):
    a, b = run("a", [3.0, 2.0, 2.5]), run("b", [3.0, 2.0, 2.5], time_ms=200.0, share=0.5)
    assert main([a, b, "--eps", "0"]) == 0
    shown = capsys.readouterr().out
    assert row(shown, "train", "loss") == ["2.5", "2.5", "+0", "2", "2", "0", "never"]
    assert row(shown, "train", "step_time_ms") == ["100", "200", "+100", "100", "200", "0.5", "-"]
    assert "no value that counts differs by more than 0, relative to its size" in shown


def test_the_first_difference_is_found_where_it_is(run, capsys):
    a, b = run("a", [3.0, 2.0, 1.0, 1.5]), run("b", [3.0, 2.0 * (1 + 1e-7), 1.01, 1.4])
    assert main([a, b]) == 1
    shown = capsys.readouterr().out
    assert row(shown, "train", "loss")[-1] == "3" and "train loss at iteration 3" in shown
    assert main([a, b, "--eps", "1e-8"]) == 1 and "train loss at iteration 2" in capsys.readouterr().out
    assert main([a, b, "--eps", "0.1"]) == 0


def test_best_has_a_direction(run, capsys):
    a, b = run("a", [2.0, 3.0], agreement=0.5), run("b", [2.5, 2.6], agreement=0.7)
    main([a, b])
    shown = capsys.readouterr().out
    assert row(shown, "train", "loss")[3:5] == ["2", "2.5"] and row(shown, "train", "top1_agreement")[
        3:5
    ] == ["0.5", "0.7"]


def test_only_common_steps_and_chosen_keys_are_compared(run, capsys):
    a, b = run("a", [2.0, 3.0, 4.0]), run("b", [2.0, 3.0], agreement=0.6)
    assert main([a, b, "--keys", "loss"]) == 0
    shown = capsys.readouterr().out
    assert (
        "3 steps" in shown and row(shown, "train", "loss")[:2] == ["3", "3"] and "top1_agreement" not in shown
    )


def test_runs_without_a_common_step_are_refused(run, tmp_path, capsys):
    a = run("a", [2.0])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text("")
    assert main([a, str(tmp_path / "b")]) == 65 and "no figure of the same step" in capsys.readouterr().err
    assert main([a, str(tmp_path / "c")]) == 65


@pytest.mark.parametrize("eps", ["nan", "-1", "inf", "x"])
def test_differences_that_nothing_can_have_are_refused(eps, run, capsys):
    a = run("a", [2.0])
    assert main([a, a, f"--eps={eps}"]) == 64
    assert f"--eps: '{eps}' is not a finite number of 0 or more" in capsys.readouterr().err


def test_keys_that_no_record_has_are_named(run, capsys):
    a, b = run("a", [2.0]), run("b", [2.0])
    assert main([a, b, "--keys", "loss", "los", "kd"]) == 64
    printed = capsys.readouterr()
    assert (
        printed.err.startswith("error[value-unknown]: no record has los, kd\n")
        and "loss, top1_agreement" in printed.err
    )


def test_a_run_that_is_no_number_any_more_differs(run, capsys):
    a, b = run("a", [3.0, 2.0, 1.0]), run("b", [3.0, None, None])
    assert main([a, b]) == 1
    shown = capsys.readouterr().out
    assert "train loss at iteration 2" in shown and row(shown, "train", "loss")[:2] == ["1", "nan"]
    assert main([b, b]) == 0


def test_where_one_run_ends_is_said(run, capsys):
    assert main([run("a", [3.0, 2.0]), run("b", [3.0])]) == 0
    assert "compared up to iteration 1, where the shorter run ends" in capsys.readouterr().out
