"""Run LoRA students of the invariance table: gradients and adapters as PEFT folders, the merged student."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.train.invariance import Layout, build_layout, export_student, gradients_as_parameters
from tests.train.sides_run import microbatches, serve, start_side, student_engine
from tests.train.vision_invariance import vision_batches

RANK = 4
ALPHA = 10.0
LORA = ("--lora-rank", str(RANK), "--lora-alpha", str(ALPHA))


def run_lora(
    layout: Layout, student: Path, teacher: Path, out_dir: Path, num_updates: int = 2, images: bool = False
) -> dict:
    """Run one step from random adapters and some updates on this rank; return sums and sizes.

    Write gradients, updated adapters and the merged student to `out_dir`.
    """
    engine, state, batches = build_layout(layout, layout.with_flags(LORA).argv(student, teacher))
    if images:
        batches = vision_batches(layout, engine.context, state.models[0].shape.vision)
    return measure_lora(engine, state, batches, student, out_dir, num_updates)


def run_lora_sides(
    layout: Layout, student: Path, teacher: Path, flags: Sequence[str], folder: Path, out_dir: Path
) -> dict | None:
    """Return `run_lora` of a student whose teacher has processes of its own; None on these."""
    launch, plan, side = start_side([*layout.with_flags(LORA).argv(student, teacher), *flags], folder)
    if side.teacher is not None:
        return serve(launch, plan, side) and None
    engine, state, context = student_engine(launch, plan, side)
    found = measure_lora(engine, state, microbatches(layout, context, 1, (0,)), student, out_dir)
    engine.schedule.remote[0].stop(0)
    return found


def measure_lora(engine, state, batches: list, student: Path, out_dir: Path, num_updates: int = 2) -> dict:
    """Return what `run_lora` does, of an engine and its micro-batches."""
    from mkd.evaluation.evaluate import evaluate
    from mkd.train.step import train_step, training_objective

    fill_b(state.models, engine.context)
    engine.optimizer.optimizer.reload_model_params()
    export_adapters(engine, state, out_dir / "started")
    evaluation = evaluate(engine, [batches])
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches)
    sums = objective.sums(engine.schedule.run(engine.stages, batches, objective, forward_only=False))
    with gradients_as_parameters(engine, engine.context):
        export_adapters(engine, state, out_dir / "gradients")
    for _ in range(num_updates):
        result = train_step(engine, batches, following=batches)
    with engine.parameters_gathered():
        export_adapters(engine, state, out_dir / "updated")
        export_student(engine, state, student, out_dir / "merged")
    return {
        "sums": sums.token_sums(),
        "evaluation": evaluation.token_sums(),
        "last": {**result.sums.token_sums(), "grad_norm": result.grad_norm},
    }


def fill_b(models, context) -> None:
    """Give every B random values that no layout changes: with B = 0 the gradient of A is 0."""
    from mkd.checkpoint.hf.hf_adapters import adapters_of
    from mkd.checkpoint.hf.hf_names import factor_map

    for model in models:
        for name, linear in adapters_of(model).items():
            factor = linear.lora_b.data
            found = factor_map(model.shape, f"{name}.lora_b", tuple(factor.shape), model.first_layer)
            for piece in found.pieces(tuple(factor.shape), context.tp_rank, context.tp_size):
                full = found.tensor_shapes()[piece.tensor]
                generator = torch.Generator().manual_seed(zlib.crc32(piece.tensor.encode()))
                values = 0.1 * torch.randn(full, generator=generator)
                piece.in_shard(factor).copy_(piece.in_tensor(values))


def export_adapters(engine, state, folder: Path) -> None:
    """Write the adapters as a PEFT folder."""
    from mkd.checkpoint.hf.peft_writer import export_peft
    from mkd.plan.models.lora_shape import LoRAShape

    parts = [(model, model.first_layer) for model in state.models]
    lora = LoRAShape(RANK, ALPHA, ("qkv", "proj", "fc1", "fc2"))
    export_peft(parts, state.models[0].shape, folder, context=engine.context, lora=lora, base="base")


def worst_error(actual: Path, expected: Path) -> tuple[float, str]:
    """Return the largest of max |difference| / max |expected| over the tensors, and that tensor."""
    ours, theirs = (
        {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}
        for folder in (actual, expected)
    )
    assert ours.keys() == theirs.keys()
    return max(
        (float((ours[name] - one).abs().max() / one.abs().max().clamp(min=1e-30)), name)
        for name, one in theirs.items()
    )


def run_base_teacher(layout: Layout, student: Path) -> dict:
    """Train a student whose teacher is its own base; return sums, and the storages of the teacher alone."""
    from mkd.train.step import train_step

    argv = layout.with_flags((*LORA, "--lr", "1e-2")).argv(student, Path("student-base"))
    engine, state, batches = build_layout(layout, argv)
    first = train_step(engine, batches, following=batches)
    last = train_step(engine, batches, following=batches)
    teachers = [part for stage in engine.stages for part in stage.module.teachers]
    assert all(not one.requires_grad for part in teachers for one in part.parameters())
    learned = [one for part in state.models for one in part.parameters() if one.requires_grad]
    return {
        "first": first.sums.token_sums(),
        "last": last.sums.token_sums(),
        "own": len(storages(teachers) - storages(state.models)),
        "buffer": sum(buffer.grad_data.numel() for stage in engine.stages for buffer in stage.buffers),
        "adapters": sum(one.numel() for one in learned),
        "state": sum(
            state["exp_avg"].numel()
            for one in engine.optimizer.optimizer.chained_optimizers
            for state in one.optimizer.state.values()
        ),
    }


def storages(parts) -> set[int]:
    """Return the addresses of the memory of all parameters of these model parts."""
    return {one.untyped_storage().data_ptr() for part in parts for one in part.parameters()}
