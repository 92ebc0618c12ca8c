"""Held-out evaluation: the same stages, schedule and loss as training, forward only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mkd.data.batch import PackedBatch
from mkd.train.objective import SUMS, Objective
from mkd.train.step import Engine


def evaluate(engine: Engine, steps: Iterable[Sequence[PackedBatch]]) -> dict[str, float]:
    """Sums named `SUMS` over all loss tokens of `steps`, equal on every rank and for every layout.

    Each element of `steps` is this data-parallel rank's list of micro-batches of one global batch.
    """
    for chunk in engine.chunks:
        chunk.eval()
    objective = Objective(engine.kd, engine.context, torch.ones((), device=engine.context.device), with_ce_metric=True)
    total = torch.zeros(len(SUMS), dtype=torch.float64, device=engine.context.device)
    with engine.parameters_gathered(), torch.no_grad():
        for microbatches in steps:
            on_device = [batch.to(engine.context.device) for batch in microbatches]
            total += engine.schedule.run(engine.chunks, on_device, objective, forward_only=True)
    for chunk in engine.chunks:
        chunk.train()
    return dict(zip(SUMS, total.tolist(), strict=True))
