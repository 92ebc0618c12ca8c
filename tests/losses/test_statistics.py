"""The chunk functions behind the loss, used the way a fused LM head uses them: logits made and dropped chunk by chunk."""

from __future__ import annotations

import pytest
import torch

from mkd.losses import vocab_parallel_kd
from mkd.losses.objective import KDObjective, VocabShard
from mkd.losses.statistics import gradient, local_statistics, merge_statistics

ROWS, HIDDEN, WIDTH, TP = 12, 5, 16, 2
OBJECTIVE = dict(temperature_scaling="squared", divergence="forward_kl", with_ce_metric=False)


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = (torch.randn(ROWS, HIDDEN, generator=generator).double() for _ in range(2))
    head, teacher_head = (torch.randn(WIDTH, HIDDEN, generator=generator).double() for _ in range(2))
    labels = torch.randint(13, (ROWS,), generator=generator)
    mask = (torch.rand(ROWS, generator=generator) < 0.7).double()
    return hidden, teacher_hidden, head, teacher_head, labels, mask


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_chunked_head_has_the_gradient_of_the_loss_on_full_logits(temperature, ratio):
    hidden, teacher_hidden, head, teacher_head, labels, mask = problem()
    objective = KDObjective(ratio, temperature, student_vocab_size=13, teacher_vocab_size=14, **OBJECTIVE)
    shards = [VocabShard.of(WIDTH // TP, rank, TP, objective) for rank in range(TP)]
    loss, hidden_gradient = 0.0, torch.zeros_like(hidden)
    for rows in (slice(0, 5), slice(5, ROWS)):
        logits = [
            (hidden[rows] @ part.T, teacher_hidden[rows] @ teacher_part.T)
            for part, teacher_part in zip(head.chunk(TP), teacher_head.chunk(TP), strict=True)
        ]
        local = [
            local_statistics(*pair, labels[rows], shard, objective) for pair, shard in zip(logits, shards, strict=True)
        ]
        gathered = {name: torch.stack([statistics[name] for statistics in local]) for name in local[0]}
        for pair, shard, part in zip(logits, shards, head.chunk(TP), strict=True):
            merged = merge_statistics(gathered, shard, objective)
            logit_gradient = gradient(*pair, labels[rows], merged, mask[rows], shard, objective)
            hidden_gradient[rows] += logit_gradient @ part[: logit_gradient.shape[1]]
        if ratio < 1:
            loss += (1 - ratio) * (mask[rows] * merged.ce).sum()
        if ratio > 0:
            loss += ratio * temperature**2 * (mask[rows] * merged.kd).sum()

    wanted_hidden = hidden.clone().requires_grad_()
    wanted = vocab_parallel_kd(
        wanted_hidden @ head.T,
        teacher_hidden @ teacher_head.T,
        labels,
        mask,
        tp_group=None,
        student_vocab_size=13,
        teacher_vocab_size=14,
        kd_ratio=ratio,
        temperature=temperature,
    ).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(hidden_gradient, wanted_hidden.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_are_left_as_they_were(dtype):
    hidden, teacher_hidden, head, teacher_head, labels, mask = problem()
    objective = KDObjective(0.5, 1.0, student_vocab_size=13, teacher_vocab_size=14, **OBJECTIVE)
    shard = VocabShard.of(WIDTH, 0, 1, objective)
    student, teacher = (hidden @ head.T).to(dtype), (teacher_hidden @ teacher_head.T).to(dtype)
    copies = student.clone(), teacher.clone(), labels.clone(), mask.clone()
    local = local_statistics(student, teacher, labels, shard, objective)
    merged = merge_statistics({name: value[None] for name, value in local.items()}, shard, objective)
    gradient(student, teacher, labels, merged, mask.float(), shard, objective)
    assert all(torch.equal(a, b) for a, b in zip(copies, (student, teacher, labels, mask), strict=True))


def test_names_and_order_depend_on_the_objective_alone():
    hidden, teacher_hidden, head, teacher_head, labels, _ = problem()
    objective = KDObjective(0.5, 2.5, student_vocab_size=6, teacher_vocab_size=5, **OBJECTIVE)
    student, teacher = hidden @ head.T, teacher_hidden @ teacher_head.T
    shards = [VocabShard.of(WIDTH // 4, rank, 4, objective) for rank in range(4)]
    assert [(shard.student, shard.shared) for shard in shards] == [(4, 4), (2, 1), (0, 0), (0, 0)]
    names = [
        list(local_statistics(student.chunk(4, 1)[s.rank], teacher.chunk(4, 1)[s.rank], labels, s, objective))
        for s in shards
    ]
    assert all(n == names[0] for n in names)
    ce_only = KDObjective(0.0, 2.5, student_vocab_size=6, teacher_vocab_size=5, **OBJECTIVE)
    assert list(local_statistics(student, None, labels, VocabShard.of(WIDTH, 0, 1, ce_only), ce_only)) == [
        "ce_max",
        "ce_sum",
        "ce_label",
    ]
