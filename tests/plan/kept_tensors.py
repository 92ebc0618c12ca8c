"""Measure the tensors that autograd keeps on a rank while a step runs."""

from __future__ import annotations

import weakref
from collections import Counter

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.train.invariance import Layout, build_layout


class KeptTensors:
    """Inside, `peak` is the largest sum of bytes of storages that backward still needs.

    Each storage counts once. Those of `frozen` tensors, the weights, do not count.
    """

    def __init__(self, frozen):
        self.live = self.peak = 0
        self._uses: Counter[int] = Counter()
        self._frozen = {tensor.untyped_storage().data_ptr() for tensor in frozen}
        self._hooks = saved_tensors_hooks(self._keep, lambda kept: kept.tensor)

    def __enter__(self) -> KeptTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _keep(self, tensor: Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._frozen:
            self._uses[place] += 1
            self.live += size * (self._uses[place] == 1)
            self.peak = max(self.peak, self.live)
            weakref.finalize(kept, self._forget, place, size)
        return kept

    def _forget(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        self.live -= size * (self._uses[place] == 0)


class _Kept:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def kept_bytes(layout: Layout, student, teacher, numbers) -> list[int]:
    """Return the peak on this rank of a step of that many equal micro-batches, for each number.

    Teachers are not ahead, because that plan is for one number.
    """
    from mkd.train.step import training_objective

    engine, _, batches = build_layout(layout, [*layout.argv(student, teacher), "--teacher-prefetch", "0"])
    weights = [parameter for chunk in engine.stages for parameter in chunk.parameters()]
    peaks = []
    for number in numbers:
        equal = batches[:1] * number
        objective = training_objective(engine, equal)
        with KeptTensors(weights) as kept:
            engine.schedule.run(engine.stages, equal, objective, forward_only=False)
        assert kept.live == 0, "backward has freed everything"
        peaks.append(kept.peak)
    return peaks
