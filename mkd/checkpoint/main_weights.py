"""Notice a distributed optimizer whose main weights, as a checkpoint holds them, are not the model's.

Megatron stored them shifted where a bucket of gradients ends with padding, and mkd stored its checkpoints so
until its buckets counted as full (`mkd/train/optimizer.py`). The weights of the model are right there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mkd.checkpoint.adapters import start_anew
from mkd.errors import CheckpointError

MOST_DIFFERENT = 0.5  # of the part of a parameter that this rank updates


class MainWeights:
    """The model's weights of this rank's part of the optimizer, to be compared after it has been loaded."""

    def __init__(self, optimizer: MegatronOptimizer):
        self._pairs = [(own, main) for one in optimizer.chained_optimizers for own, main in _pairs(one)]

    def problem(self, folder: Path) -> CheckpointError | None:
        """Return an error if main weights are those of other places."""
        if not any(_differs(own, main) for own, main in self._pairs):
            return None
        return CheckpointError(
            f"the optimizer's main weights in {folder} are not the model's weights",
            "an earlier mkd stored them and the moments shifted, where a bucket of gradients had padding",
            f"the model's weights are right: {start_anew(folder)}",
            code="optimizer-state-differs",
        )


def _pairs(inner: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of each weight of the model, and the optimizer's tensor for it."""
    if not isinstance(inner, DistributedOptimizer):
        return
    groups = [*zip(inner.model_float16_groups, inner.shard_fp32_from_float16_groups, strict=True)]
    groups += zip(inner.model_fp32_groups, inner.shard_fp32_groups, strict=True)
    for parameters, mains in groups:
        for parameter, main in zip(parameters, mains, strict=True):
            if main is not None:
                place = inner._get_model_param_range_map(parameter)["param"]
                own = parameter.detach().view(-1)[place.start : place.end]
                yield (own.clone() if own.dtype == main.dtype else own), main.detach()  # fp32: one memory


def _differs(own: Tensor, main: Tensor) -> bool:
    """Zeros do not count: rows that only fill up a vocabulary or heads are zeros in one of the two."""
    other = main.to(own.device, own.dtype).view(-1)
    counts = (own != 0) & (other != 0)
    return bool((counts & (own != other)).sum() > MOST_DIFFERENT * counts.sum())
