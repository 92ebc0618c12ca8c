"""The arguments that the losses of a slice share, and a few helpers over logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses.softmax import LOWEST, compute_dtype
from mkd.losses.statistics import gather_statistics
from mkd.losses.torch_rows import clear_rows
from mkd.xtoken.loss_settings import ChunkLossSettings
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary

# Replaces ln 0 where a difference with it must stay finite: exp of it is 0, and 0 times it is 0.
FLOOR = -1e4

# Codes of columns: a row of the model without a twin, a common token; 0 is a column without a row.
OTHER, COMMON = 1, 2


@dataclass(frozen=True)
class LossCall:
    """The settings of one call of `fused_chunk_kd`."""

    vocabulary: ChunkVocabulary
    settings: ChunkLossSettings
    passes: ModuleType  # over logits: `chunk_torch_passes`, or on GPUs `chunk_triton_passes`
    tp_group: dist.ProcessGroup | None

    # This rank's columns of the vocabulary's masks: [w_s], [w_t], [w_s] bool.

    @property
    def student_real(self) -> Tensor:
        return self.vocabulary.student_real[self.vocabulary.rank]

    @property
    def teacher_real(self) -> Tensor:
        return self.vocabulary.teacher_real[self.vocabulary.rank]

    @property
    def common(self) -> Tensor:
        return self.vocabulary.common[self.vocabulary.rank]

    @cached_property
    def student_codes(self) -> Tensor:
        """Codes of this rank's columns, [w_s] int8."""
        return self.student_real.to(torch.int8) + self.common.to(torch.int8)

    @cached_property
    def teacher_codes(self) -> Tensor:
        """Codes of this rank's columns, [w_t] int8."""
        real = self.teacher_real.to(torch.int8)
        return real + torch.nn.functional.pad(self.common.to(torch.int8), (0, len(real) - len(self.common)))

    @property
    def is_split(self) -> bool:
        """True if several ranks share the vocabulary."""
        return self.tp_group is not None and dist.get_world_size(self.tp_group) > 1

    def scaled(self, logits: Tensor) -> Tensor:
        """Return logits / T in the compute dtype; the logits themselves if that changes nothing."""
        logits = logits.to(compute_dtype(logits))
        return logits if self.settings.temperature == 1.0 else logits / self.settings.temperature

    def gather(self, **local: Tensor) -> dict[str, Tensor]:
        """Return each tensor with a first dimension of ranks, by one all-gather; no backward."""
        shapes = {name: tensor.shape for name, tensor in local.items()}
        flat = torch.cat([tensor.reshape(-1) for tensor in local.values()])
        gathered = gather_statistics(flat[None], self.tp_group)[:, 0]
        parts = gathered.split([math.prod(shape) for shape in shapes.values()], dim=1)
        named = zip(shapes.items(), parts, strict=True)
        return {name: part.reshape(len(part), *shape) for (name, shape), part in named}

    def sum(self, local: Tensor) -> Tensor:
        """Sum over the tensor-parallel group by one all-reduce, in place; no backward."""
        if self.is_split and local.numel():
            dist.all_reduce(local, group=self.tp_group)
        return local

    def local_columns(self, places: Tensor, width: int) -> Tensor:
        """Return columns of this rank, `width` for a place of another rank."""
        return torch.where(places // width == self.vocabulary.rank, places % width, width)


def log_sum_exp(values: Tensor, columns: Tensor) -> Tensor:
    """Return ln sum exp over the columns of a mask [w] or [n, w]: [n], about LOWEST if there is none."""
    return values.masked_fill(~columns, LOWEST).logsumexp(dim=1)


def at_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Return values[i, columns[i]], [n]; LOWEST if the column is another rank's (= w)."""
    width = values.shape[1]
    found = values.gather(1, columns.clamp(max=width - 1)[:, None]).squeeze(1)
    return found.masked_fill(columns == width, LOWEST)


def log_split(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln of the shares of exp(inside) and exp(outside) in their sum, exact where they are small."""
    softplus = torch.nn.functional.softplus
    return -softplus(outside - inside), -softplus(inside - outside)


def log_rest(chain: Tensor, outside: Tensor) -> Tensor:
    """Return ln(1 - e^b + e^b r), [c]; `chain` is b, ln p of the other tokens, and `outside` ln r."""
    return torch.logaddexp((-torch.expm1(chain)).log(), chain + outside).clamp(min=FLOOR)


def write_scaled(logits: Tensor, gradient: Tensor, scale: Tensor) -> None:
    """Overwrite logits [n, w] with gradient [n, w] * scale [n], 0 where scale is 0; gradient changes too."""
    logits.copy_(clear_rows(gradient.mul_(scale[:, None]), scale == 0))
