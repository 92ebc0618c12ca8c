"""A teacher with a pipeline of its own processes, beside one that is ahead on the student's processes."""

from __future__ import annotations

import json

import pytest
import torch

from mkd.errors import EXIT_DONE
from tests.train.apart_invariance import Row, compare, make_second
from tests.train.command import flags, make_files, read_weights
from tests.train.invariance import Layout, make_pair, require_equal, run_layout
from tests.train.test_teacher_processes_run import EVALUATED, losses, run

APART = {"processes": 2, "pipeline_model_parallel_size": 2}
STUDENT = Layout("s", 2, pp=2)


def written(folder, first, second, order: str, **place) -> tuple[str, str]:
    """Write the settings of two teachers, the first with this place, in this order; return their flag."""
    teachers = [
        {"hf": str(first), "name": "apart", "weight": 2, "temperature": 1.5, **place},
        {"hf": str(second), "name": "shared", "weight": 0.5},
    ]
    file = folder / f"{order} {len(place)}.yaml"
    file.write_text(json.dumps({"teachers": teachers if order == "apart first" else teachers[::-1]}))
    return "--config", str(file)


def ahead(number: int) -> tuple[str, str]:
    return "--teacher-prefetch", str(number)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), dict(num_hidden_layers=4))


@pytest.mark.parametrize("order", ["apart first", pytest.param("shared first", marks=pytest.mark.slow)])
def test_it_is_a_run_on_one_process(order, pair, tmp_path, ranks):
    """Losses, gradients and updates; and bit for bit those of a run in which nothing is ahead."""
    second = make_second(tmp_path)
    alone = Layout("one", flags=written(tmp_path, pair[1], second, order))
    (reference,) = ranks.run(run_layout, 1, alone, *pair, tmp_path / "single")
    results, weights = [], []
    for number in (4, 0):
        sides = (*written(tmp_path, pair[1], second, order, **APART), *ahead(number))
        row = Row(STUDENT, sides, 2, None)
        errors, found = compare(ranks, pair, row, tmp_path / f"launch {number}", tmp_path, reference)
        require_equal(errors)
        students = found[: STUDENT.ranks]
        assert all(bool(one["ahead"]) == bool(number) and one["lead"] for one in students), found
        results.append([one["measures"] for one in students])
        weights.append(read_weights(tmp_path / "layout" / "updated"))
    assert results[0] == results[1]
    assert all(torch.equal(weights[0][name], one) for name, one in weights[1].items())


@pytest.mark.slow
def test_runs_that_stop_and_resume_with_both(tmp_path):
    """Steps with evaluations; the second half has another split of the processes."""
    files = make_files(tmp_path)
    more = (*EVALUATED, "--train-iters", 12, "--micro-batch-size", 1, "--pipeline-model-parallel-size", 2)
    more = (*more, "--pipeline-layout", "auto")

    def argv(name: str, *own, **place):
        file = written(files, files / "teacher", files / "student", f"{name}", **place)
        return flags(files, name, *more, *file, *own, teacher_hf=None, save=files / name, load=files / name)

    whole = run(tmp_path, argv("whole", *ahead(0)), 2)
    assert [one.code for one in whole] == [EXIT_DONE] * 2, [one.output for one in whole]
    first = run(tmp_path, argv("parts", *ahead(4), "--exit-interval", 6, "--num-workers", 1, **APART), 4)
    assert [one.code for one in first] == [EXIT_DONE] * 4, [one.output for one in first]
    rest = run(tmp_path, argv("parts", *ahead(3), processes=1), 3)
    assert [one.code for one in rest] == [EXIT_DONE] * 3, [one.output for one in rest]
    assert losses(files / "parts") == losses(files / "whole")
