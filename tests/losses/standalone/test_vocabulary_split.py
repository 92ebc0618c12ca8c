"""`DistillationLoss` on ranks: vocabulary shards, DTensors, FSDP2 and DDP against one process.

Everything is float64, on CPUs with gloo and on GPUs with NCCL.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mkd.losses import DistillationLoss, LMHead
from tests.losses.standalone.plain_loss import plain_logits, plain_rows
from tests.ranks import skip_unless_gpus_take

ROWS, STUDENT, TEACHER = 18, 12, 20
SETTINGS = dict(divergence="jsd", parameter=0.5, kd_ratio=0.6, temperature=1.5)
FORM = dict(scale=0.7, logits_cap=4.0)


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def case(student_ids, teacher_ids):
    """Return (hidden, weight, bias, teacher hidden, teacher weight, labels), the same on every rank."""
    generator = torch.Generator().manual_seed(3)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(device())

    labels = torch.randint(0, min(student_ids, teacher_ids), (ROWS,), generator=generator).to(device())
    labels[:4] = -100
    return (
        normal(ROWS, STUDENT),
        normal(student_ids, STUDENT),
        normal(student_ids),
        normal(ROWS, TEACHER),
        normal(teacher_ids, TEACHER) / 3,
        labels,
    )


def expected(hidden, weight, bias, teacher_hidden, teacher_weight, labels):
    """Return (row losses, gradients of their sum by hidden, weight and bias) on one process."""
    leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
    student = plain_logits(*leaves, **FORM)
    rows = plain_rows(student, teacher_hidden @ teacher_weight.T, labels, **SETTINGS)
    rows = torch.where(labels != -100, rows, 0.0)
    return rows.detach(), torch.autograd.grad(rows.sum(), leaves)


def module(**settings):
    return DistillationLoss("jsd", kd_ratio=0.6, temperature=1.5, block_rows=5, **settings)


def assert_close(found, right):
    found = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def plain_group(ids):
    """Local tensors under a group: the vocabulary in Megatron's layout."""
    hidden, weight, bias, teacher_hidden, teacher_weight, labels = whole = case(ids, ids)
    rows, right = expected(*whole)
    rank, group = dist.get_rank(), dist.group.WORLD
    for reduction in ("sum", "none"):
        leaves = [hidden.clone(), weight.chunk(2)[rank].clone(), bias.chunk(2)[rank].clone()]
        leaves = [one.requires_grad_() for one in leaves]
        loss = module(reduction=reduction, tp_group=group)
        heads = dict(student_head=LMHead(*leaves[1:], **FORM), teacher_head=teacher_weight.chunk(2)[rank])
        output = loss(leaves[0], teacher_hidden, shift_labels=labels, **heads)
        logits = loss(
            plain_logits(*leaves, **FORM),
            teacher_hidden @ teacher_weight.chunk(2)[rank].T,
            shift_labels=labels,
        )
        for one in (output, logits):
            assert_close(one.loss, rows if reduction == "none" else rows.sum())
        found = torch.autograd.grad(output.loss.sum(), leaves)
        local = [right[0], right[1].chunk(2)[rank], right[2].chunk(2)[rank]]
        for one, wanted in zip(found, local, strict=True):
            assert_close(one, wanted)
        for one, wanted in zip(torch.autograd.grad(logits.loss.sum(), leaves[1:]), local[1:], strict=True):
            assert_close(one, wanted)


def dtensors_over_the_vocabulary(student_ids, teacher_ids):
    """DTensor heads and logits over a mesh: shards of unequal width, a teacher with other shards."""
    hidden, weight, bias, teacher_hidden, teacher_weight, labels = whole = case(student_ids, teacher_ids)
    rows, right = expected(*whole)
    mesh = init_device_mesh(device(), (2,), mesh_dim_names=("tp",))
    loss = module(reduction="sum", tp_group=mesh)
    for teacher_placement in (Shard(0), Replicate()):
        own_weight, own_bias = (
            distribute_tensor(one, mesh, [Shard(0)]).requires_grad_() for one in (weight, bias)
        )
        sequence = distribute_tensor(hidden, mesh, [Shard(0)]).requires_grad_()
        output = loss(
            sequence,
            distribute_tensor(teacher_hidden, mesh, [Replicate()]),
            shift_labels=labels,
            student_head=LMHead(own_weight, own_bias, **FORM),
            teacher_head=distribute_tensor(teacher_weight, mesh, [teacher_placement]),
        )
        assert_close(output.loss, rows.sum())
        output.loss.backward()
        for one, wanted in zip((sequence, own_weight, own_bias), right, strict=True):
            assert one.grad.placements == one.placements
            assert_close(one.grad, wanted)

    # without tp_group the same heads are gathered, and gradients are right too
    own_weight, own_bias = (
        distribute_tensor(one, mesh, [Shard(0)]).requires_grad_() for one in (weight, bias)
    )
    whole_hidden, heads = hidden.clone().requires_grad_(), LMHead(own_weight, own_bias, **FORM)
    gathered = module(reduction="sum")(
        whole_hidden, teacher_hidden, shift_labels=labels, student_head=heads, teacher_head=teacher_weight
    )
    gathered.loss.backward()
    for one, wanted in zip((whole_hidden, own_weight, own_bias), right, strict=True):
        assert_close(one.grad, wanted)

    logits = plain_logits(hidden, weight, bias, **FORM).requires_grad_()
    (wanted,) = torch.autograd.grad(
        torch.where(
            labels != -100, plain_rows(logits, teacher_hidden @ teacher_weight.T, labels, **SETTINGS), 0.0
        ).sum(),
        logits,
    )
    own = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    teacher = distribute_tensor(teacher_hidden @ teacher_weight.T, mesh, [Shard(1)])
    loss(own, teacher, shift_labels=labels).loss.backward()
    assert_close(own.grad, wanted)


class Student(nn.Module):
    """A trunk and a head, as a causal language model has them."""

    def __init__(self, weight, bias):
        super().__init__()
        self.trunk = nn.Linear(STUDENT, STUDENT, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.trunk.weight.copy_(torch.eye(STUDENT, dtype=torch.float64))
        self.head = nn.Linear(STUDENT, len(weight), dtype=torch.float64)
        self.head.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, hidden):
        return self.trunk(hidden)


def data_parallel(wrapping):
    """Ranks with rows of their own: gradients are the mean over ranks, as FSDP2 and DDP make it."""
    hidden, weight, bias, teacher_hidden, teacher_weight, labels = whole = case(71, 75)
    rows, right = expected(*whole)
    rank, mesh = dist.get_rank(), init_device_mesh(device(), (2,))
    mine = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    model = Student(weight, bias).to(device())
    teacher_head = distribute_tensor(teacher_weight, mesh, [Shard(0)])
    if wrapping == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        if wrapping == "fsdp2 head apart":
            fully_shard(model.head, mesh=mesh)
        fully_shard(model.trunk, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    for _ in range(2):  # again, with the parameters back in shards
        model.zero_grad()
        output = module(reduction="sum")(
            wrapped(hidden[mine]),
            teacher_hidden[mine],
            shift_labels=labels[mine],
            student_head=LMHead(model.head.weight, model.head.bias, **FORM),
            teacher_head=teacher_head,
        )
        assert_close(output.loss, rows[mine].sum())
        output.loss.backward()
        for parameter, wanted in ((model.head.weight, right[1]), (model.head.bias, right[2])):
            assert_close(parameter.grad, wanted / 2)
        assert_close(model.trunk.weight.grad, right[0].T @ hidden / 2)


CASES = {
    "plain group": (plain_group, 70),
    "dtensors, even": (dtensors_over_the_vocabulary, 70, 70),
    "dtensors, uneven": (dtensors_over_the_vocabulary, 71, 71),
    "dtensors, larger teacher": (dtensors_over_the_vocabulary, 71, 78),
    "dtensors, smaller teacher": (dtensors_over_the_vocabulary, 78, 71),
    "ddp": (data_parallel, "ddp"),
    "fsdp2": (data_parallel, "fsdp2"),
    "fsdp2 head apart": (data_parallel, "fsdp2 head apart"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(ranks, name):
    function, *arguments = CASES[name]
    ranks.run(function, 2, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_on_gpus(gpu_ranks, name):
    skip_unless_gpus_take(2)
    function, *arguments = CASES[name]
    gpu_ranks.run(function, 2, *arguments)
