"""Compare a student in FP8 with itself and with one in bf16: gradients, evaluations, states, short packs.

    python -m tests.train.fp8_student_steps

prints a line for each recipe. On a CPU a stand-in rounds; see tests/models/fp8_stand_in.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from tests.train.graphed_steps import SEQ_LENGTH, GraphRow, engine_of

RECIPES = "tensorwise", "blockwise"
SHORT = 16, 48, 144, 1008  # tokens of a pack: multiples of 16
BF16 = GraphRow("bf16")


def fp8_row(recipe: str) -> GraphRow:
    return replace(BF16, flags=("--student-precision", "fp8", "--student-fp8-recipe", recipe))


def measured(recipe: str) -> dict:
    """Return what `report` prints of one recipe."""
    import torch

    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect, make_deterministic
    from tests.models.fp8_stand_in import stand_in_students

    make_deterministic()
    context = ParallelContext.create(detect(), seed=7)
    try:
        with nullcontext() if torch.cuda.is_available() else stand_in_students():
            return compared(recipe, context)
    finally:
        context.close()


def compared(recipe: str, context) -> dict:
    """Compare gradients of two packs with those of each, and all else with bf16."""
    import torch

    from mkd.evaluation.evaluate import evaluate
    from mkd.train.step import train_step

    bf16, fp8 = (engine_of(row, False, True, context) for row in (BF16, fp8_row(recipe)))
    packs = [pack_of(SEQ_LENGTH, context, seed) for seed in (1, 2)]
    together, first, second = (gradients(fp8, chosen) for chosen in (packs, packs[:1], packs[1:]))
    weights = [pack.num_loss_tokens / sum(one.num_loss_tokens for one in packs) for pack in packs]
    exact = gradients(bf16, packs)
    found = {
        "sum": away(weights[0] * first + weights[1] * second, together),
        "again": float((gradients(fp8, packs) - together).abs().max()),
        "from bf16": away(together, exact),
        "evaluation": evaluate(fp8, [packs]).token_sums()["loss"]
        - evaluate(bf16, [packs]).token_sums()["loss"],
        "loss": 0.0,
        "states": sum(one.numel() for one in states_of(fp8)),
        "short": [],
    }
    losses = [train_step(engine, packs).sums.token_sums()["loss"] for engine in (fp8, bf16)]
    found["loss"] = abs(losses[0] / losses[1] - 1)
    for tokens in SHORT:
        found["short"].append(bool(torch.isfinite(gradients(fp8, [pack_of(tokens, context, tokens)])).all()))
    found["finite"] = bool(torch.isfinite(together).all())
    return found


def pack_of(tokens: int, context, seed: int):
    """Return a pack of random documents, without padding, on the device."""
    import numpy as np

    from tools.benchmarks.synthetic_documents import ChatLengths, for_teachers, full_pack

    pack = full_pack(tokens, 1000, ChatLengths(median=150, longest=700), np.random.default_rng(seed))
    return for_teachers([pack.to(context.device)], 1)[0]


def gradients(engine, packs):
    """Return the gradient of the mean loss of the packs, all of its numbers in a row, fp32."""
    import torch

    from mkd.train.step import training_objective

    engine.optimizer.zero_grad()
    engine.schedule.run(engine.stages, packs, training_objective(engine, packs), forward_only=False)
    parameters = (one for stage in engine.stages for one in stage.parameters() if one.requires_grad)
    return torch.cat([one.main_grad.flatten() for one in parameters]).clone()


def away(values, expected) -> float:
    """Return the relative difference of two vectors."""
    return float((values - expected).norm() / expected.norm())


def states_of(engine) -> list:
    """Return what a checkpoint holds of Transformer Engine's states."""
    found = (one for stage in engine.stages for one in stage.module.student.sharded_state_dict().items())
    return [entry.data for name, entry in found if name.endswith("_extra_state")]


def main() -> None:
    for recipe in RECIPES:
        try:
            print(f"ROW {recipe}: {measured(recipe)}", flush=True)
        except Exception as error:
            import traceback

            traceback.print_exc()
            print(f"ROW {recipe}: FAILED {type(error).__name__}: {error}"[:400], flush=True)


if __name__ == "__main__":
    main()
