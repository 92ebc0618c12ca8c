"""Check `--teacher-residency peers`: which processes can split a teacher's layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mkd.errors import UsageError, collect_error
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.models.expert_parallel import expert_parallel_size
from mkd.plan.models.peer_groups import weight_shards

DO_WITHOUT = "remove --teacher-residency peers"


@dataclass(frozen=True)
class _Split:
    """A teacher that is split over peers."""

    place: str  # of its settings
    peers: int
    shards: int  # consecutive processes that hold different weights
    divided_by: str  # the parallel sizes that make them

    def advice(self, processes: int) -> str:
        """Return the numbers of peers that divide `processes`."""
        fitting = [str(size) for size in range(2, processes + 1) if processes % size == 0]
        return f"use {self.place}peers {' or '.join(fitting)}" if fitting else DO_WITHOUT


def check_peers(facts: RunFacts) -> Iterator[UsageError]:
    """Check that residency `peers` and the number of peers are given together."""
    for index, teacher in facts.running.items():
        place = place_of(index)
        if teacher.peers is not None and teacher.residency != "peers":
            setting, why = f"{place}peers {teacher.peers}", f"{place}residency is {teacher.residency}"
            yield no_effect(setting, why, f"add {place}residency peers")
        if teacher.residency == "peers" and teacher.peers is None:
            what = f"{place}residency peers, but no {place}peers"
            why = "it sets how many processes split each layer"
            do = f"give {place}peers, for example the GPUs of a machine"
            yield UsageError(what, why, do, code="add-flag")


def check_replicas(facts: RunFacts) -> Iterator[UsageError]:
    """Check that the peers divide the processes that hold the same weights."""
    sizes = collect_error([], lambda: facts.sizes)  # `check_batch` reports the error
    if sizes is None:
        return
    of_stage = sizes.stage
    for split in _split_teachers(facts):
        alike, rest = divmod(of_stage, split.shards)
        if rest:
            continue  # reported by `check_experts`
        if alike == 1:
            what = f"{split.place}residency peers, but no two processes hold the same weights of the teacher"
            why = f"a pipeline stage has {of_stage} processes, with {split.divided_by}"
            do = f"{DO_WITHOUT}, use {split.place}residency host, or more processes"
            yield UsageError(what, why, do, code="world-not-divisible")
        elif alike % split.peers:
            what = f"{split.place}peers {split.peers} does not divide {alike} processes"
            why = f"so many of the {of_stage} processes of a pipeline stage hold the same weights, with "
            why += split.divided_by
            yield UsageError(what, why, split.advice(alike), code="world-not-divisible")


def check_machine(facts: RunFacts, processes: int) -> Iterator[UsageError]:
    """Check that peers are on one machine. Each runs so many `processes`."""
    for split in _split_teachers(facts) if processes < facts.world_size else ():
        block = split.shards * split.peers
        if processes % block:
            what = f"{split.place}peers {split.peers} with {split.divided_by} take {block} neighbouring "
            what += f"processes, which do not divide the {processes} of a machine"
            why = "peers exchange the teacher's layers in every forward pass: networks are too slow for that"
            do = split.advice(max(1, processes // split.shards))
            yield UsageError(what, why, do, code="world-not-divisible")


def place_of(index: int) -> str:
    """Return how messages call a teacher's settings."""
    return f"teachers[{index}]." if index else "--teacher-"


def _split_teachers(facts: RunFacts) -> Iterator[_Split]:
    """Yield the teachers over peers. One whose shape is unknown counts as dense."""
    shapes = {model.teacher: model.shape for model in facts.models}
    tensor = facts.config.parallel.tensor_model_parallel_size
    for index, teacher in facts.running.items():
        if teacher.residency == "peers" and teacher.peers:
            shape = shapes.get(index)
            experts = 1 if shape is None else expert_parallel_size(facts.config, shape, index)
            divided_by = f"tensor parallel {tensor}" + (f" and expert parallel {experts}" * (experts > 1))
            yield _Split(place_of(index), teacher.peers, weight_shards(tensor, experts), divided_by)
