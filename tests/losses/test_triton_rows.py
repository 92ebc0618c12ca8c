"""The Triton kernels against the float64 reference: the same losses, gradients and metrics as plain torch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mkd.losses import torch_rows, vocab_parallel_kd
from mkd.losses.dense_reference import dense_kd
from mkd.losses.kd_objective import KDObjective, LossRows, VocabShard
from mkd.losses.vocab_parallel import passes_for
from tests.losses.objectives import divergence_of, objective_of

pytestmark = pytest.mark.gpu
VOCABULARIES = [(30000, 30000), (30000, 30100), (30100, 29990), (9001, 30208)]
DIVERGENCES = [
    ("forward_kl", 0.5),
    ("reverse_kl", 0.5),
    ("mixed_kl", 0.5),
    ("jsd", 0.5),
    ("jsd", 0.1),
    ("jsd", 1.0),
    ("skewed_forward_kl", 0.1),
    ("skewed_reverse_kl", 0.1),
]
ROWS, WIDTH = 40, 30208


def problem(dtype, student_vocab, teacher_vocab, seed=0):
    """Return (student, teacher, labels, mask) on the GPU; NaN in masked rows, garbage in padding columns."""
    generator = torch.Generator("cuda").manual_seed(seed)
    student, noise = (3 * torch.randn(ROWS, WIDTH, device="cuda", generator=generator) for _ in range(2))
    teacher = 0.5 * student + noise
    labels = torch.randint(min(student_vocab, teacher_vocab), (ROWS,), device="cuda", generator=generator)
    mask = torch.rand(ROWS, device="cuda", generator=generator)
    mask = mask * (mask < 0.7)
    student[:, student_vocab:], teacher[:, teacher_vocab:] = 50.0, float("nan")
    student[mask == 0], teacher[mask == 0] = float("nan"), float("inf")
    return student.to(dtype), teacher.to(dtype), labels, mask


def errors(dtype, settings, student_vocab, teacher_vocab) -> tuple[float, float]:
    """Return the relative errors of (the gradient, the worst value) to float64 on the same logits."""
    student, teacher, labels, mask = problem(dtype, student_vocab, teacher_vocab)
    sizes = dict(student_vocab_size=student_vocab, teacher_vocab_size=teacher_vocab, **settings)
    logits = student.clone().requires_grad_()
    objective = objective_of(with_ce_metric=True, **sizes)
    output = vocab_parallel_kd(logits, teacher, labels, mask, objective, tp_group=None)
    output.loss.backward()
    exact = student.double().requires_grad_()
    wanted = dense_kd(exact, teacher, labels, mask, objective)
    wanted.loss.backward()
    assert torch.count_nonzero(logits.grad[mask == 0]) == 0
    assert torch.count_nonzero(logits.grad[:, student_vocab:]) == 0
    gradient = (logits.grad.double() - exact.grad).norm() / exact.grad.norm()
    names = ("loss", "ce", "kd", "teacher_ce", "teacher_entropy", "top1_agreement")
    names = [name for name in names if getattr(output, name) is not None]
    pairs = [(float(getattr(output, name).detach()), float(getattr(wanted, name).detach())) for name in names]
    return float(gradient), max(abs(ours - exact) / max(abs(exact), 1.0) for ours, exact in pairs)


@pytest.mark.parametrize(("student_vocab", "teacher_vocab"), VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_equals_float64(student_vocab, teacher_vocab, dtype, temperature):
    for (divergence, beta), ratio in product(DIVERGENCES, (0.0, 0.5, 1.0)):
        settings = dict(
            divergence=divergence,
            jsd_beta=beta,
            skew_alpha=0.1,
            mixed_kl_weight=0.3,
            kd_ratio=ratio,
            temperature=temperature,
        )
        gradient, value = errors(dtype, settings, student_vocab, teacher_vocab)
        assert value <= 1e-5, settings
        assert gradient <= (1e-5 if dtype == torch.float32 else 4e-3), settings


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(
    "divergence", ["forward_kl", "mixed_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl"]
)
@pytest.mark.parametrize("vocabularies", [(30000, 30100), (9001, 30208), (30100, 7000)])
def test_shards_merge_as_in_torch(temperature, divergence, vocabularies):
    """Kernel and torch merge the statistics of four shards alike; the last shard may be padding alone."""
    objective = KDObjective(
        *vocabularies, 0.5, temperature, divergence=divergence_of(divergence), with_ce_metric=True
    )
    student, teacher, labels, _ = problem(torch.float32, *vocabularies)
    student, teacher = student.nan_to_num(0.0, 0.0, 0.0), teacher.nan_to_num(0.0, 0.0, 0.0)
    mask = torch.ones(ROWS, device="cuda")
    shards = [VocabShard.of(WIDTH // 4, rank, 4, objective) for rank in range(4)]
    parts = list(zip(student.chunk(4, 1), teacher.chunk(4, 1), shards, strict=True))
    passes = passes_for(student, objective)
    assert passes is not torch_rows
    kernel = torch.stack(
        [passes.local_statistics(LossRows(s, t, labels, mask), shard, objective) for s, t, shard in parts]
    )
    plain = torch.stack(
        [
            torch_rows.local_statistics(LossRows(s.double(), t.double(), labels, mask), shard, objective)
            for s, t, shard in parts
        ]
    )
    for student_part, teacher_part, shard in parts:
        ours = passes.merge_statistics(kernel, shard, objective)
        wanted = torch_rows.merge_statistics(plain, shard, objective)
        for name in ("ce", "kd", "teacher_ce", "teacher_entropy", "top1_agreement", "residual"):
            if getattr(wanted, name) is not None:
                torch.testing.assert_close(
                    getattr(ours, name).double(), getattr(wanted, name), rtol=1e-5, atol=1e-5
                )
        if objective.divergence.needs_terms:
            data = LossRows(student_part, teacher_part, labels, mask)
            terms = passes.divergence_terms(data, ours, shard, objective)
            doubled = data._replace(student=student_part.double(), teacher=teacher_part.double())
            exact = torch_rows.divergence_terms(doubled, wanted, shard, objective)
            torch.testing.assert_close(terms.double(), exact, rtol=1e-4, atol=1e-6)


def test_teacher_equal_to_student_gives_exactly_nothing():
    student, _, labels, _ = problem(torch.bfloat16, 30000, 30000)
    logits = student.nan_to_num(0.0).requires_grad_()
    output = vocab_parallel_kd(
        logits,
        logits.detach().clone(),
        labels,
        torch.ones(ROWS, device="cuda"),
        KDObjective(30000, 30000, kd_ratio=1.0),
        tp_group=None,
    )
    output.loss.backward()
    assert output.kd == 0.0
    assert torch.count_nonzero(logits.grad) == 0


def test_same_bits_in_every_run():
    student, teacher, labels, mask = problem(torch.bfloat16, 30000, 30100)
    results = []
    for _ in range(3):
        logits = student.clone().requires_grad_()
        output = vocab_parallel_kd(
            logits,
            teacher,
            labels,
            mask,
            KDObjective(30000, 30100, divergence=divergence_of("jsd")),
            tp_group=None,
        )
        output.loss.backward()
        results.append((output.loss.detach(), logits.grad))
    for loss, gradient in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient, results[0][1])
