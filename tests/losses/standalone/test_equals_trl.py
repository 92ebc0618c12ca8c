"""`DistillationLoss` against TRL's loss of GKD, where TRL is installed: `pip install trl`."""

from __future__ import annotations

import pytest
import torch

from mkd.losses import DistillationLoss
from tools.benchmarks.peers import PeerMissing, trl_jsd


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_equals_the_loss_of_gkd(beta):
    try:
        theirs = trl_jsd(beta)
    except PeerMissing as missing:
        pytest.skip(str(missing))
    torch.manual_seed(0)
    shapes = ((3, 17, 24), (331, 24), (3, 17, 40), (331, 40))
    hidden, head, teacher_hidden, teacher_head = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    trained, teacher_head = [hidden.requires_grad_(), head.requires_grad_()], teacher_head / 3
    labels = torch.randint(331, (3, 17))
    labels[0, :6] = labels[2] = -100
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    loss = DistillationLoss("jsd", jsd_beta=beta, kd_ratio=1.0, temperature_scaling="none")
    found = loss(hidden, teacher_hidden, labels=labels, student_head=head, teacher_head=teacher_head).loss
    wanted = theirs(hidden @ head.T, teacher_hidden @ teacher_head.T, targets)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0.0)
    for one, right in zip(*(torch.autograd.grad(one, trained) for one in (found, wanted)), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-12, atol=1e-13)
