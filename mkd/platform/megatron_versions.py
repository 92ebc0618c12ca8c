"""The only file that tells one megatron-core from another: 0.16.1 to 0.19.

Everything else calls Megatron in the form that all of these versions take.
"""

from __future__ import annotations

import logging
import re
import warnings
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # Megatron is imported later, when its warnings are silenced
    from megatron.core.optimizer import MegatronOptimizer

# What Megatron and its imports say in every run about things that are as they must be, or that are not mkd's.
LOG_LINES = {  # logger -> start of the line, a regular expression
    "megatron.core.transformer.transformer_layer": "Rewrapping ModuleSpec|Unknown MLP type",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout",
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
    "torch.utils.cpp_extension": "No CUDA runtime is found",  # `Platform.describe` says it
}
WARNINGS = (
    "absl.logging is not installed",
    "MimoModelConfig is experimental",
    "The .grad attribute of a Tensor that is not a leaf",
    "The argument order of load has been changed",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load",
)
_LOG_LINE = re.compile("|".join(LOG_LINES.values()))


def gradients_in_norm(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the gradients that this rank counts in the norm; replicas are counted elsewhere."""
    if hasattr(optimizer, "get_grads_for_grad_norm"):  # the name since 0.19
        return optimizer.get_grads_for_grad_norm()
    return optimizer.get_main_grads_for_grad_norm()


def quiet_newer_versions() -> None:
    """Drop the log lines and warnings that a user can do nothing about."""
    for name in LOG_LINES:
        logging.getLogger(name).addFilter(_is_news)  # adding the same function again does nothing
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def _is_news(record: logging.LogRecord) -> bool:
    return _LOG_LINE.match(record.getMessage()) is None
