"""The top-k loss against its dense float64 definition and against the full divergence."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from mkd.losses import KDObjective, vocab_parallel_kd
from mkd.losses.stored.topk import vocab_parallel_topk_kd
from tests.losses.stored.topk_reference import dense_topk_kd

PADDED = 320  # columns of the head; on 4 ranks of 80 the last one starts at id 240
TINY = 1e-30
MASKS = ["random", "none", "all", "weights"]


def batch(
    seed, student_vocab, teacher_vocab, k, mask, temperature, *, rows=24, dtype=torch.float64, spread=3.0
):
    """Return (student [rows, PADDED], ids, log-probabilities [rows, k], labels, mask, teacher's logits)."""
    generator = torch.Generator().manual_seed(seed)
    student = spread * torch.randn(rows, PADDED, generator=generator, dtype=torch.float64)
    teacher = 0.5 * student + spread * torch.randn(rows, PADDED, generator=generator, dtype=torch.float64)
    student[:, student_vocab:] = 50.0
    shared = min(student_vocab, teacher_vocab)
    logprobs, ids = (teacher[:, :shared] / temperature).log_softmax(dim=1).topk(k, dim=1)
    labels = torch.randint(shared, (rows,), generator=generator)
    uniform = torch.rand(rows, generator=generator)
    weight = {
        "random": (uniform < 0.6).float(),
        "none": torch.zeros(rows),
        "all": torch.ones(rows),
        "weights": uniform * (uniform < 0.6),
    }[mask]
    return (student.to(dtype), ids, logprobs.float(), labels, weight), teacher


def topk_kd(*case, tp_group=None, teacher_metrics=None, overwrite_student_logits=False, **settings):
    more = dict(teacher_metrics=teacher_metrics, overwrite_student_logits=overwrite_student_logits)
    return vocab_parallel_topk_kd(*case, KDObjective(**settings), tp_group=tp_group, **more)


def values(output) -> dict:
    return {f.name: getattr(output, f.name) for f in fields(output) if getattr(output, f.name) is not None}


def sharded(student, ids, logprobs, labels, mask, settings):
    """Return one rank's values of the loss and the gradient of its columns.

    The gradient is that of 2 * loss, to see the factor.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    student = student.chunk(size, dim=-1)[rank].clone().requires_grad_()
    output = topk_kd(student, ids, logprobs, labels, mask, tp_group=dist.group.WORLD, **settings)
    (2.0 * output.loss).backward()
    return {k: v.detach() for k, v in values(output).items()}, student.grad


def whole(student, ids, logprobs, labels, mask, **settings):
    student = student.clone().requires_grad_()
    output = topk_kd(student, ids, logprobs, labels, mask, tp_group=None, **settings)
    output.loss.backward()
    return output, student.grad


def assert_close(actual, wanted, tolerance):
    error = (actual.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
    size = wanted.double().abs().max().item() if wanted.numel() else 0.0
    assert error <= tolerance * size + TINY, f"error {error:.3e} at size {size:.3e}"


def configurations():
    """Yield tensor parallelism x vocabularies x k x temperature, with ratios, scalings and masks in turn."""
    index = 0
    for tp in (1, 2, 4):
        for student_vocab, teacher_vocab in ((300, 310), (310, 300), (320, 320), (200, 230)):
            for k in (1, 16, min(student_vocab, teacher_vocab)):
                for temperature in (1.0, 2.5):
                    ratio, scaling = (0.5, 1.0, 0.0)[index % 3], ("squared", "none")[index % 2]
                    yield (
                        tp,
                        student_vocab,
                        teacher_vocab,
                        k,
                        temperature,
                        ratio,
                        scaling,
                        MASKS[index // 2 % 4],
                    )
                    index += 1


@pytest.mark.parametrize(
    "tp, student_vocab, teacher_vocab, k, temperature, ratio, scaling, mask", configurations()
)
def test_equals_dense_reference(
    ranks, tp, student_vocab, teacher_vocab, k, temperature, ratio, scaling, mask
):
    settings = dict(student_vocab_size=student_vocab, teacher_vocab_size=teacher_vocab)
    settings |= dict(kd_ratio=ratio, temperature=temperature, temperature_scaling=scaling)
    for seed, dtype, tolerance in ((1, torch.float64, 1e-12), (2, torch.float32, 1e-5)):
        case, _ = batch(seed, student_vocab, teacher_vocab, k, mask, temperature, dtype=dtype)
        logprobs = case[2].double()
        if k == min(student_vocab, teacher_vocab):  # the stored ones sum to 1 only up to their rounding
            logprobs = logprobs.log_softmax(dim=1)
        student = case[0].to(torch.float64, copy=True).requires_grad_()
        loss, ce, kd = dense_topk_kd(student, case[1], logprobs, *case[3:], **settings)
        loss.backward()
        results = ranks.run(sharded, tp, *case, settings)
        for got, _ in results:
            assert got.keys() == results[0][0].keys()
            assert all(torch.equal(got[name], results[0][0][name]) for name in got)
            wanted = {
                "loss": loss.detach(),
                "ce": ce,
                "kd": kd,
                "num_loss_tokens": torch.count_nonzero(case[4]),
            }
            for name in wanted.keys() & got.keys():
                assert_close(got[name], wanted[name], tolerance)
            assert ("kd" in got, "ce" in got) == (ratio > 0, ratio < 1)
        gradient = torch.cat([g for _, g in results], dim=-1)
        assert gradient.dtype == dtype
        assert_close(gradient, 2.0 * student.grad, tolerance)
        assert torch.count_nonzero(gradient[case[4] == 0]) == 0
        assert torch.count_nonzero(gradient[:, student_vocab:]) == 0


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_ids_are_the_full_divergence(ranks, tp, temperature):
    case, teacher = batch(3, 300, 300, 300, "random", temperature)
    settings = dict(student_vocab_size=300, teacher_vocab_size=300, kd_ratio=0.7, temperature=temperature)
    student = case[0].clone().requires_grad_()
    full = vocab_parallel_kd(student, teacher, *case[3:], KDObjective(**settings), tp_group=None)
    (2.0 * full.loss).backward()
    logprobs = (teacher[:, :300] / temperature).log_softmax(dim=1).gather(1, case[1])
    results = ranks.run(sharded, tp, case[0], case[1], logprobs, *case[3:], settings)
    for name in ("loss", "ce", "kd", "top1_agreement"):
        assert_close(results[0][0][name], getattr(full, name).detach(), 1e-12)
    assert_close(torch.cat([g for _, g in results], dim=-1), student.grad, 1e-12)


def test_more_ids_come_closer_to_the_full_divergence_from_below():
    """Merging ids into a bucket can only lose divergence (the log-sum inequality)."""
    previous = 0.0
    for k in (1, 2, 4, 16, 64, 256, 299, 300):
        case, teacher = batch(4, 300, 300, k, "all", 1.0)
        kd = whole(*case, student_vocab_size=300, kd_ratio=1.0)[0].kd.item()
        assert kd >= previous
        previous = kd
    full = vocab_parallel_kd(case[0], teacher, *case[3:], KDObjective(300, 300), tp_group=None)
    assert previous == pytest.approx(full.kd.item(), rel=1e-6)


def adversarial(seed):
    """Return logits at every scale.

    Teachers are the student itself, certain, flat, or rounded to half precision.
    """
    generator = torch.Generator().manual_seed(seed)
    student = [0.0, 1e-3, 1.0, 30.0, 1e4][seed % 5] * torch.randn(8, PADDED, generator=generator)
    teacher = [student, 30.0 * student, torch.zeros_like(student), -student, student + 1e-4][seed // 5 % 5]
    logprobs, ids = teacher[:, :300].double().log_softmax(dim=1).topk([1, 8, 299, 300][seed // 25 % 4], dim=1)
    return student, ids, (logprobs.half().float() if seed % 2 else logprobs.float())


def test_never_negative_and_always_finite():
    for seed in range(100):  # every combination
        student, ids, logprobs = adversarial(seed)
        labels, mask = torch.zeros(8, dtype=torch.int64), torch.ones(8)
        output, gradient = whole(student, ids, logprobs, labels, mask, student_vocab_size=300, kd_ratio=1.0)
        each = [
            whole(
                *(t[i : i + 1] for t in (student, ids, logprobs, labels, mask)),
                student_vocab_size=300,
                kd_ratio=1.0,
            )
            for i in range(8)
        ]
        assert output.kd.isfinite() and gradient.isfinite().all()
        assert all(one.kd >= 0.0 for one, _ in each)
        # rows of dKL/da sum to zero: the divergence does not change when all logits move together
        assert gradient[:, :300].double().sum(dim=1).abs().max() <= 1e-5


def test_a_rest_that_rounding_would_lose():
    """Students that give the rest almost nothing: the divergence is not infinite.

    In fp32 `1 - sum p_s` is 0 there.
    """
    student = torch.full((1, PADDED), -60.0)
    student[:, :4] = 40.0
    ids, logprobs = torch.arange(4)[None], torch.full((1, 4), 0.2).log()
    case = (student, ids, logprobs, torch.tensor([0]), torch.ones(1))
    output, gradient = whole(*case, student_vocab_size=300, kd_ratio=1.0)
    exact = student.double().requires_grad_()
    loss, _, kd = dense_topk_kd(exact, *case[1:], student_vocab_size=300, kd_ratio=1.0)
    loss.backward()
    assert_close(output.kd, kd, 1e-6)
    assert_close(gradient, exact.grad, 1e-6)
    assert kd > 15


def test_gradcheck():
    for temperature, ratio, k in ((1.0, 0.5, 3), (2.5, 0.3, 1), (1.0, 0.0, 2), (2.5, 1.0, 9)):
        case, _ = batch(7, 9, 11, k, "weights", temperature, rows=3)
        settings = dict(student_vocab_size=9, teacher_vocab_size=11, temperature=temperature, kd_ratio=ratio)

        def loss(logits, case=case, settings=settings):
            return topk_kd(logits, *case[1:], tp_group=None, **settings).loss

        assert torch.autograd.gradcheck(loss, case[0][:, :12].contiguous().requires_grad_())


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_large_logits(ranks, tp, temperature):
    settings = dict(student_vocab_size=300, teacher_vocab_size=310, temperature=temperature)
    case, _ = batch(5, 300, 310, 16, "random", temperature, dtype=torch.float32, spread=1e4)
    student = case[0].to(torch.float64, copy=True).requires_grad_()
    loss, _, kd = dense_topk_kd(student, *case[1:], **settings)
    loss.backward()
    results = ranks.run(sharded, tp, *case, settings)
    assert_close(results[0][0]["kd"], kd, 1e-5)
    assert_close(torch.cat([g for _, g in results], dim=-1), 2.0 * student.grad, 1e-5)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_masked_rows_may_hold_anything(ranks, tp, ratio):
    settings = dict(student_vocab_size=300, teacher_vocab_size=310, kd_ratio=ratio, temperature=2.5)
    (student, ids, logprobs, labels, mask), _ = batch(8, 300, 310, 16, "random", 2.5, dtype=torch.float32)
    settings["teacher_metrics"] = torch.rand(len(mask), 2)
    clean = ranks.run(sharded, tp, student, ids, logprobs, labels, mask, settings)
    masked = mask == 0
    for garbage in (float("nan"), float("inf"), -float("inf")):
        dirty = [
            t.masked_fill(masked[:, None], garbage) for t in (student, logprobs, settings["teacher_metrics"])
        ]
        for number in (-100, 10**6):
            dirty_ids, dirty_labels = (
                ids.masked_fill(masked[:, None], number),
                labels.masked_fill(masked, number),
            )
            dirty_settings = settings | dict(teacher_metrics=dirty[2])
            results = ranks.run(
                sharded, tp, dirty[0], dirty_ids, dirty[1], dirty_labels, mask, dirty_settings
            )
            for (got, gradient), (wanted, wanted_gradient) in zip(results, clean, strict=True):
                assert all(torch.equal(got[name], wanted[name]) for name in wanted)
                assert torch.equal(gradient, wanted_gradient)


def test_metrics_shapes_and_chunks():
    """Leading dimensions, int32 ids, several blocks of rows and overwritten logits change nothing.

    Metrics are weighted sums.
    """
    case, teacher = batch(13, 300, 310, 16, "weights", 1.0, rows=4000, dtype=torch.float32)
    log_p = teacher[:, :300].log_softmax(dim=1)
    labels, mask = case[3], case[4]
    metrics = torch.stack([-log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)], dim=1)
    settings = dict(student_vocab_size=300, teacher_vocab_size=300, teacher_metrics=metrics)
    output, gradient = whole(*case, **settings)
    full = vocab_parallel_kd(case[0], teacher.float(), labels, mask, KDObjective(300, 300), tp_group=None)
    for name in ("ce", "teacher_ce", "teacher_entropy", "top1_agreement", "num_loss_tokens"):
        assert_close(getattr(output, name), getattr(full, name), 1e-5)
    assert torch.equal(output.loss, 0.5 * output.ce + 0.5 * output.kd)
    shaped = [t.view(40, 100, *t.shape[1:]) for t in (case[0], case[1].int(), *case[2:])]
    leaf = shaped[0].clone().requires_grad_()
    logits = leaf * 1.0
    again = topk_kd(logits, *shaped[1:], tp_group=None, overwrite_student_logits=True, **settings)
    again.loss.backward()
    assert torch.equal(again.loss, output.loss)
    assert torch.equal(leaf.grad.view_as(gradient), gradient)
    rows = torch.cat(
        [whole(*(t[i : i + 500] for t in case), student_vocab_size=300)[1] for i in range(0, 4000, 500)]
    )
    assert_close(rows, gradient, 1e-6)
    empty, gradient = whole(*(t[:0] for t in case), student_vocab_size=300)
    assert empty.loss == 0 and gradient.shape == (0, PADDED)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_bf16_logits_lose_nothing_but_the_rounding_of_the_gradient(temperature):
    case, _ = batch(6, 300, 310, 16, "random", temperature, dtype=torch.bfloat16)
    settings = dict(student_vocab_size=300, teacher_vocab_size=310, temperature=temperature)
    student = case[0].to(torch.float64, copy=True).requires_grad_()
    loss, _, _ = dense_topk_kd(student, *case[1:], **settings)
    loss.backward()
    output, gradient = whole(*case, **settings)
    assert_close(output.loss, loss.detach(), 1e-5)
    assert gradient.dtype == torch.bfloat16
    assert_close(gradient, student.grad, 2**-8)
