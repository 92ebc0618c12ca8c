"""Check reports of micro-batches, and the means made of them, by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from mkd.train.sums import (
    CROSS_ENTROPY,
    OWN_CHUNKS,
    TAG_CHUNKS,
    TAG_TOKENS,
    LossSums,
    ReportLayout,
    TermSums,
    mean,
)

ONE = TermSums(
    kd=6.0, weight=3.0, rows=4.0, ce=8.0, entropy=2.0, tokens=4.0, top1_agreement=3.0, compared=4.0
)
TWO = TermSums(
    kd=4.0, weight=1.0, rows=2.0, ce=9.0, entropy=6.0, tokens=3.0, top1_agreement=0.0, compared=0.0
)


def test_reports_add_up():
    layout = ReportLayout((CROSS_ENTROPY, "one", "two"))
    tensors = replace(ONE, kd=torch.tensor(6.0), rows=torch.tensor(4))
    first = {CROSS_ENTROPY: TermSums(student_ce=torch.tensor(5.0)), "one": tensors, "two": TWO}
    second = {"two": ONE, "one": TWO, CROSS_ENTROPY: TermSums(student_ce=None)}
    total = layout.to_vector(torch.tensor(4), first)
    total = total + layout.to_vector(torch.tensor(6), second)
    assert total.dtype == torch.float64 and len(total) == layout.size
    sums = layout.from_vector(total, 0.25)
    assert (sums.ce, sums.num_loss_tokens, list(sums.teachers)) == (5.0, 10, ["one", "two"])
    assert sums.teachers["one"] == sums.teachers["two"] == ONE + TWO
    assert (
        TermSums(
            kd=10.0, weight=4.0, rows=6.0, ce=17.0, entropy=8.0, tokens=7.0, top1_agreement=3.0, compared=4.0
        )
        == ONE + TWO
    )


def test_a_teacher_may_bring_the_cross_entropy():
    layout = ReportLayout(("one",))
    vector = layout.to_vector(torch.tensor(4), {"one": replace(ONE, student_ce=7.0)})
    assert layout.from_vector(vector, 0.5).ce == 7.0


def test_sums_of_steps_survive_a_checkpoint():
    sums = LossSums(0.25, 20.0, 10, {"one": ONE, "two": TWO}, {"balance": 1.5}) + LossSums(
        0.25, 2.0, 1, {"two": TWO, "one": ONE}, {"balance": 0.5}
    )
    assert (sums.ce, sums.num_loss_tokens, sums.num_steps) == (22.0, 11, 2)
    assert sums.teachers == {"one": ONE + ONE, "two": TWO + TWO} and sums.auxiliary == {"balance": 2.0}
    assert LossSums.from_state(json.loads(json.dumps(asdict(sums)))) == sums


def test_auxiliary_losses_are_part_of_the_loss():
    plain, more = (LossSums(0.25, 20.0, 10, {"one": ONE}, losses) for losses in ({}, {"balance": 1.5}))
    assert more.token_sums()["loss"] == plain.token_sums()["loss"] + 1.5
    assert more.token_sums()["auxiliary_loss/balance"] == 1.5


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
    layout = ReportLayout(("one",))
    empty = layout.from_vector(torch.zeros(layout.size, dtype=torch.float64), 0.5)
    assert set(empty.token_sums().values()) == {0.0} and empty.kd_mean == 0


def test_saved_sums_follow_the_names_of_the_run():
    """A resumed run may name a teacher differently; with another loss the saved sums are dropped."""
    saved = LossSums(0.5, 3.0, 4, {"old": TermSums(kd=1.0, rows=4.0)})
    now = LossSums(0.5, 1.0, 2, {"new": TermSums(kd=2.0, rows=2.0)})
    assert (saved.named_as(now) + now).teachers["new"].kd == 3.0
    assert saved.named_as(LossSums(0.7, 1.0, 2, now.teachers)) is None
    assert saved.named_as(LossSums(0.5, 1.0, 2, {})) is None


def test_saved_sums_of_teachers_in_another_order_stay_with_their_names():
    saved = LossSums(0.5, 3.0, 4, {"one": ONE, "two": TWO})
    named = saved.named_as(LossSums(0.5, 1.0, 2, {"two": TWO, "one": ONE}))
    assert dict(named.teachers) == {"one": ONE, "two": TWO}


def test_the_cross_entropy_of_a_tag_is_not_0_where_it_is_unknown():
    """A data term, such as that of --weight-key, measures the cross entropy of all tags together."""
    term = TermSums(kd=6.0, weight=4.0, rows=4.0, measures={TAG_TOKENS: 4.0})
    tags = {"math": (0.0, 4.0)}
    beside = LossSums(0.5, 8.0, 4, {"near/math": term}, feedback=ONE, has_cross_entropy=True, tags=tags)
    assert "kd_loss/math" in beside.per_tag(True) and "ce/math" not in beside.per_tag(True)
    assert "ce/math" in LossSums(0.5, 8.0, 4, {"near/math": term}, tags=tags).per_tag(True)


def test_teachers_of_one_tag_may_measure_different_things():
    """One with another tokenizer, whichever comes first, is compared on chunks."""
    chunks = TermSums(kd=6.0, weight=4.0, rows=4.0, measures={TAG_TOKENS: 10.0, TAG_CHUNKS: 4.0})
    same = TermSums(kd=5.0, weight=10.0, rows=10.0, measures={TAG_TOKENS: 10.0})
    found = []
    for terms in ({"far/math": chunks, "near/math": same}, {"near/math": same, "far/math": chunks}):
        sums = LossSums(0.5, 1.0, 20, terms, tags={"math": (1.0, 10.0)})
        found.append(sums.per_tag(True) | sums.per_teacher())
    assert found[0] == found[1]
    assert found[0]["num_aligned/far"][0] == 4 and found[0]["num_aligned/near"][0] == 10
    assert "kd_loss/math" in found[0]
    weighed = replace(chunks, measures={TAG_TOKENS: 10.0, OWN_CHUNKS: 4.0})
    sums = LossSums(0.5, 1.0, 20, {"far/math": weighed}, tags={"math": (1.0, 10.0)})
    assert sums.per_teacher()["num_aligned/far"][0] == 4


def test_runs_without_tags_have_no_metrics_of_tags():
    assert LossSums(0.5, 1.0, 20, {"near": TermSums(kd=1.0, weight=2.0, rows=2.0)}).per_tag(True) == {}
