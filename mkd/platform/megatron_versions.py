"""The only file that tells one megatron-core from another: 0.16.1 to 0.19.

Everything else calls Megatron in the form that all of these versions take.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

REMARKS = {  # logger -> remarks, each about code of Megatron that mkd does not choose or that 0.16.1 lacks
    "megatron.core.transformer.transformer_layer": "Rewrapping ModuleSpec",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
}
_REMARK = re.compile("|".join(REMARKS.values()))


def gradients_in_norm(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the gradients that this rank counts in the norm; replicas are counted elsewhere."""
    if hasattr(optimizer, "get_grads_for_grad_norm"):  # the name since 0.19
        return optimizer.get_grads_for_grad_norm()
    return optimizer.get_main_grads_for_grad_norm()


def quiet_loggers() -> None:
    """Drop log lines that newer versions write in every run and that a user can do nothing about."""
    for name in REMARKS:
        logging.getLogger(name).addFilter(_is_news)  # the same function is added once


def _is_news(record: logging.LogRecord) -> bool:
    return _REMARK.search(record.getMessage()) is None
