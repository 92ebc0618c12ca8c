"""Measure what a rank holds after one step, beside what a plan predicts."""

from __future__ import annotations

from functools import partial

from mkd.plan.footprint.memory import GIB, predict_memory
from tests.train.invariance import Layout, microbatches


def held_bytes(layout: Layout, student, teacher):
    """Return (weights, gradients, optimizer state, teacher) of this rank after one step: held, predicted."""
    from mkd.config.load import load_config
    from mkd.parallel.context import ParallelContext
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.plan_run import plan_run
    from mkd.train.step import train_step

    plan = plan_run(load_config(layout.argv(student, teacher)).config, layout.ranks)
    context = ParallelContext.create(detect(), Sizes.of(plan.config.parallel), virtual_stages=layout.vp)
    engine, _ = build_engine(plan, context)
    train_step(engine, microbatches(layout, context, len(engine.teachers)))
    teachers = [teacher for chunk in engine.stages for teacher in chunk.module.teachers]
    learned = {p for chunk in engine.stages for p in chunk.parameters()}
    frozen = {p for chunk in teachers for p in chunk.parameters()}
    buffers = [
        buffer.grad_data
        for chunk in engine.stages
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    frozen_bytes = _bytes(frozen) if "peers" not in layout.flags else _streamed_bytes(teachers)
    held = (_bytes(learned), _bytes(buffers), optimizer_bytes(engine.optimizer.optimizer), frozen_bytes)
    predicted = predict_memory(plan.facts).ranks[context.pp_rank]
    parts = (predicted.student_gib, predicted.gradients_gib, predicted.optimizer_gib, predicted.teacher_gib)
    return held, [part * GIB for part in parts]


def _bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _streamed_bytes(teachers) -> int:
    """Return the bytes of a teacher's parts, its buffers, and what is whole: embedding, norm and head."""
    streams = {id(hook.func.__self__): hook.func.__self__ for hook in _layer_hooks(teachers)}
    (stream,) = streams.values()
    whole = [p for one in teachers for name, p in one.named_parameters() if ".layers." not in name]
    return stream.kept_bytes + stream.device_bytes + _bytes(whole)


def _layer_hooks(teachers):
    """Return the hooks of streams, which are partial functions."""
    layers = [layer for one in teachers for layer in one.decoder.layers]
    return [hook for one in layers for hook in one._forward_pre_hooks.values() if isinstance(hook, partial)]


def optimizer_bytes(optimizer) -> int:
    """Return the bytes of moments, and of the fp32 copies of bf16 weights."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    moments = [
        t
        for part in parts
        for state in part.optimizer.state.values()
        for t in state.values()
        if t.numel() > 1
    ]
    names = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")
    groups = [group for part in parts for name in names for group in getattr(part, name, ())]
    return _bytes(moments) + _bytes(weight for group in groups for weight in group)
