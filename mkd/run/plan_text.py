"""The plan of a run as text: its forecast, its objective and notes, and the same as JSON values."""

from __future__ import annotations

from typing import Any

from mkd.kinds.known_kinds import KINDS
from mkd.kinds.loss_card import loss_card
from mkd.operations.disk import disk_notes
from mkd.operations.run_folders import describe_saves, save_notes
from mkd.plan.advice.cuda_graphs import planned_graphs
from mkd.plan.advice.forecast_text import summarise_forecast
from mkd.plan.advice.notes import plan_notes, precision_note
from mkd.plan.advice.verdict import describe, verdict
from mkd.resolve.run_plan import Plan


def plan_text(plan: Plan) -> str:
    """Return the batch (an equation), the layers on each stage, forecasts of time and memory, notes."""
    return "\n".join([describe(plan.forecast), *notes(plan)])


def notes(plan: Plan) -> list[str]:
    """Return what the user should know before the start, a line each."""
    found = [*save_notes(plan.config), *plan_notes(plan.forecast)]
    found += plan.tokenizers.notes if plan.tokenizers else ()
    found += plan.stop_notes()
    for kind in KINDS:
        found += kind.notes(plan)
    found += precision_note(plan.forecast) if plan.gpu_gib is not None else []
    return found + disk_notes(plan.config, plan.student.shape)


def brief(plan: Plan, predicts: bool) -> str:
    """Return the batch, the models and notes; with `predicts`, also time and memory on GPUs."""
    lines = summarise_forecast(plan.forecast, predicts)
    if plan.config.device_memory_gib is not None:
        lines.append(verdict(plan.forecast, plan.config.device_memory_gib))
    return "\n".join([*lines, describe_saves(plan.config), *notes(plan)])


def figures(plan: Plan) -> dict[str, Any]:
    """Return the forecast as JSON values by the metric that each predicts, and as `text`."""
    found = plan.forecast.figures()
    graphs = planned_graphs(plan.forecast)
    found["peak_memory_gib"] += graphs.kept_gib - graphs.saved_gib
    return {**found, "text": plan_text(plan)}


def objective(plan: Plan) -> str:
    """Return the loss card: the objective with its numbers."""
    shapes, notes_of_files = (
        [one.shape for one in plan.facts.pair.compared],
        [one.card_note for one in plan.setups],
    )
    return loss_card(plan.config, plan.student.shape, shapes, notes_of_files)
