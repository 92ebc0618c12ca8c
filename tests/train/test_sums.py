"""Reports of micro-batches and the means that become of them: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mkd.train.sums import LossSums, TeacherSums, mean, report, report_size

ONE = TeacherSums(
    kd=6.0, weight=3.0, rows=4.0, ce=8.0, entropy=2.0, tokens=4.0, top1_agreement=3.0, compared=4.0
)
TWO = TeacherSums(
    kd=4.0, weight=1.0, rows=2.0, ce=9.0, entropy=6.0, tokens=3.0, top1_agreement=0.0, compared=0.0
)


def test_reports_add_up():
    like = torch.zeros(1)
    tensors = replace(ONE, kd=torch.tensor(6.0), rows=torch.tensor(4))
    total = report(torch.tensor(5.0), 4, [tensors, TWO], like) + report(None, 6, [TWO, ONE], like)
    assert total.dtype == torch.float64 and len(total) == report_size(2)
    sums = LossSums.of(total, ["one", "two"], 0.25)
    assert (sums.ce, sums.num_loss_tokens, list(sums.teachers)) == (5.0, 10, ["one", "two"])
    assert (
        sums.teachers["one"] == sums.teachers["two"] == TeacherSums(10.0, 4.0, 6.0, 17.0, 8.0, 7.0, 3.0, 4.0)
    )


def test_means_of_teachers_that_are_compared_on_different_rows():
    sums = LossSums(0.25, 20.0, 10, {"one": ONE, "two": TWO})
    kd = 6 / 4 + 4 / 2
    found = sums.token_sums()
    assert sums.kd_mean == kd
    assert found["kd"] == 10 * kd and found["ce"] == 20 and found["num_loss_tokens"] == 10
    assert found["loss"] == pytest.approx(0.75 * 20 + 0.25 * 10 * kd)
    shares = 3 / 4, 1 / 2
    assert found["teacher_ce"] == pytest.approx(10 * (shares[0] * 8 / 4 + shares[1] * 9 / 3) / sum(shares))
    assert found["teacher_entropy"] == pytest.approx(
        10 * (shares[0] * 2 / 4 + shares[1] * 6 / 3) / sum(shares)
    )
    assert found["top1_agreement"] == pytest.approx(10 * shares[0] * (3 / 4) / sum(shares))


def test_metrics_of_each_teacher_make_the_whole():
    sums = LossSums(0.25, 20.0, 10, {"one": ONE, "two": TWO})
    metrics = {key: mean(*value) for key, value in sums.per_teacher().items()}
    assert (
        metrics["kd_loss/one"] == 2
        and metrics["teacher_weight/one"] == 0.75
        and metrics["num_aligned/two"] == 2
    )
    assert (
        metrics["teacher_ce/two"] == 3
        and metrics["teacher_entropy/one"] == 0.5
        and metrics["top1_agreement/two"] == 0
    )
    assert (
        sum(metrics[f"kd_loss/{n}"] * metrics[f"teacher_weight/{n}"] for n in ("one", "two")) == sums.kd_mean
    )


def test_nothing_is_0():
    empty = LossSums.of(torch.zeros(report_size(1), dtype=torch.float64), ["one"], 0.5)
    assert set(empty.token_sums().values()) == {0.0} and empty.kd_mean == 0
