"""Decoder layers that processes of one machine split, each of which keeps an equal part of every layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkd.errors import UsageError, collect_error
from mkd.kinds.placed.choice import flag_of
from mkd.kinds.placed.place import Place
from mkd.plan.facts import RunFacts
from mkd.plan.parallel_sizes import model_sizes
from mkd.plan.times.hardware import GATHER_BYTES_PER_MS

if TYPE_CHECKING:  # they load torch
    from mkd.models.language_model import LanguageModel
    from mkd.models.placed.residency import LayerStream, LayerTensors
    from mkd.parallel.context import ParallelContext

COMPARED = (2, 4, 8)
"""Numbers of peers that a plan compares: divisors of a machine."""

DO_WITHOUT = "remove --teacher-residency peers"


@dataclass(frozen=True)
class PeerMemory(Place):
    """The device keeps a part of every layer, and an all-gather brings the others."""

    peers: int | None  # None: not given, which `problems` reports

    name = "peers"

    @classmethod
    def compared(cls) -> Iterable[tuple[str, Mapping[str, Any]]]:
        return ((f"{peers} peers", {"peers": peers}) for peers in COMPARED)

    @property
    def processes(self) -> int:
        return self.peers or 1

    def kept_bytes(self, nbytes: int) -> int:
        return nbytes // self.processes

    def transfer_ms(self, nbytes: int) -> float:
        return nbytes * (self.processes - 1) / self.processes / GATHER_BYTES_PER_MS

    def problems(self, facts: RunFacts, index: int) -> Iterator[UsageError]:
        """Yield a missing number of peers, or one that does not divide processes with the same weights."""
        place, flag = flag_of(index, "residency"), flag_of(index, "peers")
        if self.peers is None:
            why = "it sets how many processes split each layer"
            do = f"give {flag}, for example the GPUs of a machine"
            yield UsageError(f"{place} peers, but no {flag}", why, do, code="add-flag")
            return
        sizes = collect_error([], lambda: facts.sizes)  # `check_batch` reports the error
        if sizes is None:
            return
        of_stage, (shards, divided_by) = sizes.stage, _shards(facts, index)
        alike, rest = divmod(of_stage, shards)
        if rest:
            return  # reported by `check_experts`
        if alike == 1:
            what = f"{place} peers, but no two processes hold the same weights of the teacher"
            why = f"a pipeline stage has {of_stage} processes, with {divided_by}"
            do = f"{DO_WITHOUT}, use {place} host, or more processes"
            yield UsageError(what, why, do, code="world-not-divisible")
        elif alike % self.peers:
            what = f"{flag} {self.peers} does not divide {alike} processes"
            why = f"so many of the {of_stage} processes of a pipeline stage hold the same weights, with "
            why += divided_by
            yield UsageError(what, why, _fitting(flag, alike), code="world-not-divisible")

    def machine_problems(self, facts: RunFacts, index: int, processes: int) -> Iterator[UsageError]:
        """Yield an error if peers are not on one machine."""
        flag, (shards, divided_by) = flag_of(index, "peers"), _shards(facts, index)
        block, end = shards * self.processes, facts.first + facts.world_size
        if end <= processes:  # one machine has all of the run
            return
        starts = range(facts.first, end, block)
        if any(start // processes != (start + block - 1) // processes for start in starts):
            what = f"{flag} {self.peers} with {divided_by} take {block} neighbouring "
            what += f"processes, which do not divide the {processes} of a machine"
            what += f" from process {facts.first} on" * bool(facts.first % processes)
            why = "peers exchange the teacher's layers in every forward pass: networks are too slow for that"
            together = math.gcd(facts.first, processes)
            do = _fitting(flag, max(1, together // shards))
            yield UsageError(what, why, do, code="world-not-divisible")

    def stream(
        self, parts: Sequence[LanguageModel], context: ParallelContext, tensors: LayerTensors
    ) -> LayerStream:
        from mkd.models.placed.residency import stream_from_peers

        assert self.peers is not None, "`problems` reports it"
        has_experts = any(part.shape.moe is not None for part in parts)
        return stream_from_peers(parts, context.device, context.peer_group(self.peers, has_experts), tensors)


def _shards(facts: RunFacts, index: int) -> tuple[int, str]:
    """Return (consecutive processes that hold different weights, the parallel sizes that make them).

    A teacher whose shape is unknown counts as dense.
    """
    shape = next((model.shape for model in facts.models if model.teacher == index), None)
    sizes = model_sizes(facts.config, shape, index)
    divided_by = f"tensor parallel {sizes.tensor}"
    divided_by += f" and expert parallel {sizes.expert}" * (sizes.expert > 1)
    return sizes.weight_shards, divided_by


def _fitting(flag: str, processes: int) -> str:
    """Return the numbers of peers that divide `processes`."""
    fitting = [str(size) for size in range(2, processes + 1) if processes % size == 0]
    return f"use {flag} {' or '.join(fitting)}" if fitting else DO_WITHOUT
