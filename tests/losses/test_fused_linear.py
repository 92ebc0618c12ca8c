"""The fused head against the dense float64 reference on full logits.

Values and the gradients of hidden states and head are compared.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mkd.config.divergence import DIVERGENCES
from mkd.losses import HeadInput, fused_linear_kd, vocab_parallel_kd
from mkd.losses.dense_reference import dense_kd
from mkd.platform import detect
from tests.losses.objectives import MIXED, objective_of
from tests.losses.test_vocab_parallel import assert_close, values
from tests.losses.test_vocab_parallel_cost import Recorder

ROWS, STUDENT_SIZE, TEACHER_SIZE, PADDED = 24, 12, 20, 320
BOTH = dict(student_vocab_size=300, teacher_vocab_size=310)


def problem(dtype=torch.float64, mask="random", seed=0):
    """Return (student hidden, student head, teacher hidden, teacher head, labels, mask)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((ROWS, STUDENT_SIZE), (PADDED, STUDENT_SIZE), (ROWS, TEACHER_SIZE), (PADDED, TEACHER_SIZE))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    uniform = torch.rand(ROWS, generator=generator)
    weight = {
        "random": (uniform < 0.6).float(),
        "none": torch.zeros(ROWS),
        "weights": uniform * (uniform < 0.6),
    }[mask]
    return *tensors, torch.randint(300, (ROWS,), generator=generator), weight


def expected(hidden, weight, teacher_hidden, teacher_weight, labels, mask, **settings):
    """Return values and gradients of (hidden, weight), float64, whole vocabulary."""
    hidden, weight = (t.double().requires_grad_() for t in (hidden, weight))
    output = dense_kd(
        hidden @ weight.T,
        teacher_hidden.double() @ teacher_weight.double().T,
        labels,
        mask,
        objective_of(**settings),
    )
    output.loss.backward()
    return values(output), hidden.grad, weight.grad


def heads_of(hidden, weight, teacher_hidden, teacher_weight, labels, mask):
    """Return the positional arguments of `fused_linear_kd` before the objective."""
    return HeadInput(hidden, weight), [HeadInput(teacher_hidden, teacher_weight)], labels, mask


def on_rank(case, settings, compact, sequence_parallel, factor):
    """Return one rank's values, gradient of its hidden states and gradient of its head rows.

    The hidden states are its part of the sequence.
    """
    detect()  # Megatron's mappings of sequence parallelism name CUDA
    hidden, weight, teacher_hidden, teacher_weight, labels, mask = case
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if sequence_parallel:
        hidden, teacher_hidden = hidden.chunk(size)[rank], teacher_hidden.chunk(size)[rank]
    hidden, weight = (t.clone().requires_grad_() for t in (hidden, weight.chunk(size)[rank]))
    output = fused_linear_kd(
        HeadInput(hidden, weight),
        [HeadInput(teacher_hidden, teacher_weight.chunk(size)[rank])],
        labels,
        mask,
        objective_of(**settings),
        tp_group=group,
        sequence_parallel=sequence_parallel,
        loss_rows=mask.nonzero().squeeze(1) if compact else None,
        block_rows=5,
    )
    (factor * output.loss).backward()
    return {k: v.detach() for k, v in values(output).items()}, hidden.grad, weight.grad


def assert_equals_reference(results, wanted, sequence_parallel, factor, tolerance):
    wanted_values, wanted_hidden, wanted_weight = wanted
    for got, _, _ in results:
        for name, value in got.items():
            assert_close(value, wanted_values[name], tolerance)
    if sequence_parallel:
        assert_close(torch.cat([h for _, h, _ in results]), factor * wanted_hidden, tolerance)
    else:
        for _, hidden, _ in results:
            assert_close(hidden, factor * wanted_hidden, tolerance)
    assert_close(torch.cat([w for _, _, w in results]), factor * wanted_weight, tolerance)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_equals_dense_reference(ranks, tp, divergence, temperature):
    settings = dict(BOTH, **MIXED, divergence=divergence, temperature=temperature)
    for seed, (dtype, tolerance, mask) in enumerate(
        ((torch.float64, 1e-11, "weights"), (torch.float32, 1e-5, "random"))
    ):
        for compact, sequence_parallel in ((False, False), (True, True)):
            case = problem(dtype, mask, seed)
            results = ranks.run(on_rank, tp, case, settings, compact, sequence_parallel, 3.0)
            assert_equals_reference(results, expected(*case, **settings), sequence_parallel, 3.0, tolerance)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_ends_of_the_mix(ranks, ratio):
    case, settings = problem(), dict(BOTH, kd_ratio=ratio)
    results = ranks.run(on_rank, 2, case, settings, True, False, 1.0)
    assert_equals_reference(results, expected(*case, **settings), False, 1.0, 1e-11)
    if ratio == 0.0:
        assert results[0][0].keys() == {"loss", "ce", "num_loss_tokens", "plain_ce"}


def test_no_loss_token_is_zero_with_a_graph(ranks):
    for compact in (False, True):
        for got, hidden, weight in ranks.run(on_rank, 2, problem(mask="none"), BOTH, compact, False, 1.0):
            assert all(value == 0 for value in got.values())
            assert torch.count_nonzero(hidden) == torch.count_nonzero(weight) == 0


def with_main_grad(case, shared):
    """Return a loss whose factor is known in forward.

    Its weight has an fp32 buffer, as under Megatron's DDP.
    """
    hidden, weight, teacher_hidden, teacher_weight, labels, mask = case
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    weight.main_grad = torch.ones(weight.shape)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = shared
    scale = torch.tensor(0.25)
    output = fused_linear_kd(
        HeadInput(hidden, weight),
        [HeadInput(teacher_hidden, teacher_weight)],
        labels,
        mask,
        objective_of(**BOTH),
        tp_group=None,
        loss_gradient=scale,
        block_rows=7,
    )
    return output.loss, scale, hidden, weight


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adds_the_weight_gradient_to_main_grad(dtype, shared):
    case = problem(dtype)
    loss, scale, hidden, weight = with_main_grad(case, shared)
    (loss * scale).backward()
    _, wanted_hidden, wanted_weight = expected(*case, **BOTH)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_close(hidden.grad, 0.25 * wanted_hidden, tolerance)
    assert_close(weight.main_grad - 1.0, 0.25 * wanted_weight, tolerance)
    assert weight.grad is not None, "DDP's hook of overlapped reduction wants one"
    assert weight.grad_added_to_main_grad is not shared
    if shared:
        assert torch.count_nonzero(weight.grad) == 0, "DDP adds it to the buffer, with the embedding's"


def test_another_factor_than_announced_fails():
    loss, scale, _, _ = with_main_grad(problem(torch.float32), False)
    with pytest.raises(RuntimeError):
        (loss * scale * 2).backward()


def test_evaluation_makes_no_gradient():
    case = problem()
    wanted = expected(*case, **BOTH)[0]
    with torch.no_grad(), Recorder() as recorder:
        output = fused_linear_kd(*heads_of(*case), objective_of(**BOTH), tp_group=None)
    assert not output.loss.requires_grad
    assert_close(output.loss, wanted["loss"], 1e-11)
    assert recorder.largest[torch.float64] <= ROWS * PADDED


def test_fp32_logits_of_bf16_states():
    """bf16 states with fp32 logits are as exact as the states themselves; bf16 logits are not."""
    case = problem(torch.bfloat16)
    wanted = expected(*case, **BOTH)[0]["kd"]
    errors = {}
    for fp32_logits in (False, True):
        output = fused_linear_kd(
            *heads_of(*case), objective_of(**BOTH), tp_group=None, fp32_logits=fp32_logits
        )
        errors[fp32_logits] = abs(float(output.kd - wanted) / float(wanted))
    assert errors[True] < 1e-5 < errors[False]


def counted_collectives(case, divergence):
    hidden, weight, teacher_hidden, teacher_weight, labels, mask = case
    group, rank = dist.group.WORLD, dist.get_rank()
    hidden, weight = hidden.clone().requires_grad_(), weight.chunk(2)[rank].clone().requires_grad_()
    with Recorder() as forward:
        output = fused_linear_kd(
            HeadInput(hidden, weight),
            [HeadInput(teacher_hidden, teacher_weight.chunk(2)[rank])],
            labels,
            mask,
            objective_of(divergence=divergence, **BOTH),
            tp_group=group,
            block_rows=ROWS // 3,
        )
    with Recorder() as backward:
        output.loss.backward()
    return forward, backward


def collectives(case, divergence):
    forward, backward = counted_collectives(case, divergence)
    return forward.collectives, backward.collectives, forward.waits + backward.waits


def test_collectives_of_a_chunk(ranks):
    gather, reduce = "c10d._allgather_base_.default", "c10d.allreduce_.default"
    for forward, backward, waits in ranks.run(collectives, 2, problem(), "forward_kl"):
        assert forward == [gather] * 3
        assert backward == [reduce]
        assert waits == []
    for forward, _, _ in ranks.run(collectives, 2, problem(), "jsd"):
        assert forward == [gather, reduce] * 3


def test_never_a_tensor_of_all_logits():
    case = problem(torch.float32)
    hidden, weight = case[0].clone().requires_grad_(), case[1].clone().requires_grad_()
    with Recorder() as recorder:
        arguments = *heads_of(hidden, weight, *case[2:]), objective_of(**BOTH)
        fused_linear_kd(*arguments, tp_group=None, block_rows=6).loss.backward()
    assert recorder.largest[torch.float32] == max(6 * PADDED, weight.numel(), TEACHER_SIZE * PADDED)


def test_same_result_as_the_loss_on_logits():
    """Both are bitwise equal if one block holds all rows.

    The fused head makes the same passes in another order.
    """
    case = problem(torch.float32)
    hidden, weight, teacher_hidden, teacher_weight, labels, mask = case
    fused = fused_linear_kd(*heads_of(*case), objective_of(**BOTH), tp_group=None)
    plain = vocab_parallel_kd(
        hidden @ weight.T,
        teacher_hidden @ teacher_weight.T,
        labels,
        mask,
        objective_of(**BOTH),
        tp_group=None,
    )
    assert all(torch.equal(values(fused)[name], value) for name, value in values(plain).items())
