"""Peak GPU memory of every pipeline rank, before anything runs.

Weights, gradients and optimizer state follow from parameter counts. Activations are counted tensor by tensor,
as Transformer Engine's layers save them. The order of the schedule decides how many micro-batches are alive.
Not counted: fragmentation of torch's allocator (a few percent of what it reserves).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import accumulate

from mkd.config.schema import Config, TeacherConfig
from mkd.families.layer_shape import LayerShape
from mkd.plan.checks.prefetch_limits import states_ahead
from mkd.plan.facts import RunFacts
from mkd.plan.footprint.activations import Activations
from mkd.plan.footprint.device_memory import Groups, device_gib
from mkd.plan.footprint.head_memory import HeadMemory
from mkd.plan.footprint.sampling_memory import cache_bytes, sampling_bytes
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.lora_shape import NF4_BYTES, LoRAShape
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import Parameters, stage_parameters
from mkd.plan.models.planned_teachers import Teacher
from mkd.plan.models.towers import tower_activation_bytes, tower_parameters
from mkd.plan.parallel_sizes import Sizes, partners
from mkd.plan.sides import apart_teachers, teacher_sizes
from mkd.plan.times.bubble import rank_order
from mkd.plan.times.prefetch import LEAST_HELD

GIB = 2**30
# cuBLAS workspaces of torch and Transformer Engine (32 MiB each on Hopper), inputs, scalars.
WORKSPACE_GIB = 0.1


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of a pipeline rank, GiB per process. Torch allocates all but `device_gib`."""

    student_gib: float  # weights
    gradients_gib: float  # fp32 buffer of DDP
    # See `state_bytes`. Kept on the host: only what an update adds to the peak.
    optimizer_gib: float
    teacher_gib: float  # weights of all teachers
    # The student's, for all micro-batches alive at the peak, or what its layers keep while it samples.
    activations_gib: float
    # A teacher's forward, the heads or one layer's backward, whichever makes the peak; messages; workspaces.
    transient_gib: float
    device_gib: float  # CUDA context and NCCL: seen by nvidia-smi, not by torch

    @property
    def allocated_gib(self) -> float:
        """Expected value of `torch.cuda.max_memory_allocated`."""
        return self.total_gib - self.device_gib

    @property
    def total_gib(self) -> float:
        """Sum of all fields."""
        return sum(getattr(self, field.name) for field in fields(self))

    def describe(self) -> str:
        """Return the total and its parts as one line."""
        names = (field.name.removesuffix("_gib") for field in fields(self))
        parts = " + ".join(f"{name} {getattr(self, name + '_gib'):.2f}" for name in names)
        return f"{self.total_gib:.1f} GiB = {parts}"


@dataclass(frozen=True)
class MemoryPlan:
    """The prediction for all pipeline ranks; processes of one pipeline rank need the same."""

    ranks: tuple[RankMemory, ...]

    def describe(self) -> str:
        """Return one line per pipeline rank."""
        ranks = enumerate(self.ranks)
        return "\n".join(f"memory of pipeline rank {rank}: {memory.describe()}" for rank, memory in ranks)


def predict_memory(
    facts: RunFacts,
    ahead: int | None = None,  # micro-batches that teachers may be ahead; None: as the settings say
    optimizer_residency: str | None = None,  # None: as the settings say
) -> MemoryPlan:
    """Predict training on GPUs, with Transformer Engine layers and the fused head."""
    ahead = states_ahead(facts.config) if ahead is None else ahead
    residency = optimizer_residency or facts.config.training.optimizer_residency
    models, ranks = _Models(facts, ahead, residency), range(facts.layouts.student.pipeline_parallel)
    return MemoryPlan(tuple(models.rank_memory(rank) for rank in ranks))


def learned_parameters(facts: RunFacts) -> list[Parameters]:
    """Return the parameters that a process of each pipeline rank learns."""
    models = _Models(facts, 0, "device")
    return [models.learned(rank)[0] for rank in range(facts.layouts.student.pipeline_parallel)]


def predict_graphs(facts: RunFacts, student: bool, teachers: Sequence[bool]) -> float:
    """Return the GiB that CUDA graphs keep on the fullest process, beside everything else.

    `student` and `teachers` (each one that runs): does the model run as graphs? The rest of the memory stays
    as `predict_memory` has it, because packs without graphs run in between.
    """
    models = _Models(facts, 0, "device")
    ranks = range(facts.layouts.student.pipeline_parallel)
    return max(models.graphs_bytes(rank, student, teachers) for rank in ranks) / GIB


def state_bytes(bf16: bool) -> int:
    """Return the bytes of the optimizer's state of a parameter: two moments, in bf16 runs an fp32 weight."""
    return 12 if bf16 else 8


def _stage_layers(shape: ModelShape, layout: PipelineLayout, stage: int) -> tuple[LayerShape, ...]:
    """Return the decoder layers of one stage, counted in model order."""
    first = sum(layout.layers[:stage])
    return shape.layers[first : first + layout.layers[stage]]


def _rank_layers(shape: ModelShape, layout: PipelineLayout, rank: int) -> list[LayerShape]:
    """Return the decoder layers of a pipeline rank."""
    stages = range(rank, len(layout.layers), layout.pipeline_parallel)
    return [layer for stage in stages for layer in _stage_layers(shape, layout, stage)]


def _ends(layout: PipelineLayout, rank: int) -> tuple[bool, bool]:
    """Return True, for a rank with the first stage and for one with the last."""
    return rank == 0, rank == layout.pipeline_parallel - 1


@dataclass(frozen=True)
class _Models:
    """The arguments of `predict_memory`, and the sizes that follow from them."""

    facts: RunFacts
    ahead: int  # micro-batches that teachers may be ahead of the loss
    optimizer_residency: str

    @property
    def config(self) -> Config:
        return self.facts.config

    @property
    def student(self) -> ModelShape:
        return self.facts.pair.student

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        return self.facts.pair.teachers

    @cached_property
    def lora(self) -> LoRAShape | None:
        """Adapters of the student; None if it has none."""
        return LoRAShape.of(self.config)

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.config.training.bf16 else 4

    @cached_property
    def head(self) -> HeadMemory:
        """LM heads and the loss of the last stage."""
        return HeadMemory(self.facts, self.element, self._student_activations)

    @cached_property
    def vocab_rows(self) -> int:
        """Rows of each embedding and head on one process."""
        return self.head.vocab_rows

    def _activations(self, teacher: Teacher) -> Activations:
        return self.head.activations(teacher)

    @property
    def _student_activations(self) -> Activations:
        seq_length = self.config.training.seq_length
        more = self.lora, self.facts.pair.work.student
        return Activations(self.config, self.student, self.element, seq_length, self.sizes, *more)

    def rank_memory(self, rank: int) -> RankMemory:
        layout = self.facts.layouts.student
        layers, ends = _rank_layers(self.student, layout, rank), _ends(layout, rank)
        learned, own_frozen = self.learned(rank)
        teachers = zip(self.teachers, self.facts.layouts.teachers, strict=True)
        frozen = sum(self._teacher_bytes(teacher, layout, rank) for teacher, layout in teachers)
        frozen += self.head.stored_bytes() if ends[1] else 0
        if rank == 0:  # the vision towers
            loaded = (one.shape for one in self.teachers if not one.place.shares_base)
            frozen += sum(tower_parameters(shape).total for shape in loaded) * self.element
        frozen += sum(one.is_averaged for one in self.teachers) * self._average_bytes(learned)
        alive, transient = max(self._moments(rank), key=sum)
        optimizer = self._optimizer_bytes(learned)
        if self.optimizer_residency == "host":
            optimizer = max(0, optimizer - alive - transient)  # it comes when activations are gone
        transient += self._bytes_ahead() + self._remote_bytes() * ends[1]
        own = (learned.total + own_frozen) * self.element
        if self.lora is not None and self.lora.is_rounded:
            in_4_bits = self.lora.weights(self.student, layers, self.sizes.tensor)
            own -= round(in_4_bits * (self.element - NF4_BYTES))
        return RankMemory(
            student_gib=own / GIB,
            gradients_gib=learned.total * 4 / GIB,
            optimizer_gib=optimizer / GIB,
            teacher_gib=frozen / GIB,
            activations_gib=alive / GIB,
            transient_gib=(transient + self._message_bytes()) / GIB + WORKSPACE_GIB,
            device_gib=device_gib(self.sizes, self._groups),
        )

    def learned(self, rank: int) -> tuple[Parameters, int]:
        """Return the student's parameters that learn on a pipeline rank, and the number of frozen ones."""
        layout = self.facts.layouts.student
        layers, ends = _rank_layers(self.student, layout, rank), _ends(layout, rank)
        learned, frozen = stage_parameters(self.student, layers, self.sizes, self.vocab_rows, *ends), 0
        if rank == 0:  # the vision tower
            tower, parts = tower_parameters(self.student), self.config.student.train_parts
            learned += Parameters(tower.trained(parts))
            frozen = tower.total - tower.trained(parts)
        if self.lora is not None:  # all weights are frozen beside the adapters
            frozen += learned.total
            learned = Parameters(self.lora.parameters(self.student, layers, self.sizes.tensor))
        return learned, frozen

    @property
    def sizes(self) -> Sizes:
        """Processes along each axis, for the student's experts."""
        return replace(self.facts.pair.sizes, data=self.facts.sizes.data)

    def _optimizer_bytes(self, learned: Parameters) -> float:
        """Return the bytes of the optimizer state of a process that learns these parameters.

        A distributed optimizer spreads it over the copies: data x context parallel processes, for experts
        tensor x context x data / expert parallel ones.
        """
        return state_bytes(self.config.training.bf16) * self._updated(learned)

    def _updated(self, learned: Parameters) -> float:
        """Return the number of parameters that a process updates, of those that it learns."""
        is_spread = self.config.parallel.use_distributed_optimizer
        copies = self.sizes.copies if is_spread else 1
        of_experts = self.sizes.expert_copies if is_spread else 1
        return learned.dense / copies + learned.experts / of_experts

    def _average_bytes(self, learned: Parameters) -> int:
        """Return the bytes of a teacher that averages what a process learns, beside its weights.

        In fp32 the weights are the average. Weights of adapters count here: the rest is the student's.
        """
        own = learned.total * self.element if self.lora is not None else 0
        return own + (round(4 * self._updated(learned)) if self.config.training.bf16 else 0)

    @property
    def _groups(self) -> Groups:
        """Groups of processes, for the memory outside torch. Teachers with the same groups share them."""
        peers = {(one.sizes.weight_shards, one.place.processes) for one in self.teachers}
        experts = {one.sizes.expert for one in self.teachers if one.shape.moe}
        return Groups(
            has_experts=self.student.moe is not None,
            ties_embedding=self.student.tie_word_embeddings,
            spreads_optimizer=self.config.parallel.use_distributed_optimizer,
            peers=[processes for _, processes in peers if processes > 1],
            teacher_experts=sorted(experts - {self.sizes.expert}),
            bridges=sum(partners(self.sizes.data, teacher_sizes(one).data) for one in self.apart.values()),
        )

    def _teacher_bytes(self, teacher: Teacher, layout: PipelineLayout, rank: int) -> int:
        """Return the bytes of a teacher's weights on the device of one process.

        Embedding and head always stay there, unless they are the student's.
        """
        if teacher.place.shares_base:
            return 0
        tensor, shape = teacher.sizes.tensor, teacher.shape
        rows, beside = self.vocab_rows, 0
        if teacher.is_cross_tokenizer:
            rows = shape.padded_vocab_size(tensor) // tensor
            shape = replace(shape, tie_word_embeddings=False)  # its embedding has its own padding
            has_head = rank == layout.pipeline_parallel - 1
            beside = has_head * (self.head.rows_of(teacher) - rows) * shape.hidden_size
        ends = stage_parameters(shape, (), teacher.sizes, rows, *_ends(layout, rank)).total + beside
        layers = _rank_layers(shape, layout, rank)
        sizes = [teacher.layer_bytes(layer, self.element) for layer in layers]
        return ends * self.element + teacher.place.device_bytes(sizes)

    def _moments(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield (activations alive, transient), bytes, at each moment that may be the peak."""
        layout, last = self.facts.layouts.student, len(self.facts.layouts.student.layers) - 1
        tower_kept, tower_peak = tower_activation_bytes(self.config, self.student, self.element)
        student, head = self._student_activations, self.head.peak_bytes()
        # The gradient of embedding or head that autograd returns, unless they are frozen.
        table = self.vocab_rows * self.student.hidden_size * self.element * (self.lora is None)
        if self.config.training.evaluates and last % layout.pipeline_parallel == rank:
            yield 0, self.head.peak_bytes(with_gradient=False)
        slots = self._slots
        if slots:  # the cache exists while the student samples
            logits = sampling_bytes(slots, self.vocab_rows)
            # Context-parallel processes sample like replicas: none divides a row with others.
            sampler = replace(student, sizes=replace(student.sizes, context=1))
            yield self._cache_bytes(rank, slots), sampler.forward_bytes() + logits
        alive, pipeline = 0, layout.pipeline_parallel
        # Every micro-batch repeats the moments of its stage.
        teachers_peak, backward_peak = cache(self._teachers_forward_bytes), student.backward_bytes()

        @cache
        def kept_by(stage: int) -> int:
            kept = student.part_bytes(_stage_layers(self.student, layout, stage), is_last=stage == last)
            return kept + tower_kept * (stage == 0)

        # These fill the pipeline; later micro-batches repeat the same moments.
        microbatches = min(self.facts.batch.num_microbatches, 4 * pipeline)
        for task in rank_order(rank, pipeline, layout.virtual_stages, microbatches):
            stage = task.virtual_stage * pipeline + rank
            if task.is_forward:
                yield alive, teachers_peak(stage)
                alive += kept_by(stage)
                yield alive, head if stage == last else 0
                if self.ahead and stage != last:  # in the gap before a backward
                    yield alive, teachers_peak(stage)
            else:
                layer = backward_peak if layout.layers[stage] else 0
                layer = max(layer, tower_peak * (stage == 0))
                yield alive, layer + (table if stage == last else 0)
                alive -= kept_by(stage)
                yield alive, table if stage == 0 else 0

    def graphs_bytes(self, rank: int, student: bool, graphed_teachers: Sequence[bool]) -> int:
        """Return the bytes that graphs keep: a slot for each micro-batch in flight, and one scratch pool."""
        layout, own = self.facts.layouts.student, self._student_activations
        pairs = list(zip(self.teachers, graphed_teachers, strict=True))
        graphed = [self._activations(teacher) for teacher, is_on in pairs if is_on]
        decodes = [bool(teacher.precision.decoded_bytes) for teacher, is_on in pairs if is_on]
        forwards = zip(graphed, decodes, strict=True)
        scratch = [one.forward_bytes(decodes=own) + one.hidden_bytes for one, own in forwards]
        if not student:
            return max(scratch, default=0)
        pipeline, last = layout.pipeline_parallel, len(layout.layers) - 1
        stages = range(rank, len(layout.layers), pipeline)
        kept = max(own.part_bytes(_stage_layers(self.student, layout, one), one == last) for one in stages)
        microbatches = min(self.facts.batch.num_microbatches, 4 * pipeline)
        tasks = rank_order(rank, pipeline, layout.virtual_stages, microbatches)
        in_flight = max(accumulate(1 if task.is_forward else -1 for task in tasks))
        fixed = 4 * own.hidden_bytes  # hidden states around the layers, and their gradients
        return in_flight * (kept + fixed) + max([own.backward_bytes(), *scratch])

    def _bytes_ahead(self) -> int:
        """Return the bytes of the teachers' states ahead of the loss, the most that a rank can hold."""
        most = max(self.ahead, LEAST_HELD) if self.ahead else 0
        states = min(most, 2 * self.facts.batch.num_microbatches)
        return states * sum(self._activations(teacher).hidden_bytes for teacher in self.teachers)

    @property
    def apart(self) -> Mapping[int, TeacherConfig]:
        """Teachers on processes of their own."""
        return apart_teachers(self.config)

    def _remote_bytes(self) -> int:
        """Return the bytes of the state that a last stage receives beside the one of its loss."""
        heads = zip(self.facts.head_numbers, self.facts.pair.heads, strict=True)
        return sum(self._activations(one).hidden_bytes for number, one in heads if number in self.apart)

    @property
    def _slots(self) -> int:
        """Return the sequences that a process samples at the same time: its share of a step, or fewer."""
        slots, completions = self.facts.work.slots, self.facts.work.completions
        if completions is None:
            return slots
        return min(slots, -(-completions(self.facts.batch.global_batch_size) // self.sizes.copies))

    def _cache_bytes(self, rank: int, slots: int) -> int:
        """Return the bytes that the student's layers on a pipeline rank keep while it samples."""
        layers = _rank_layers(self.student, self.facts.layouts.student, rank)
        return cache_bytes(self.config, slots, self.student, layers, self.element)

    def _teachers_forward_bytes(self, stage: int) -> int:
        """Return the peak of the teachers' forwards, in turn. Each leaves its hidden states."""
        peak = kept = 0
        for teacher, layout in zip(self.teachers, self.facts.layouts.teachers, strict=True):
            if layout.layers[stage]:
                precision = teacher.precision
                own = precision.input_bytes, bool(precision.decoded_bytes)
                forward = self._activations(teacher).forward_bytes(*own)
                peak = max(peak, kept + forward)
            kept += self._activations(teacher).hidden_bytes
        return peak

    def _message_bytes(self) -> int:
        """Return the bytes of pipeline messages: activations of all models in and out, or gradients."""
        if self.config.parallel.pipeline_model_parallel_size == 1:
            return 0
        models = [self._student_activations, *map(self._activations, self.teachers)]
        return 2 * sum(model.hidden_bytes for model in models)
