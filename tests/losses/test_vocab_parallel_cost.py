"""The vocabulary-parallel loss has no extra collective, no wait for the device and no big temporary.

The errors for its arguments are here too.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mkd.errors import UsageError
from mkd.losses import KDObjective, torch_rows, vocab_parallel_kd
from tests.losses.objectives import objective_of
from tests.reported import refused

ROWS, WIDTH = 64, 96


class Recorder(TorchDispatchMode):
    """Records the operators that run, and the largest tensor made per dtype.

    Operators that would wait for a device are recorded separately.
    """

    def __init__(self):
        super().__init__()
        self.collectives: list[str] = []
        self.waits: list[str] = []
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith(("c10d.", "_c10d_functional.")):
            self.collectives.append(name)
        if name.startswith(
            ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero")
        ):
            self.waits.append(name)
        if name.startswith("aten.index") and self._indexes_by_mask(args):
            self.waits.append(name)
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            self.largest[result.dtype] = max(self.largest.get(result.dtype, 0), result.numel())
        return result

    @staticmethod
    def _indexes_by_mask(args) -> bool:
        indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
        return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(2))
    labels = torch.randint(80, (ROWS,), generator=generator)
    return student.requires_grad_(), teacher, labels, (torch.rand(ROWS, generator=generator) < 0.5).float()


def record(group, dtype=torch.float32, **settings):
    """Return (recorder of the forward pass, recorder of the backward pass)."""
    sizes = dict(student_vocab_size=80, teacher_vocab_size=90)
    arguments = tensors(dtype)
    with Recorder() as forward:
        output = vocab_parallel_kd(*arguments, objective_of(**sizes, **settings), tp_group=group)
    with Recorder() as backward:
        output.loss.backward()
    return forward, backward


def collectives(settings):
    forward, backward = record(dist.group.WORLD, **settings)
    return forward.collectives, backward.collectives


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_one_all_gather_forward_and_nothing_backward(ranks, ratio, temperature):
    for forward, backward in ranks.run(collectives, 2, dict(kd_ratio=ratio, temperature=temperature)):
        assert forward == ["c10d._allgather_base_.default"]
        assert backward == []


def test_no_collective_without_tensor_parallelism(ranks):
    assert ranks.run(collectives, 1, {}) == [([], [])]


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_nothing_waits_for_the_device(ratio, temperature):
    for recorder in record(None, kd_ratio=ratio, temperature=temperature):
        assert recorder.waits == []


def test_the_recorder_sees_waits():
    values = torch.arange(3.0)
    with Recorder() as recorder:
        values.sum().item()
        values[values > 1]
    assert len(recorder.waits) == 2


def test_no_full_size_copy_in_the_compute_dtype(monkeypatch):
    monkeypatch.setattr(torch_rows, "CPU_BLOCK_BYTES", 8 * WIDTH * 4)
    for recorder in record(None, torch.bfloat16, temperature=2.5):
        assert recorder.largest[torch.float32] <= 8 * WIDTH
        assert recorder.largest.get(torch.bfloat16, 0) <= ROWS * WIDTH


def backward(overwrite):
    leaf, teacher, labels, mask = tensors(torch.bfloat16)
    logits = leaf * 1.0
    before = logits.detach().clone()
    caught = []
    logits.register_hook(caught.append)
    sizes = dict(student_vocab_size=80, teacher_vocab_size=90)
    output = vocab_parallel_kd(
        logits, teacher, labels, mask, KDObjective(**sizes), tp_group=None, overwrite_student_logits=overwrite
    )
    output.loss.backward(retain_graph=True)
    return logits, before, caught[0], output


def test_gradient_over_the_logits_when_allowed():
    logits, before, gradient, _ = backward(overwrite=False)
    assert torch.equal(logits, before)
    overwritten, _, same, output = backward(overwrite=True)
    assert torch.equal(same, gradient)
    assert same.data_ptr() == overwritten.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.loss.backward()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (dict(kd_ratio=1.5), "out-of-range: kd-ratio is"),
        (dict(temperature=0.0), "out-of-range: choose a finite value above 0"),
        (dict(temperature=float("nan")), "out-of-range: choose a finite value above 0"),
        (dict(temperature_scaling="cubed"), "value-unknown"),
        (dict(student_vocab_size=500), "out-of-range: the logits have"),
        (dict(teacher_vocab_size=97), "out-of-range: the logits have"),
        (dict(student_vocab_size=0), "out-of-range: the logits have"),
        (dict(teacher_vocab_size=None), "model-missing: but there are no teacher logits"),
    ],
)
def test_settings_that_make_no_loss_are_refused(settings, code):
    settings = dict(student_vocab_size=80, teacher_vocab_size=90) | settings
    with refused(code, UsageError):
        vocab_parallel_kd(*tensors(), KDObjective(**settings), tp_group=None)


def test_missing_teacher():
    student, _, labels, mask = tensors()
    with refused("model-missing: but there are no teacher logits", UsageError):
        vocab_parallel_kd(student, None, labels, mask, KDObjective(80, 90), tp_group=None)


def test_broken_invariants():
    student, teacher, labels, mask = tensors()
    settings = dict(objective=KDObjective(80, 90), tp_group=None)
    with pytest.raises(AssertionError):
        vocab_parallel_kd(student, teacher[:, :90], labels, mask, **settings)
    with pytest.raises(AssertionError):
        vocab_parallel_kd(student, teacher.clone().requires_grad_(), labels, mask, **settings)
    with pytest.raises(AssertionError):
        vocab_parallel_kd(student, teacher, labels[1:], mask, **settings)
    with pytest.raises(AssertionError):
        vocab_parallel_kd(student, teacher, labels, mask[1:], **settings)
