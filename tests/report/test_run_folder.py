from __future__ import annotations

import json

import pytest

from mkd.commands.report import main
from mkd.report.run_folder import open_runs
from tests.report.run_files import full_run, write_run
from tests.reported import reported_codes

ONE = [{"iteration": 1, "loss": 2.0}]


def test_everything_of_a_folder_is_read(tmp_path):
    (run,) = open_runs([full_run(tmp_path / "a")])
    assert (run.name, run.state, run.last_iteration) == ("a", "done", 100)
    assert {one.path: (one.value, one.origin) for one in run.settings} == {
        "student.hf": ("models/small", "--student-hf"),
        "teachers[0].name": ("big", "pair.yaml:4"),
        "teachers[0].hf": ("models/big", "pair.yaml:5"),
        "teachers[0].xtoken.loss": ("prefix_kl", "default"),
        "teachers[1].name": ("other", "pair.yaml:7"),
        "kd.kd_temperature": (1.0, "--kd-temperature"),
        "training.train_iters": (100, "--train-iters"),
        "training.micro_batch_size": (1, "default"),
        "dry_run": (False, "default"),
    }
    kinds = [(one.iteration, one.kind) for one in run.events]
    assert kinds == [(0, "start"), (40, "loss spike"), (50, "save"), (50, "resume"), (100, "done")]
    assert run.events[0].time == "2023-11-14 22:13:20"
    assert run.plan["step_time_ms"] == 100 and run.samples[0]["completion"] == "4" and not run.notes


def lines(*kinds: str) -> str:
    return "".join(json.dumps({"iteration": 1, "kind": kind}) + "\n" for kind in kinds)


@pytest.mark.parametrize(
    ("records", "asked", "events", "state"),
    [
        ([], 5, lines("start"), "no records yet"),
        (ONE, 5, lines("start"), "in progress or killed"),
        (ONE, 5, lines("start", "stopped", "resume"), "in progress or killed"),
        (ONE, 5, lines("start", "stopped"), "stopped early"),
        (ONE, 5, lines("start", "failed"), "failed"),
        (ONE, 1, lines("start", "done"), "done"),
        (ONE, 1, "", "done"),
        (ONE, 5, "", "not complete"),
    ],
)
def test_the_state_of_a_run(tmp_path, records, asked, events, state):
    config = f"training:\n  train_iters: {asked}  # default\n"
    (run,) = open_runs([write_run(tmp_path / "a", records, config_yaml=config, events_jsonl=events)])
    assert run.state == state


def test_a_run_that_still_writes_and_files_that_are_broken(tmp_path):
    folder = write_run(tmp_path / "a", [*ONE, *ONE], plan_json="{", config_yaml="\x00: [\nkd:\n    x: 1\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "lo')
    (folder / "errors").mkdir()
    (folder / "errors" / "rank_3.txt").write_text('{"rank": 3, "what": "out of memory"}\nTraceback\n')
    (run,) = open_runs([folder])
    assert run.last_iteration == 1 and run.errors == {"rank 3": "out of memory"}
    assert [note.split(" ")[0] for note in run.notes] == ["1", "plan.json"]


@pytest.mark.parametrize("edited", ['"5"', "[5]", "5.5", "true"])
def test_an_edited_number_of_iterations_is_left_out(tmp_path, edited):
    folder = write_run(tmp_path / "a", ONE, config_yaml=f"training:\n  train_iters: {edited}\n")
    (run,) = open_runs([folder])
    assert (run.state, len(run.notes), run.train_iters) == ("not complete", 1, None)
    assert main([str(folder)]) == 0 and run.notes[0].split(" ")[0] == "config.yaml:"


def test_events_of_a_run_without_an_event_log(tmp_path):
    records = [{"iteration": 1, "skipped_iterations": 0}, {"iteration": 2, "skipped_iterations": 3}]
    records.append({"iteration": 3, "skipped_iterations": 0, "loss_spikes": 1})
    (run,) = open_runs([write_run(tmp_path / "a", records)])
    assert [(one.iteration, one.kind) for one in run.events] == [(2, "skipped step"), (3, "loss spike")]


def test_names_tell_runs_apart(tmp_path):
    paths = [write_run(tmp_path / first / last, ONE) for first in "xy" for last in ("log", "other")]
    assert [run.name for run in open_runs(paths[:2])] == ["log", "other"]
    assert [run.name for run in open_runs([paths[0], paths[2] / "metrics.jsonl"])] == ["x/log", "y/log"]


def test_what_cannot_be_reported_is_refused(tmp_path, capsys, monkeypatch):
    """Every refusal has its code and leaves the folders as they were."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", ONE)
    write_run(tmp_path / "empty", [])
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_run(tmp_path / "bad", [{"loss": 1.0}])
    before = sorted(tmp_path.rglob("*"))
    for argv, exit_code, code in (
        (["folder"], 64, "path-not-found: is not a run"),
        (["nowhere"], 64, "path-not-found: is not a run"),
        (["a", "link"], 64, "names-equal: is named twice"),
        (["a", "a/metrics.jsonl"], 64, "names-equal: is named twice"),
        (["empty"], 65, "metrics-empty: no records in"),
        (["bad"], 65, "metrics-unreadable: not a metrics record"),
        (["a", "--out", "none/r.html"], 64, "not-writable: cannot be written"),
        (["a", "--out", "a/metrics.jsonl"], 64, "value-not-valid: is not the name of a page"),
    ):
        assert main(argv) == exit_code, argv
        assert reported_codes(capsys.readouterr().err) == [code], argv
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["a", "empty"]) == 0
    assert (tmp_path / "a" / "report.html").stat().st_size < 1e6
