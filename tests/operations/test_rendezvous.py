"""A start problem of one machine ends all ranks.

The lowest rank that hit it prints it, and all use its exit code.
"""

from __future__ import annotations

import shutil

import pytest

from tests.train.command import flags, make_files
from tests.train.processes import run_processes

DATA, USAGE = 65, 64


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("rendezvous"))


@pytest.fixture
def start(files, tmp_path):
    """Start a run with relative paths, each rank in a separate folder that holds the files named for it."""

    def start_on(*machines: tuple[str, ...]):
        places = [tmp_path / f"machine {rank}" for rank in range(len(machines))]
        for place, names in zip(places, machines, strict=True):
            place.mkdir()
            for name in names:
                shutil.copy(files / "text.jsonl", place / name)
        more = ("--data-path", "text.jsonl", "--save", "checkpoints", "--global-batch-size", 6)
        argv = flags(files, "shared log", *more, data_path=None)
        return run_processes(tmp_path, argv, len(machines), machines=places)

    return start_on


def test_a_file_that_one_machine_does_not_have(start):
    first, second = start(("text.jsonl",), ())
    assert (first.code, second.code) == (DATA, DATA) and max(first.after_s, second.after_s) < 10
    assert second.output.endswith(
        "rank 1: error[data-path-not-found]: --data-path text.jsonl: nothing found\n"
        "  why: looked for a file of this name\n"
        "  do:  check the path, or make a tokenised pair with `mkd preprocess`\n"
    )
    said = "error[peer-cannot-start]: stopped because rank 1 cannot start: "
    said += "--data-path text.jsonl: nothing found\n"
    assert said in first.output and "Traceback" not in first.output + second.output


@pytest.mark.slow
def test_a_disk_that_one_machine_cannot_write_to(start):
    first, second = start(("text.jsonl",), ("text.jsonl", "checkpoints"))
    assert (first.code, second.code) == (USAGE, USAGE)
    assert (
        "rank 1: error[not-writable]: cannot make checkpoints: " in second.output
        and "do:  choose another --save" in second.output
    )
    assert (
        "error[peer-cannot-start]: stopped because rank 1 cannot start: cannot make checkpoints: "
        in first.output
    )


@pytest.mark.slow
def test_what_the_first_machine_alone_has_met(start):
    first, second = start((), ("text.jsonl",))
    assert (first.code, second.code) == (DATA, DATA)
    assert (
        "error[data-path-not-found]: --data-path text.jsonl: nothing found\n" in first.output
        and "error" not in second.output
    )


@pytest.mark.slow
def test_each_problem_is_said_once(start):
    """Ranks 0 and 1 hit the same problem, rank 2 hits that one and another."""
    outputs = [one.output for one in start((), (), ("checkpoints",))]
    assert (
        outputs[0].count("error[data-path-not-found]: --data-path text.jsonl: nothing found\n") == 1
        and "error" not in outputs[1]
    )
    assert (
        "rank 2: error: 2 problems:\n[1] error[data-path-not-found]: --data-path" in outputs[2]
        and "[2] error[not-writable]: cannot make checkpoints" in outputs[2]
    )


def test_a_rank_that_cannot_ask_the_others_says_its_problem(capsys, monkeypatch):
    from mkd.errors import ErrorList, UsageError
    from mkd.operations.failures import FailureReports, end_of_rank
    from mkd.operations.launch.rendezvous import Rendezvous

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    error = ErrorList([UsageError("what", "why", "do", code="example"), UsageError("more", code="example")])
    assert end_of_rank(error, FailureReports(1, 2), Rendezvous(1, 2)) == USAGE
    assert (
        capsys.readouterr().err == "rank 1: error: 2 problems:\n"
        "[1] error[example]: what\n  why: why\n  do:  do\n"
        "[2] error[example]: more\n"
    )
