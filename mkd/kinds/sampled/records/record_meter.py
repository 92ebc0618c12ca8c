"""The meter of a run with records, which also checks that they are the student's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mkd.errors import ServerAnswer
from mkd.kinds.sampled.rollout_meter import RolloutMeter
from mkd.kinds.sampled.server.server_probe import largest_gap


@dataclass
class RecordMeter(RolloutMeter):
    """As its base class, and ends the run if ln p in the records are those of another model."""

    largest_gap: float = 0.1  # nats by which they may differ from training, where all have lag 0

    @classmethod
    def of(cls, meter: RolloutMeter, student_ids: int, dtype: torch.dtype) -> RecordMeter:
        """Return the meter of ln p over `student_ids` ids of a student in `dtype`."""
        parts = meter.context, meter.stream, meter.teachers, meter.vocab_size
        return cls(*parts, student_ids=student_ids, largest_gap=largest_gap(dtype))

    def finish(self) -> dict[str, float]:
        """Return the metrics. Raises ServerAnswer on all ranks, which have the same figures."""
        figures = super().finish()
        gap = figures.get("rollout/logp_gap", 0.0)
        if figures["rollout/version_lag"] == 0 and not gap <= self.largest_gap:
            problem = ServerAnswer(
                f"iteration {self.stream.iteration}: ln p of the records differ by {gap:.3g} nats on average "
                "from those of the weights that they name",
                f"rounding explains {self.largest_gap:g}; the writer has other weights, ids, or settings of "
                "sampling",
                "let it read the weights in progress.json, sample with temperature 1, and write the ids that "
                "the model read and sampled",
                code="rollout-server-weights",
            )
            problem.on_all_ranks = True
            raise problem
        return figures
