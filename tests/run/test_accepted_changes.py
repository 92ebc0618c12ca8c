"""Errors of a resumed run offer what works: changes to accept, and ways to start anew."""

from __future__ import annotations

import json
import shlex

import pytest

from mkd.run_command import quoted
from tests.train.command import flags, make_files, run_main, write_records

LORA = ("--lora-rank", 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make the files below a folder whose name needs quotes in a shell."""
    folder = make_files(tmp_path_factory.mktemp("accepted") / "it's mine")
    write_records(folder / "other.jsonl", *({"text": f"{i} lazy dog " * (i % 5 + 1)} for i in range(40)))
    teacher = {"weights": "ema", "name": "teacher", "ema": {"rate": 0.1}}
    (folder / "ema.yaml").write_text(json.dumps({"teachers": [teacher]}))
    return folder


def run(ranks, files, name, *more, iters=1, resumes=False, **paths):
    """Return the result of a run that saves in the folder `name`."""
    paths |= {"load": name} if resumes else {}
    (result,) = run_main(ranks, flags(files, name, *more, "--train-iters", iters, save=name, **paths))
    return result


def words_after(error: str, flag: str) -> list[str]:
    """Return what an error offers after a flag, as a shell would read it."""
    return shlex.split(error.rpartition(f"{flag} ")[2])


CHANGES = {  # flags and paths of the run that saves, and of the one that resumes
    "another teacher": ((), {}, (), dict(teacher_hf="student")),
    "no teacher": ((), {}, ("--kd-ratio", 0), {}),
    "other data": ((), {}, (), dict(data_path="other.jsonl")),
    "an average less": (("--config", "ema.yaml"), dict(teacher_hf=None), (), {}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_accepted_changes_are_accepted_and_the_command_starts_again(case, files, ranks):
    first, paths, more, changed = CHANGES[case]
    first = [files / word if str(word).endswith(".yaml") else word for word in first]
    assert run(ranks, files, case, *first, **paths).exit_code == 0
    refused = run(ranks, files, case, *more, iters=2, resumes=True, **changed)
    assert refused.exit_code == 66 and "error[run-differs]" in refused.stderr
    accept = ("--accept-change", *words_after(refused.stderr, "--accept-change"))
    for iters in (2, 3):  # the second start finds a checkpoint of the first
        result = run(ranks, files, case, *more, *accept, iters=iters, resumes=True, **changed)
        assert result.exit_code == 0, result.stderr


def new_start(error: str) -> list[str]:
    """Return the flag of a new start from the weights in the checkpoint that an error offers."""
    assert "without --load, and another --save" in error
    return ["--student-load", words_after(error, "--student-load")[0]]


def test_an_average_cannot_be_accepted(files, ranks):
    """The one error says so at once; the weights start another run, whose average begins with them."""
    assert run(ranks, files, "frozen").exit_code == 0
    ema = ("--config", files / "ema.yaml")
    refused = run(ranks, files, "frozen", *ema, iters=2, resumes=True, teacher_hf=None)
    assert refused.exit_code == 66 and "error[optimizer-state-differs]" in refused.stderr
    assert "accept-change" not in refused.stderr
    result = run(ranks, files, "averaged", *ema, *new_start(refused.stderr), teacher_hf=None)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("more", [("--bf16",), ("--use-distributed-optimizer",), ("--seed", 7)])
def test_weights_start_another_run(more, files, ranks):
    name = more[0].removeprefix("--")
    assert run(ranks, files, name).exit_code == 0
    refused = run(ranks, files, name, *more, iters=2, resumes=True)
    assert refused.exit_code == 66, refused.stderr
    result = run(ranks, files, f"{name} new", *more, *new_start(refused.stderr))
    assert result.exit_code == 0, result.stderr


def test_adapters_start_another_run_as_a_whole_model(files, ranks):
    """Each error that offers a new start names the command that makes the model."""
    assert run(ranks, files, "lora", *LORA).exit_code == 0
    offered = set()
    for more in (("--seed", 7, *LORA), ("--lora-rank", 3), (), (*LORA, "--use-distributed-optimizer")):
        refused = run(ranks, files, "lora", *more, iters=2, resumes=True)
        assert refused.exit_code == 66 and "--student-load" not in refused.stderr
        command = refused.stderr.rpartition("mkd export ")[2].partition("; then --student-hf NEW")[0]
        offered.add(command.replace("NEW", quoted(files / "whole")))
    (command,) = offered
    (exported,) = run_main(ranks, shlex.split(command), command="mkd.commands.export")
    assert exported.exit_code == 0, exported.stderr
    result = run(ranks, files, "lora new", "--lora-rank", 3, student_hf="whole")
    assert result.exit_code == 0, result.stderr
