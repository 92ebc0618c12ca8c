"""The dense reference against numbers worked out by hand, since every other loss test leans on it."""

from __future__ import annotations

import math

import pytest
import torch

from mkd.losses import KDObjective
from mkd.losses.dense_reference import dense_kd

# Probabilities over two shared ids and one id of the student alone: the teacher says (3/4, 1/4), the student
# (1/4, 1/4, 1/2), hence (1/2, 1/2) over the shared ids. Columns beyond are padding.
TEACHER = torch.tensor([[3.0, 1.0, 7.0, 7.0]]).log()
STUDENT = torch.tensor([[1.0, 1.0, 2.0, 9.0]]).log()
KL = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)


def run(student=STUDENT, teacher=TEACHER, label=1, mask=1.0, **settings):
    student = student.clone().requires_grad_()
    sizes = dict(student_vocab_size=3, teacher_vocab_size=2)
    output = dense_kd(
        student, teacher, torch.tensor([label]), torch.tensor([mask]), KDObjective(**sizes, **settings)
    )
    output.loss.backward()
    return output, student.grad[0].tolist()


def test_parts():
    output, gradient = run(kd_ratio=0.5)
    assert output.ce.item() == pytest.approx(math.log(4))
    assert output.kd.item() == pytest.approx(KL)
    assert output.loss.item() == pytest.approx(0.5 * math.log(4) + 0.5 * KL)
    assert output.teacher_ce.item() == pytest.approx(math.log(4))
    assert output.teacher_entropy.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert output.num_loss_tokens == 1
    ce, kd = [0.25, -0.75, 0.5, 0.0], [-0.25, 0.25, 0.0, 0.0]
    assert gradient == pytest.approx([0.5 * a + 0.5 * b for a, b in zip(ce, kd, strict=True)], abs=1e-7)


@pytest.mark.parametrize(("scaling", "scale"), [("squared", 4.0), ("none", 1.0)])
def test_temperature(scaling, scale):
    output, gradient = run(
        teacher=2 * TEACHER, student=2 * STUDENT, kd_ratio=1.0, temperature=2.0, temperature_scaling=scaling
    )
    assert output.kd.item() == pytest.approx(scale * KL)
    assert gradient == pytest.approx([-0.25 * scale / 2, 0.25 * scale / 2, 0.0, 0.0])


def test_mask_weighs_and_zero_hides_anything():
    output, gradient = run(kd_ratio=0.5, mask=3.0)
    assert output.ce.item() == pytest.approx(3 * math.log(4))
    output, gradient = run(student=STUDENT * math.nan, kd_ratio=0.5, mask=0.0, label=-100)
    assert output.loss == output.num_loss_tokens == 0
    assert gradient == [0.0] * 4


def test_top1_agreement():
    assert run()[0].top1_agreement == 1  # the student's two shared ids tie
    assert run(student=torch.tensor([[0.0, 1.0, 0.0, 0.0]]))[0].top1_agreement == 0
