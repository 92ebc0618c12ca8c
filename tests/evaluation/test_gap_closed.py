"""Check the share of the initial divergence that an evaluation reports as gone."""

from __future__ import annotations

import shutil

import pytest

from mkd.human import fixed
from tests.train.command import flags, make_files, read_metrics, run_main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("report"))


def evaluations(folder) -> list[dict]:
    return [record for record in read_metrics(folder) if record.get("split") == "valid"]


def test_the_share_of_the_initial_divergence_that_is_gone(files, ranks):
    """The share is reported after the evaluation before the first step; a resumed run remembers it."""
    more = ("--split", "9,1", "--eval-interval", 2, "--kd-ratio", 1, "--save", files / "gap")
    for steps, load in ((4, ()), (6, ("--load", files / "gap"))):
        results = run_main(ranks, flags(files, "gap", *more, *load, "--train-iters", steps), world_size=2)
        assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    first, *later = evaluations(files / "gap")
    assert first["gap_closed"] == 0 and [record["iteration"] for record in later] == [2, 4, 6]
    for record in later:
        assert record["gap_closed"] == pytest.approx(1 - record["kd_loss"] / first["kd_loss"], rel=1e-12)
    assert 0 < later[0]["gap_closed"] < later[-1]["gap_closed"] < 1
    assert f"gap closed {fixed(later[-1]['gap_closed'], 6)}" in results[0].stdout
    assert all("gap_closed" not in record for record in read_metrics(files / "gap") if "split" not in record)


def test_there_is_none_of_another_loss_or_another_held_out_set(files, ranks):
    """The share is missing if its first value is unknown, and returns with the settings of that value."""
    folder = files / "changed"
    argv = flags(
        files, "changed", "--split", "9,1", "--eval-interval", 1, "--kd-ratio", 0.5, "--save", folder
    )
    loss = ("--kd-divergence", "jsd", "--accept-change", "loss")
    back, fewer, weight = (
        loss[2:],
        ("--eval-iters", 1, "--global-batch-size", 1),
        ("--kd-ratio", 0.9, *loss[2:]),
    )
    renamed = (*weight, "--teacher-hf", shutil.copytree(files / "teacher", files / "the same teacher"))
    for steps, more in ((1, ()), (2, loss), (3, back), (4, fewer), (5, weight), (6, renamed)):
        load = ("--load", folder) if steps > 1 else ()
        (result,) = run_main(ranks, [*argv, *map(str, (*load, *more, "--train-iters", steps))])
        assert result.exit_code == 0, result.stderr
        assert ("gap_closed is left out" in result.stdout) == (steps in (2, 4))
    has_gap = {record["iteration"]: "gap_closed" in record for record in evaluations(folder)}
    assert has_gap == {0: True, 1: True, 2: False, 3: True, 4: False, 5: True, 6: True}


def test_there_is_none_without_a_teacher_or_a_first_evaluation(files, ranks):
    more = ("--split", "9,1", "--eval-interval", 1)
    (plain,) = run_main(ranks, flags(files, "plain", *more, "--kd-ratio", 0, teacher_hf=None))
    assert plain.exit_code == 0, plain.stderr
    assert len(evaluations(files / "plain")) == 3 and all(
        "gap_closed" not in record for record in evaluations(files / "plain")
    )
    (unseen,) = run_main(ranks, flags(files, "unseen", "--save", files / "unseen"))
    (continued,) = run_main(
        ranks,
        flags(
            files, "other", *more, "--load", files / "unseen", "--train-iters", 3, "--accept-change", "data"
        ),
    )
    assert (unseen.exit_code, continued.exit_code) == (0, 0), continued.stderr
    records = evaluations(files / "other")  # the evaluation at the start is due too: it was not made before
    assert [record["iteration"] for record in records] == [2, 3]
    assert all(record["kd_loss"] > 0 and "gap_closed" not in record for record in records)
