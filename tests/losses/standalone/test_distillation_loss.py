"""`DistillationLoss` on one process: values and gradients against plain torch in float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mkd.config.divergence import DECLARATIONS
from mkd.errors import UsageError
from mkd.losses import DistillationLoss, LMHead
from tests.losses.objectives import MIXED
from tests.losses.standalone.plain_loss import plain_logits, plain_rows
from tests.losses.test_vocab_parallel_cost import Recorder
from tests.reported import refused

BATCH, LENGTH, STUDENT, TEACHER = 3, 11, 12, 20
FORMS = [  # (student ids, teacher ids, how each head makes logits)
    (70, 70, {}, {}),
    (70, 83, dict(scale=0.4, logits_cap=2.5), dict(logits_cap=3.0)),
    (83, 70, dict(scale=1.7), dict(scale=0.5)),
]


def case(student_ids=70, teacher_ids=70, dtype=torch.float64, seed=0):
    """Return (hidden, student head, teacher hidden, teacher weight, labels) of random models."""
    torch.manual_seed(seed)
    hidden = torch.randn(BATCH, LENGTH, STUDENT, dtype=torch.float64).to(dtype).requires_grad_()
    head = nn.Linear(STUDENT, student_ids, dtype=torch.float64).to(dtype)
    teacher_hidden = torch.randn(BATCH, LENGTH, TEACHER, dtype=torch.float64).to(dtype)
    teacher_weight = torch.randn(teacher_ids, TEACHER, dtype=torch.float64).to(dtype) / 3
    labels = torch.randint(0, min(student_ids, teacher_ids), (BATCH, LENGTH))
    labels[0, :5] = -100
    labels[2] = -100
    return hidden, head, teacher_hidden, teacher_weight, labels


def shifted(labels):
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


def close(found, expected, tolerance=1e-11):
    found, expected = found.detach().double(), expected.detach().double()
    assert float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)) < tolerance


def gradients(loss, hidden, head):
    return torch.autograd.grad(loss, [hidden, head.weight, head.bias], retain_graph=True)


@pytest.mark.parametrize("divergence", DECLARATIONS)
def test_equals_plain_torch(divergence):
    """Hidden states and logits, all reductions, other vocabularies, scales, soft-caps, biases, weights."""
    declared = DECLARATIONS[divergence].parameter
    given = {} if declared is None else {declared.name: MIXED[declared.name]}
    settings = dict(kd_ratio=0.7, temperature=1.8)
    for index, (student_ids, teacher_ids, form, teacher_form) in enumerate(FORMS):
        hidden, head, teacher_hidden, teacher_weight, labels = case(student_ids, teacher_ids, seed=index)
        weights = torch.rand(BATCH, LENGTH)
        student = plain_logits(hidden, head.weight, head.bias, **form)
        teacher = plain_logits(teacher_hidden, teacher_weight, **teacher_form)
        rows = plain_rows(
            student, teacher, shifted(labels), divergence=divergence,
            parameter=next(iter(given.values()), None), **settings,
        )  # fmt: skip
        mask = torch.where(shifted(labels) == -100, 0.0, torch.roll(weights, -1, dims=1)).double()
        upstream = torch.randn(BATCH, LENGTH, dtype=torch.float64)
        heads = dict(
            student_head=LMHead(head.weight, head.bias, **form),
            teacher_head=LMHead(teacher_weight, **teacher_form),
        )
        for reduction, expected in (
            ("mean", (mask * rows).sum() / (mask != 0).sum()),
            ("sum", (mask * rows).sum()),
            ("none", mask * rows),
        ):
            module = DistillationLoss(divergence, reduction=reduction, block_rows=4, **settings, **given)
            factor = upstream if reduction == "none" else torch.tensor(-1.3)
            wanted = gradients((factor * expected).sum(), hidden, head)
            for outputs in (
                module(hidden, teacher_hidden, labels=labels, loss_mask=weights, **heads),
                module(student, teacher, labels=labels, loss_mask=weights),
            ):
                assert outputs.loss.shape == expected.shape
                close(outputs.loss, expected)
                for found, right in zip(
                    gradients((factor * outputs.loss).sum(), hidden, head), wanted, strict=True
                ):
                    close(found, right)


def test_denominators_and_labels():
    """`num_items_in_batch` divides, `shift_labels` are aligned, kd_ratio 0 and 1 need less."""
    hidden, head, teacher_hidden, teacher_weight, labels = case()
    heads = dict(student_head=head, teacher_head=teacher_weight)
    total = DistillationLoss(reduction="sum")(hidden, teacher_hidden, labels=labels, **heads)
    for items in (40, torch.tensor(40), torch.tensor([[40]])):
        mean = DistillationLoss()(hidden, teacher_hidden, labels=labels, num_items_in_batch=items, **heads)
        close(mean.loss, total.loss / 40)
    aligned = DistillationLoss()(hidden, teacher_hidden, shift_labels=shifted(labels), **heads)
    close(aligned.loss, total.loss / total.num_loss_tokens)
    assert int(total.num_loss_tokens) == int((labels[:, 1:] != -100).sum())
    close(aligned.loss, 0.5 * aligned.ce + 0.5 * aligned.kd)
    close(aligned.top1_agreement * aligned.num_loss_tokens, total.top1_agreement)

    plain_ce = DistillationLoss(kd_ratio=0.0)(hidden, labels=labels, student_head=head)
    expected = nn.functional.cross_entropy(head(hidden).flatten(0, 1), shifted(labels).flatten())
    close(plain_ce.loss, expected)
    assert plain_ce.kd is None

    mask = (torch.rand(BATCH, LENGTH) < 0.5).float()
    only_kd = DistillationLoss(kd_ratio=1.0)(hidden, teacher_hidden, loss_mask=mask, **heads)
    rows = plain_rows(head(hidden), teacher_hidden @ teacher_weight.T, labels, kd_ratio=1.0)
    close(only_kd.loss, (mask * rows).sum() / mask.sum())
    assert only_kd.ce is None and only_kd.teacher_ce is None

    nothing = DistillationLoss()(hidden, teacher_hidden, labels=torch.full_like(labels, -100), **heads)
    assert nothing.loss.item() == 0.0
    assert all(torch.count_nonzero(one) == 0 for one in gradients(nothing.loss, hidden, head))


@pytest.mark.gpu
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd", "skewed_reverse_kl"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_equals_plain_torch_on_a_gpu(divergence, reduction):
    """fp32 through the kernels, with scales, soft-caps, biases and both orders of vocabulary sizes."""
    declared = DECLARATIONS[divergence].parameter
    parameter = None if declared is None else declared.default
    for index, (student_ids, teacher_ids, form, teacher_form) in enumerate(FORMS):
        hidden, head, teacher_hidden, teacher_weight, labels = case(student_ids, teacher_ids, seed=index)
        student = plain_logits(hidden, head.weight, head.bias, **form)
        teacher = plain_logits(teacher_hidden, teacher_weight, **teacher_form)
        rows = plain_rows(student, teacher, shifted(labels), divergence=divergence, parameter=parameter)
        expected = torch.where(shifted(labels) != -100, rows, 0.0)
        wanted = gradients(expected.sum(), hidden, head)
        own, states = (one.detach().float().cuda() for one in (hidden, teacher_hidden))
        own.requires_grad_()
        moved = nn.Linear(STUDENT, student_ids).cuda()
        moved.load_state_dict(head.state_dict())
        loss = DistillationLoss(divergence, reduction=reduction, block_rows=4)
        output = loss(
            own,
            states,
            labels=labels.cuda(),
            student_head=LMHead(moved.weight, moved.bias, **form),
            teacher_head=LMHead(teacher_weight.float().cuda(), **teacher_form),
        )
        close(output.loss.cpu(), expected if reduction == "none" else expected.sum(), 1e-4)
        for found, right in zip(gradients(output.loss.sum(), own, moved), wanted, strict=True):
            close(found.cpu(), right, 1e-4)
        plain = loss(student.detach().float().cuda(), teacher.float().cuda(), labels=labels.cuda())
        close(plain.loss.cpu(), expected if reduction == "none" else expected.sum(), 1e-4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bf16_and_autocast(reduction):
    """bf16 is near float64; under autocast fp32 weights get fp32 gradients from bf16 products."""
    module = DistillationLoss(reduction=reduction, fp32_logits=True)
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        hidden, head, teacher_hidden, teacher_weight, labels = case(dtype=dtype)
        inputs = hidden, teacher_hidden
        heads = dict(student_head=head, teacher_head=teacher_weight)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = module(*inputs, labels=labels, **heads)
        found = gradients(output.loss.sum(), hidden, head)
        assert output.loss.dtype == torch.float32 and [one.dtype for one in found] == [dtype] * 3
        exact = hidden.detach().double().requires_grad_(), nn.Linear(STUDENT, 70, dtype=torch.float64)
        exact[1].load_state_dict({name: value.double() for name, value in head.state_dict().items()})
        rows = plain_rows(
            exact[1](exact[0]), teacher_hidden.double() @ teacher_weight.double().T, shifted(labels)
        )
        kept = shifted(labels) != -100
        expected = torch.where(kept, rows, 0.0)
        expected = expected.sum() / kept.sum() if reduction == "mean" else expected
        close(output.loss, expected, 1e-2)
        for one, right in zip(found, gradients(expected.sum(), *exact), strict=True):
            error = torch.linalg.vector_norm(one.double() - right) / torch.linalg.vector_norm(right)
            assert error < 1e-2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_never_a_tensor_of_all_logits(reduction):
    hidden, head, teacher_hidden, teacher_weight, labels = case(900, 900, dtype=torch.float32)
    labels = labels.clamp(min=0)
    module = DistillationLoss("jsd", reduction=reduction, block_rows=5)
    with Recorder() as recorder:
        output = module(hidden, teacher_hidden, labels=labels, student_head=head, teacher_head=teacher_weight)
        output.loss.sum().backward()
    assert recorder.largest[torch.float32] <= max(5 * 900, 900 * TEACHER) < BATCH * LENGTH * 900
    assert hidden.grad is not None and head.weight.grad is not None


def test_frozen_head_and_evaluation():
    hidden, head, teacher_hidden, teacher_weight, labels = case()
    heads = dict(student_head=head.requires_grad_(False), teacher_head=teacher_weight)
    loss = DistillationLoss()(hidden, teacher_hidden, labels=labels, **heads).loss
    loss.backward()
    assert head.weight.grad is None and torch.count_nonzero(hidden.grad)
    with torch.no_grad():
        assert not DistillationLoss()(hidden, teacher_hidden, labels=labels, **heads).loss.requires_grad


def test_refuses_what_does_not_fit():
    hidden, head, teacher_hidden, teacher_weight, labels = case()
    heads = dict(student_head=head, teacher_head=teacher_weight)
    loss = DistillationLoss()
    for code, call in (
        ("value-unknown", lambda: DistillationLoss("hellinger")),
        ("value-unknown", lambda: DistillationLoss(reduction="batchmean")),
        ("remove-flag", lambda: DistillationLoss("forward_kl", jsd_beta=0.5)),
        ("out-of-range", lambda: DistillationLoss(kd_ratio=1.5)),
        ("add-flag", lambda: loss(hidden, teacher_hidden, **heads)),
        ("model-missing", lambda: loss(hidden, labels=labels, student_head=head)),
        ("exclude-each-other", lambda: loss(hidden, teacher_hidden, labels=labels, shift_labels=labels)),
        ("numbers-contradict", lambda: loss(hidden, teacher_hidden, labels=labels, student_head=head)),
        ("numbers-contradict", lambda: loss(hidden, teacher_hidden[:, 1:], labels=labels, **heads)),
        ("numbers-contradict", lambda: loss(hidden, teacher_hidden, labels=labels[:, 1:], **heads)),
        (
            "exclude-each-other",
            lambda: DistillationLoss(reduction="sum")(
                hidden, teacher_hidden, labels=labels, num_items_in_batch=3, **heads
            ),
        ),
        (
            "out-of-range",
            lambda: DistillationLoss(student_vocab_size=71)(hidden, teacher_hidden, labels=labels, **heads),
        ),
        ("model-feature-not-supported", lambda: LMHead.of(nn.Embedding(4, 4))),
        (
            "numbers-contradict",
            lambda: loss(hidden, teacher_hidden, labels=labels - labels.max() - 1, **heads),
        ),
    ):
        with refused(code, UsageError):
            call()


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "transformers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import torch
from mkd.losses import DistillationLoss, LMHead
hidden, head, teacher = torch.randn(2, 5, 8, requires_grad=True), torch.nn.Linear(8, 30), torch.randn(2, 5, 8)
labels = torch.randint(30, (2, 5))
for reduction in ("mean", "none"):
    loss = DistillationLoss("jsd", reduction=reduction)
    loss(hidden, teacher, labels=labels, student_head=head, teacher_head=head).loss.sum().backward()
    loss(head(hidden), head(teacher), labels=labels).loss.sum().backward()
print([name for name in sys.modules if name.partition(".")[0] in ("megatron", "transformers")])
"""


def test_a_second_derivative_is_an_error_and_not_zero():
    hidden, head, teacher_hidden, teacher_weight, labels = case()
    fused = dict(student_head=head, teacher_head=teacher_weight)
    logits = head(hidden).detach().requires_grad_(), teacher_hidden @ teacher_weight.T
    cases = [(hidden, (hidden, teacher_hidden), fused), (logits[0], logits, {})]
    for leaf, inputs, heads in cases:
        for reduction in ("mean", "none"):
            leaf.requires_grad_()
            loss = DistillationLoss(reduction=reduction)(*inputs, labels=labels, **heads).loss.sum()
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)  # allowed by itself
            with refused("exclude-each-other: cannot be differentiated again"):
                gradient.square().sum().backward()


def test_needs_no_megatron():
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
