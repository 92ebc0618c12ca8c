"""Expert parallelism of each model of a run."""

from __future__ import annotations

from mkd.config.schema import Config
from mkd.plan.models.model_shape import ModelShape


def expert_parallel_size(config: Config, model: ModelShape, teacher: int | None = None) -> int:
    """Return the processes that share the experts of the student, or of the teacher of that number.

    It is 1 for a dense model. A teacher without a setting of its own has the student's.
    """
    if model.moe is None:
        return 1
    own = None if teacher is None else config.teachers[teacher].expert_model_parallel_size
    return own or config.parallel.expert_model_parallel_size
