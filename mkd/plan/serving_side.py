"""A teacher on processes of its own: the time of a micro-batch there, and the memory of a process.

The student asks ahead of its loss, so that the teacher's pipeline is always full: a step takes as long as the
slowest stage needs for all its micro-batches, without a bubble. The head is on the student's side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from mkd.config.schema import Config
from mkd.families.layer_shape import LayerShape
from mkd.plan.checks.model_alone import ModelAlone
from mkd.plan.facts import RunFacts
from mkd.plan.footprint.activations import Activations
from mkd.plan.footprint.device_memory import Groups, device_gib
from mkd.plan.footprint.memory import GIB, WORKSPACE_GIB
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.planned_teachers import Teacher
from mkd.plan.parallel_sizes import Sizes, partners
from mkd.plan.sides import requests_ahead, side_of_teacher
from mkd.plan.times.cost import DOCUMENT_LENGTH, with_copies
from mkd.plan.times.layer_time import ModelTimer, Rates


@dataclass(frozen=True)
class TeacherSide:
    """The processes of one teacher."""

    config: Config  # of the whole run
    alone: ModelAlone  # the teacher with the settings of its side, on the side's processes
    document_length: int = DOCUMENT_LENGTH
    share: float = 1.0  # expected share of the student's micro-batches that it is asked for

    @classmethod
    def of(cls, facts: RunFacts, number: int, shape: ModelShape) -> TeacherSide:
        """Return the side of the teacher of that number, which has the processes of its settings."""
        config, processes = facts.config, facts.config.teachers[number].processes
        alone = ModelAlone(side_of_teacher(config, number), processes, shape, number, facts.kinds)
        side = cls(config, alone, facts.document_length)
        return replace(side, share=facts.share_of(number, side.teacher))

    @property
    def processes(self) -> int:
        """Number of processes of the side."""
        return self.alone.world_size

    @cached_property
    def teacher(self) -> Teacher:
        """The teacher, with its sizes, replicas aside."""
        (planned,) = self.alone.of_teacher.planned_teachers
        return replace(planned, share=self.share)

    @cached_property
    def sizes(self) -> Sizes:
        """Processes along each axis; `data` are the replicas that serve micro-batches."""
        return replace(self.teacher.sizes, data=self.alone.of_teacher.sizes.data)

    @property
    def _config(self) -> Config:
        return self.alone.of_teacher.config

    @property
    def _element(self) -> int:
        return 2 if self._config.training.bf16 else 4

    @cached_property
    def stage_ms(self) -> float:
        """Time of a micro-batch on the slowest stage."""
        teacher, rates = self.teacher, Rates.of_precision(self._config.training.bf16)
        timer = ModelTimer(
            self._config,
            teacher.shape,
            teacher.seq_length,
            self.sizes,
            self.document_length,
            rates,
            rates.teacher_matmul,
            teacher.product_time,
            teacher.precision.decoded_bytes,
        )
        times = with_copies(teacher, timer.teacher(), self._element)
        spans = list(self._spans())
        stages = [sum(time.forward_ms for time in times[first:end]) for first, end in spans]
        stages[0] += timer.embedding(is_trained=False).forward_ms
        return max(stages)

    def step_ms(self, microbatches: int) -> float:
        """Return the time of a step with so many micro-batches of all replicas of the student."""
        return self.share * microbatches * self.stage_ms / self.sizes.data

    def need_gib(self, student_replicas: int) -> float:
        """Return the memory of the fullest process, which serves a student with so many replicas."""
        sizes, place, layers = self.sizes, self.teacher.place, self.teacher.shape.layers
        state = self._activations.hidden_bytes
        stages = [self._weight_bytes(layers[first:end]) for first, end in self._spans()]
        stages[0] += self._embedding_bytes()
        stages[-1] += self.states_kept(student_replicas) * state
        messages = 2 * state * (sizes.pipeline > 1)
        own = self.teacher.precision
        forward = self._activations.forward_bytes(own.input_bytes, bool(own.decoded_bytes))
        groups = Groups(
            peers=(place.processes,) * (place.processes > 1),
            teacher_experts=(sizes.expert,) * (sizes.expert > 1),
            bridges=partners(sizes.data, student_replicas),
        )
        outside_gib = WORKSPACE_GIB + device_gib(replace(sizes, expert=1), groups)
        return (max(stages) + messages + forward) / GIB + outside_gib

    def graphs_gib(self) -> float:
        """Return the memory that CUDA graphs of the layers keep on a process, beside `need_gib`."""
        decodes = bool(self.teacher.precision.decoded_bytes)
        own = self._activations
        return (own.forward_bytes(decodes=decodes) + own.hidden_bytes) / GIB

    def states_kept(self, student_replicas: int) -> int:
        """Return the most states that wait on a last stage for the replicas that it serves.

        An evaluation asks for as many again, while those of the next step wait.
        """
        lanes = 2 if self.config.training.evaluates else 1
        ahead = lanes * self.ahead(student_replicas)
        served = partners(self.sizes.data, student_replicas)
        return served * math.ceil(ahead / partners(student_replicas, self.sizes.data))

    def ahead(self, student_replicas: int) -> int:
        """Return how many micro-batches a replica of the student asks for ahead of its loss."""
        return requests_ahead(self.config.teachers[self.number], student_replicas)

    def state_bytes(self) -> int:
        """Return the bytes of the states of a whole micro-batch."""
        tokens = self._config.training.micro_batch_size * self.teacher.seq_length
        return tokens * self.teacher.shape.hidden_size * self._element

    @property
    def number(self) -> int:
        """Number of the teacher."""
        assert self.alone.teacher is not None, "a teacher runs"
        return self.alone.teacher

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield (first layer, behind the last one) of every stage."""
        counts = self.alone.layout.layers
        yield from ((end - count, end) for count, end in zip(counts, accumulate(counts), strict=True))

    def _weight_bytes(self, layers: Sequence[LayerShape]) -> int:
        return self.teacher.place.device_bytes(
            [self.teacher.layer_bytes(layer, self._element) for layer in layers]
        )

    def _embedding_bytes(self) -> int:
        shape, tensor = self.teacher.shape, self.sizes.tensor
        return shape.padded_vocab_size(tensor) // tensor * shape.hidden_size * self._element

    @cached_property
    def _activations(self) -> Activations:
        teacher = self.teacher
        return Activations(self._config, teacher.shape, self._element, teacher.seq_length, self.sizes)
