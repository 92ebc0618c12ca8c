"""The vocabulary-parallel loss against the dense float64 reference: value, gradient, metrics, promises."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from mkd.config.divergence import DIVERGENCES
from mkd.losses import KDOutput, torch_rows, vocab_parallel_kd
from mkd.losses.dense_reference import dense_kd
from tests.losses.objectives import objective_of

PADDED = 320  # columns of both heads; on 4 ranks of 80 the last one starts at id 240
TINY = 1e-30  # below this a value of a saturated softmax is zero in fp32
MASKS = ["random", "none", "all", "weights"]


def batch(
    seed, student_vocab, teacher_vocab, mask, *, rows=24, padded=PADDED, dtype=torch.float64, spread=3.0
):
    """Return (student, teacher, labels, mask); logits are [rows, padded] with garbage in padding columns."""
    generator = torch.Generator().manual_seed(seed)
    student = spread * torch.randn(rows, padded, generator=generator, dtype=torch.float64)
    teacher = 0.5 * student + spread * torch.randn(rows, padded, generator=generator, dtype=torch.float64)
    student[:, student_vocab:] = 50.0
    teacher[:, teacher_vocab:] = float("nan")
    labels = torch.randint(min(student_vocab, teacher_vocab), (rows,), generator=generator)
    uniform = torch.rand(rows, generator=generator)
    weight = {
        "random": (uniform < 0.6).float(),
        "none": torch.zeros(rows),
        "all": torch.ones(rows),
        "weights": uniform * (uniform < 0.6),
    }[mask]
    return student.to(dtype), teacher.to(dtype), labels, weight


def values(output: KDOutput) -> dict:
    return {f.name: getattr(output, f.name) for f in fields(output) if getattr(output, f.name) is not None}


def sharded(student, teacher, labels, mask, settings):
    """Return one rank's values of the loss and the gradient of its columns.

    The gradient is that of 2 * loss, to see the factor.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    student = student.chunk(size, dim=-1)[rank].clone().requires_grad_()
    teacher = None if teacher is None else teacher.chunk(size, dim=-1)[rank]
    output = vocab_parallel_kd(
        student, teacher, labels, mask, objective_of(**settings), tp_group=dist.group.WORLD
    )
    (2.0 * output.loss).backward()
    return {k: v.detach() for k, v in values(output).items()}, student.grad


def whole(student, teacher, labels, mask, **settings):
    """Return the loss and its gradient, computed in this process."""
    student = student.clone().requires_grad_()
    output = vocab_parallel_kd(student, teacher, labels, mask, objective_of(**settings), tp_group=None)
    output.loss.backward()
    return output, student.grad


def expected(student, teacher, labels, mask, settings):
    student = student.double().requires_grad_()
    output = dense_kd(student, teacher, labels, mask, objective_of(**settings))
    output.loss.backward()
    return values(output), student.grad


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    error = (actual.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
    size = wanted.double().abs().max().item() if wanted.numel() else 0.0
    assert error <= tolerance * size + TINY, f"error {error:.3e} at size {size:.3e}"


def assert_equal_to_reference(case, settings, results, tolerance):
    """Compare every rank's values, which are bitwise equal, and the gathered gradient with the reference."""
    wanted, gradient = expected(*case, settings)
    first = results[0][0]
    for got, _ in results:
        assert got.keys() == first.keys()
        assert all(torch.equal(got[name], first[name]) for name in got)
    for name, value in first.items():
        assert_close(value, wanted[name], tolerance)
    got = torch.cat([g for _, g in results], dim=-1)
    assert got.dtype == case[0].dtype
    assert_close(got, 2.0 * gradient, tolerance)
    assert torch.count_nonzero(got[case[3] == 0]) == 0
    assert torch.count_nonzero(got[:, settings["student_vocab_size"] :]) == 0


def configurations():
    """Yield tensor parallelism x vocabularies x temperature x ratio, with scalings and masks in turn."""
    vocabularies = [(300, 310), (310, 300), (320, 320), (200, 230), (150, 320)]
    index = 0
    for tp in (1, 2, 4):
        for student_vocab, teacher_vocab in vocabularies:
            for temperature in (1.0, 2.5):
                for ratio in (0.0, 0.5, 1.0):
                    mask = MASKS[index % len(MASKS)]
                    scaling = ("squared", "none")[index // len(MASKS) % 2]
                    yield tp, student_vocab, teacher_vocab, temperature, ratio, scaling, mask
                    index += 1


@pytest.mark.parametrize(
    ("tp", "student_vocab", "teacher_vocab", "temperature", "ratio", "scaling", "mask"), configurations()
)
@pytest.mark.fault(29)
def test_equals_dense_reference(ranks, tp, student_vocab, teacher_vocab, temperature, ratio, scaling, mask):
    settings = dict(
        student_vocab_size=student_vocab,
        teacher_vocab_size=teacher_vocab,
        kd_ratio=ratio,
        temperature=temperature,
        temperature_scaling=scaling,
    )
    for seed, dtype, tolerance in ((1, torch.float64, 1e-12), (2, torch.float32, 1e-5)):
        case = batch(seed, student_vocab, teacher_vocab, mask, dtype=dtype)
        results = ranks.run(sharded, tp, *case, settings)
        assert_equal_to_reference(case, settings, results, tolerance)


BOTH = dict(student_vocab_size=300, teacher_vocab_size=310)
OTHERS = [
    dict(divergence="reverse_kl"),
    dict(divergence="mixed_kl", mixed_kl_weight=0.3),
    *(dict(divergence="jsd", jsd_beta=beta) for beta in (0.0, 0.1, 0.5, 1.0)),
    *(dict(divergence="skewed_forward_kl", skew_alpha=alpha) for alpha in (0.0, 0.1, 0.7)),
    *(dict(divergence="skewed_reverse_kl", skew_alpha=alpha) for alpha in (0.0, 0.1, 0.7)),
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", OTHERS, ids=lambda d: "-".join(map(str, d.values())))
def test_other_divergences_equal_dense_reference(ranks, tp, temperature, divergence):
    for vocabularies, mask in (((300, 310), "random"), ((200, 230), "weights"), ((310, 300), "none")):
        sizes = dict(zip(("student_vocab_size", "teacher_vocab_size"), vocabularies, strict=True))
        settings = dict(sizes, temperature=temperature, kd_ratio=0.7, **divergence)
        for seed, dtype, tolerance in ((1, torch.float64, 1e-11), (2, torch.float32, 1e-5)):
            case = batch(seed, *vocabularies, mask, dtype=dtype)
            assert_equal_to_reference(case, settings, ranks.run(sharded, tp, *case, settings), tolerance)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_ends_of_jsd_are_the_two_kls(beta):
    case = batch(3, 300, 310, "random", dtype=torch.float32)
    jsd, gradient = whole(*case, **BOTH, divergence="jsd", jsd_beta=beta)
    kl, wanted = whole(*case, **BOTH, divergence="reverse_kl" if beta else "forward_kl")
    assert torch.equal(jsd.loss, kl.loss) and torch.equal(gradient, wanted)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize(
    "divergence",
    [
        dict(divergence="jsd", jsd_beta=0.1),
        dict(divergence="jsd"),
        dict(divergence="skewed_forward_kl"),
        dict(divergence="skewed_reverse_kl"),
    ],
    ids=str,
)
def test_models_that_are_nearly_alike(noise, divergence):
    """The common error of a softmax's normaliser would swamp it: 1e-5 nats a row at noise 0.01."""
    student, _, labels, mask = batch(4, 8000, 8000, "all", rows=8, padded=8000, dtype=torch.float32)
    teacher = student + noise * torch.randn(student.shape, generator=torch.Generator().manual_seed(5))
    settings = dict(student_vocab_size=8000, teacher_vocab_size=8000, kd_ratio=1.0, **divergence)
    output, gradient = whole(student, teacher, labels, mask, **settings)
    wanted, wanted_gradient = expected(student, teacher, labels, mask, settings)
    assert output.kd >= 0.0
    assert abs(output.kd - wanted["kd"]) <= 1e-5 * wanted["kd"] + 1e-12
    assert (gradient - wanted_gradient).abs().max() <= 1e-4 * wanted_gradient.abs().max() + 1e-7


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_bf16_logits_lose_nothing_but_the_rounding_of_the_gradient(ranks, tp, temperature):
    settings = dict(BOTH, temperature=temperature)
    case = batch(3, 300, 310, "random", dtype=torch.bfloat16)
    results = ranks.run(sharded, tp, *case, settings)
    wanted, gradient = expected(*case, settings)
    for name, value in results[0][0].items():
        assert_close(value, wanted[name], 1e-5)
    got = torch.cat([g for _, g in results], dim=-1)
    assert got.dtype == torch.bfloat16
    assert_close(got, 2.0 * gradient, 2**-8)


def test_many_row_chunks(ranks):
    case = batch(4, 300, 310, "random", rows=2000)
    assert len(torch_rows.row_blocks(case[0][:, : PADDED // 2])) > 1
    settings = dict(BOTH, temperature=2.5)
    assert_equal_to_reference(case, settings, ranks.run(sharded, 2, *case, settings), 1e-12)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_large_logits(ranks, tp, temperature):
    settings = dict(BOTH, temperature=temperature)
    case = batch(5, 300, 310, "random", dtype=torch.float32, spread=1e4)
    assert_equal_to_reference(case, settings, ranks.run(sharded, tp, *case, settings), 1e-5)
    offset = (case[0] + 1e4, case[1] - 1e4, *case[2:])
    assert_equal_to_reference(offset, settings, ranks.run(sharded, tp, *offset, settings), 1e-5)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_teacher_equal_to_student_gives_exactly_nothing(ranks, tp, temperature):
    student, _, labels, mask = batch(6, PADDED, PADDED, "all", dtype=torch.float32)
    settings = dict(student_vocab_size=300, teacher_vocab_size=300, kd_ratio=1.0, temperature=temperature)
    for output, gradient in ranks.run(sharded, tp, student, student.clone(), labels, mask, settings):
        assert output["loss"] == output["kd"] == 0.0
        assert output["top1_agreement"] == output["num_loss_tokens"] == 24
        assert torch.count_nonzero(gradient) == 0


def test_kl_is_not_negative():
    for seed in range(60):
        case = batch(seed, 300, 310, "all", rows=4, dtype=torch.float32, spread=[0.01, 1.0, 30.0][seed % 3])
        divergence = DIVERGENCES[seed % len(DIVERGENCES)]
        output, _ = whole(
            *case, **BOTH, kd_ratio=1.0, temperature=[1.0, 2.5][seed % 2], divergence=divergence
        )
        assert output.kd >= 0.0


def test_gradcheck():
    student, teacher, labels, mask = batch(7, 9, 11, "all", rows=3, padded=12)
    for temperature, ratio in ((1.0, 0.5), (2.5, 0.3), (1.0, 0.0), (2.5, 1.0)):
        settings = dict(student_vocab_size=9, teacher_vocab_size=11, temperature=temperature, kd_ratio=ratio)

        for divergence in DIVERGENCES:

            def loss(logits, settings=dict(settings, divergence=divergence)):  # noqa: B006
                return vocab_parallel_kd(
                    logits, teacher, labels, mask, objective_of(**settings), tp_group=None
                ).loss

            assert torch.autograd.gradcheck(loss, student.requires_grad_())


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tp", [1, 2])
def test_masked_rows_may_hold_anything(ranks, tp, ratio):
    settings = dict(BOTH, kd_ratio=ratio, temperature=2.5)
    student, teacher, labels, mask = batch(8, 300, 310, "random", dtype=torch.float32)
    clean = ranks.run(sharded, tp, student, teacher, labels, mask, settings)
    masked = mask == 0
    for garbage in (float("nan"), float("inf"), -float("inf")):
        dirty = [t.masked_fill(masked[:, None], garbage) for t in (student, teacher)]
        for label in (-100, 10**9):
            results = ranks.run(sharded, tp, *dirty, labels.masked_fill(masked, label), mask, settings)
            for (got, gradient), (wanted, wanted_gradient) in zip(results, clean, strict=True):
                assert all(torch.equal(got[name], wanted[name]) for name in wanted)
                assert torch.equal(gradient, wanted_gradient)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.fault(35)
def test_no_loss_token_is_zero_with_a_graph(ratio):
    student, teacher, labels, mask = batch(9, 300, 310, "none", dtype=torch.float32)
    output, gradient = whole(
        torch.full_like(student, float("nan")), teacher, labels, mask, **BOTH, kd_ratio=ratio
    )
    assert output.loss.grad_fn is not None
    assert all(value == 0 for value in values(output).values())
    assert torch.count_nonzero(gradient) == 0
    output, gradient = whole(student[:0], teacher[:0], labels[:0], mask[:0], **BOTH, kd_ratio=ratio)
    assert output.loss == 0
    assert gradient.shape == (0, PADDED)


def test_ratio_zero_ignores_the_teacher_bitwise():
    student, teacher, labels, mask = batch(10, 300, 310, "random", dtype=torch.float32)
    alone, gradient = whole(student, None, labels, mask, student_vocab_size=300, kd_ratio=0.0)
    given, gradient_given = whole(student, teacher, labels, mask, **BOTH, kd_ratio=0.0, temperature=3.0)
    assert values(alone).keys() == values(given).keys() == {"loss", "ce", "num_loss_tokens", "plain_ce"}
    assert all(torch.equal(v, values(given)[name]) for name, v in values(alone).items())
    assert torch.equal(gradient, gradient_given)
    assert torch.equal(alone.loss, alone.ce)


def test_ratio_one_computes_ce_only_as_a_metric():
    case = batch(11, 300, 310, "random", dtype=torch.float32)
    bare, gradient = whole(*case, **BOTH, kd_ratio=1.0)
    measured, gradient_measured = whole(*case, **BOTH, kd_ratio=1.0, with_ce_metric=True)
    assert bare.ce is None
    assert_close(measured.ce, expected(*case, BOTH)[0]["ce"], 1e-5)
    assert torch.equal(bare.loss, measured.loss)
    assert torch.equal(gradient, gradient_measured)


@pytest.mark.parametrize("scaling", ["squared", "none"])
def test_logged_parts_add_up_to_the_loss(scaling):
    case = batch(12, 300, 310, "random", dtype=torch.float32)
    output, _ = whole(*case, **BOTH, kd_ratio=0.25, temperature=2.0, temperature_scaling=scaling)
    assert torch.equal(output.loss, 0.75 * output.ce + 0.25 * output.kd)
    assert not any(value.requires_grad for name, value in values(output).items() if name != "loss")


def test_leading_shape_and_views():
    student, teacher, labels, mask = batch(13, 300, 310, "random")
    flat, gradient = whole(student, teacher, labels, mask, **BOTH)
    shaped = [t.view(4, 6, -1) for t in (student, teacher)] + [t.view(4, 6) for t in (labels, mask)]
    output, shaped_gradient = whole(*shaped, **BOTH)
    assert torch.equal(output.loss, flat.loss)
    assert torch.equal(shaped_gradient.view_as(gradient), gradient)
    swapped = [t.transpose(0, 1) for t in shaped]
    output, swapped_gradient = whole(*swapped, **BOTH)
    assert_close(output.loss, flat.loss, 1e-14)
    assert torch.equal(swapped_gradient.transpose(0, 1), shaped_gradient)


def test_ties_of_the_student_count_as_agreement():
    student = torch.tensor([[2.0, 5.0, 5.0, 9.0], [2.0, 5.0, 4.0, 9.0]], dtype=torch.bfloat16)
    teacher = torch.tensor([[0.0, 0.0, 1.0, 9.0], [0.0, 0.0, 1.0, 9.0]], dtype=torch.bfloat16)
    labels, mask = torch.tensor([0, 0]), torch.ones(2)
    output, _ = whole(student, teacher, labels, mask, student_vocab_size=4, teacher_vocab_size=3)
    assert output.top1_agreement == 1


def test_labels_that_a_model_lacks():
    student, teacher, labels, mask = batch(14, 310, 300, "all", dtype=torch.float32)
    labels[3] = 305  # an id of the student only: its CE is fine, the teacher gives it no probability
    settings = dict(student_vocab_size=310, teacher_vocab_size=300)
    output, gradient = whole(student, teacher, labels, mask, **settings)
    wanted, wanted_gradient = expected(
        student, teacher[:, :310].nan_to_num(), labels.clamp(max=299), mask, settings
    )
    assert output.teacher_ce == float("inf")
    assert output.loss.isfinite() and gradient.isfinite().all()
    assert_close(output.kd, wanted["kd"], 1e-5)
    labels[3] = 315  # padding: the loss is infinite and the caller's finite check stops the run
    assert whole(student, teacher, labels, mask, **settings)[0].loss == float("inf")
