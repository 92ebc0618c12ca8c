"""The passes over logits and the merge of shards, seen from outside the losses that use them."""

from __future__ import annotations

import pytest
import torch

from mkd.config.divergence import DIVERGENCES
from mkd.losses.kd_objective import KDObjective, LossRows, VocabShard
from mkd.losses.torch_rows import local_statistics, merge_statistics, write_gradient
from mkd.losses.vocab_parallel import row_losses
from tests.losses.objectives import divergence_of

ROWS, WIDTH = 12, 16


def objective(ratio=0.5, temperature=2.5, divergence="forward_kl", sizes=(13, 14)) -> KDObjective:
    return KDObjective(*sizes, ratio, temperature, divergence=divergence_of(divergence))


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(2))
    labels = torch.randint(13, (ROWS,), generator=generator)
    return student, teacher, labels, (torch.rand(ROWS, generator=generator) < 0.7).double()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_are_left_as_they_were(dtype, divergence):
    student, teacher, labels, mask = problem(dtype)
    rule = objective(divergence=divergence)
    shard = VocabShard.of(WIDTH, 0, 1, rule)
    copies = student.clone(), teacher.clone(), labels.clone(), mask.clone()
    data = LossRows(student, teacher, labels, mask.float())
    merged = row_losses(data, shard, rule, None)
    write_gradient(torch.empty_like(student), data, mask.float(), merged, shard, rule)
    assert all(torch.equal(a, b) for a, b in zip(copies, (student, teacher, labels, mask), strict=True))


def test_gradient_may_be_written_over_the_logits():
    student, teacher, labels, mask = problem()
    rule = objective()
    shard = VocabShard.of(WIDTH, 0, 1, rule)
    data = LossRows(student, teacher, labels, mask)
    merged = row_losses(data, shard, rule, None)
    apart = torch.full_like(student, float("nan"))
    write_gradient(apart, data, mask, merged, shard, rule)
    write_gradient(student, data, mask, merged, shard, rule)
    assert torch.equal(student, apart)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_are_named_by_the_objective_alone(divergence):
    """Names do not depend on the shard, even if it is padding alone.

    Merged values are the same on every shard.
    """
    rule = objective(divergence=divergence, sizes=(6, 5))
    student, teacher, labels, mask = problem()
    shards = [VocabShard.of(WIDTH // 4, rank, 4, rule) for rank in range(4)]
    assert [(shard.student, shard.shared) for shard in shards] == [(4, 4), (2, 1), (0, 0), (0, 0)]
    parts = zip(student.chunk(4, 1), teacher.chunk(4, 1), shards, strict=True)
    gathered = torch.stack(
        [local_statistics(LossRows(s, t, labels % 5, mask), shard, rule) for s, t, shard in parts]
    )
    assert gathered.shape == (4, len(rule.statistic_names), ROWS)
    merged = [merge_statistics(gathered, shard, rule) for shard in shards]
    whole = VocabShard.of(WIDTH, 0, 1, rule)
    wanted = row_losses(LossRows(student, teacher, labels % 5, mask), whole, rule, None)
    for name in ("ce", "teacher_ce", "teacher_entropy", "top1_agreement") + ("kd",) * (
        not rule.divergence.needs_terms
    ):
        for values in merged:
            torch.testing.assert_close(getattr(values, name), getattr(wanted, name), rtol=1e-12, atol=1e-12)


def test_cross_entropy_alone_reads_no_teacher():
    rule = objective(ratio=0.0)
    assert rule.statistic_names == ("ce_max", "ce_sum", "ce_label")
    student, _, labels, mask = problem()
    data = LossRows(student, None, labels, mask)
    assert row_losses(data, VocabShard.of(WIDTH, 0, 1, rule), rule, None).kd is None
