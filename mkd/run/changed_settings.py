"""What a run that goes on does otherwise than the run that saved its checkpoint, where that is allowed: said at its start."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mkd.config.options import settings
from mkd.run.run_plan import Plan

NOT_COMPARED = ("checkpoint", "log", "")  # sections: where things are written, and the root


def run_settings(plan: Plan) -> dict[str, object]:
    """Flag, or path in a file -> value (JSON), the batch as it came out; for checkpoints."""
    found = {
        option.place: value for option, value in settings(plan.config) if option.section not in NOT_COMPARED
    }
    found |= {
        "--global-batch-size": plan.batch.global_batch_size,
        "data-parallel replicas": plan.batch.data_parallel,
    }
    return json.loads(json.dumps(found))


def describe_changes(saved: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """One line with every value that is another one, or none. What a checkpoint of an older version lacks is not compared."""
    changed = [
        f"{name} {_text(saved[name])} -> {_text(value)}"
        for name, value in current.items()
        if name in saved and saved[name] != value
    ]
    return ["changed since the checkpoint: " + ", ".join(changed)] if changed else []


def _text(value: object) -> str:
    return "not given" if value is None else str(value)
