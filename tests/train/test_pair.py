"""Check the pair on one schedule: messages, what the teacher leaves behind, and the limits of kd_ratio."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from tests.tiny_models import make_model
from tests.train.invariance import NOT_AHEAD, NUM_PACKS, SEQ_LENGTH, Layout, build_layout, make_pair
from tests.train.moe_invariance import EP2, MOVED, make_latent_pair

STUDENT_WIDTH, TEACHER_WIDTH = 48, 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


def step(engine, batches):
    from mkd.train.step import train_step

    return train_step(engine, batches)


def sent_elements(layout, student, teacher):
    """Return (elements sent to the next stage, to the previous one) by this rank in one step.

    The teacher is not ahead, so that its states travel with the student's.
    """
    engine, _, batches = build_layout(layout, layout.with_flags(NOT_AHEAD).argv(student, teacher))
    communicator = engine.schedule.communicator
    sent = {communicator.next_rank: 0, communicator.prev_rank: 0}
    original = dist.P2POp

    class Counted(original):
        def __new__(cls, op, tensor, peer, group):
            if op is dist.isend:
                sent[peer] += tensor.numel()
            return original(op, tensor, peer, group)

    dist.P2POp = Counted
    try:
        step(engine, batches)
    finally:
        dist.P2POp = original
    return sent[communicator.next_rank], sent[communicator.prev_rank]


@pytest.mark.parametrize(
    "tp, flags",
    [
        pytest.param(1, (), id="TP1"),
        pytest.param(2, ("--sequence-parallel",), id="TP2 SP", marks=pytest.mark.slow),
    ],
)
def test_what_is_on_the_wire(tp, flags, pair, ranks):
    """Forward sends T * (h_s + h_t), over tp with sequence parallelism; backward T * h_s.

    With PP4 both neighbours are different.
    """
    layout = Layout("wire", 4 * tp, tp=tp, pp=4, flags=flags)
    results = ranks.run(sent_elements, layout.ranks, layout, *pair)
    tokens = NUM_PACKS * SEQ_LENGTH // (tp if flags else 1)
    for rank, (forward, backward) in enumerate(results):
        stage = rank // tp
        assert forward == (tokens * (STUDENT_WIDTH + TEACHER_WIDTH) if stage < 3 else 0)
        assert backward == (tokens * STUDENT_WIDTH if stage > 0 else 0)


def teacher_traces(layout, student, teacher):
    """Return what three steps and an evaluation do to the teacher.

    Return also which of its tensors are alive on the last stage between them.
    """
    from mkd.evaluation.evaluate import evaluate

    engine, state, batches = build_layout(layout, layout.argv(student, teacher))
    teachers = [teacher for chunk in engine.stages for teacher in chunk.module.teachers]

    def state_hash():
        digest = hashlib.sha256()
        for model in teachers:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                digest.update(name.encode() + tensor.numpy().tobytes())
            if model.router_record is not None:
                digest.update(model.router_record.sums.numpy().tobytes())
        return digest.hexdigest()

    before, rng = state_hash(), torch.get_rng_state()
    for _ in range(3):
        step(engine, batches)
    evaluate(engine, [batches])
    parameters = {id(p) for model in teachers for p in model.parameters()}
    in_buffers = {id(p) for chunk in engine.stages for buffer in chunk.buffers for p in buffer.params}
    in_optimizer = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
    return {
        "state changed": state_hash() != before,
        "rng touched": not torch.equal(torch.get_rng_state(), rng),
        "gradients": sum(
            p.grad is not None or p.requires_grad for model in teachers for p in model.parameters()
        ),
        "in buffers": len(parameters & in_buffers),
        "in optimizer": len(parameters & in_optimizer),
        "in modules": sum("teacher" in name for chunk in engine.stages for name, _ in chunk.named_modules()),
        "state alive": sum(model.decoder.input_tensor is not None for model in teachers),
    }


@pytest.mark.parametrize(
    "layout", [Layout("one"), Layout("PP2 VPP2", 2, pp=2, vp=2)], ids=lambda layout: layout.name
)
def test_the_teacher_is_a_guest(layout, pair, ranks):
    for traces in ranks.run(teacher_traces, layout.ranks, layout, *pair):
        assert not any(traces.values()), traces


def test_a_teacher_with_experts_is_a_guest(ranks, tmp_path):
    """Its correction biases and counters stay, while the student's biases move."""
    layout = Layout("EP2", 2, flags=EP2 + MOVED)
    for traces in ranks.run(teacher_traces, 2, layout, *make_latent_pair(tmp_path)):
        assert not any(traces.values()), traces


def peak_teacher_states(layout, student, teacher):
    """Return the most final hidden states of the teacher alive at once on the last stage of a step.

    The teacher is not ahead.
    """
    import weakref

    engine, _, batches = build_layout(layout, layout.with_flags(NOT_AHEAD).argv(student, teacher))
    if not engine.context.holds_last_stage:
        step(engine, batches)
        return 0
    last = engine.stages[-1].module.teachers[0]
    alive, peak = weakref.WeakSet(), []
    forward = type(last).forward

    def watched(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if self is last:
            alive.add(output)
            peak.append(len(alive))
        return output

    type(last).forward = watched
    try:
        step(engine, batches)
    finally:
        type(last).forward = forward
    return max(peak)


@pytest.mark.parametrize(
    "layout",
    [Layout("one"), Layout("PP2", 2, pp=2), Layout("PP2 VPP2", 2, pp=2, vp=2)],
    ids=lambda layout: layout.name,
)
def test_one_microbatch_of_teacher_state(layout, pair, ranks):
    assert max(ranks.run(peak_teacher_states, layout.ranks, layout, *pair)) == 1


def one_step(layout, student, teacher, *more):
    """Return sums and gradients (by parameter) of one step."""
    engine, _, batches = build_layout(layout, [*layout.argv(student, teacher), *more])
    result = step(engine, batches)
    gradients = {name: p.main_grad.clone() for name, p in engine.stages[0].named_parameters()}
    return result, gradients, not engine.stages[0].module.teachers


def test_ratio_0_is_plain_fine_tuning(pair, ranks, tmp_path):
    """The teacher is not built, and another teacher changes no bit."""
    student, teacher = pair
    other = make_model(tmp_path / "other", "qwen2", seed=9)
    (a, gradients_a, no_teacher), (b, gradients_b, _) = (
        ranks.run(one_step, 1, Layout("sft"), student, t, "--kd-ratio", "0")[0] for t in (teacher, other)
    )
    assert (
        no_teacher
        and a.sums == b.sums
        and a.sums.token_sums()["kd"] == 0
        and a.sums.token_sums()["loss"] == a.sums.ce
    )
    assert all(torch.equal(gradients_a[name], gradients_b[name]) for name in gradients_a)


def test_ratio_1_has_no_cross_entropy(pair, ranks):
    ((result, gradients, _),) = ranks.run(one_step, 1, Layout("kd"), *pair, "--kd-ratio", "1")
    sums = result.sums.token_sums()
    assert sums["ce"] == 0 and sums["loss"] == sums["kd"] > 0
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("layout", [Layout("one"), Layout("TP2", 2, tp=2)], ids=lambda layout: layout.name)
def test_a_teacher_equal_to_the_student_teaches_nothing(layout, pair, ranks):
    student, _ = pair
    result, gradients, _ = ranks.run(one_step, layout.ranks, layout, student, student, "--kd-ratio", "1")[0]
    assert 0 <= result.sums.kd_mean < 1e-6
    assert max(gradient.abs().max() for gradient in gradients.values()) < 1e-7
