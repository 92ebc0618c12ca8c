"""The LM head of a teacher whose layers are not in these processes: all that is left of it in a stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mkd.plan.models.model_shape import ModelShape


@dataclass
class StoredHead:
    """This rank's rows of a frozen head, as the loss reads those of a `LanguageModel`."""

    shape: ModelShape
    weight: Tensor  # [v/tp, h], padded as the student's, or as `select_head_rows` chose them

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the LM head, [v/tp, h]."""
        return self.weight

    def select_head_rows(self, ids: Tensor, tp_group: dist.ProcessGroup) -> None:
        """Replace this rank's rows by those of the vocabulary `ids` [w]; see `selected_rows`."""
        self.weight = selected_rows(self.weight, ids, tp_group)


def selected_rows(weight: Tensor, ids: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Return the rows of a head for `ids` [w], int64; -1 gives a row of zeros.

    `weight` [v/tp, h] are this rank's rows of all. Collective: all-gather over `tp_group`, no backward.
    """
    if tp_group.size() > 1:
        weight = gather_from_sequence_parallel_region(weight, group=tp_group)
    return weight[ids.clamp(min=0)].masked_fill_((ids < 0)[:, None], 0)
