"""Build the real engine around two models with random weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mkd.checkpoint.hf.hf_names import Cut, hf_tensor_shapes
from mkd.checkpoint.hf.hf_reader import HFCheckpoint, TensorHeader
from mkd.checkpoint.hf.hf_tower import TOWER, DiskNames
from mkd.config.load import load_config
from mkd.errors import UsageError
from mkd.kinds.known_kinds import KINDS, teacher_setup
from mkd.models.vision.tower import VisionTower
from mkd.parallel.context import ParallelContext
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import Platform, gpu_gib
from mkd.resolve.model_source import ModelSource
from mkd.resolve.run_plan import Plan
from mkd.run.build_engine import build_engine
from mkd.train.step import Engine
from tools.benchmarks.machine import Machine
from tools.benchmarks.shapes import shape_of


@dataclass(frozen=True)
class PairSettings:
    """Student and teacher to build, and their layout."""

    student: str  # names of `shapes.config_of`
    teacher: str
    seq_length: int
    micro_batch_size: int = 1
    num_microbatches: int = 1
    kd_ratio: float = 1.0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    flags: tuple[str, ...] = ()  # more flags of pretrain_kd.py
    teacher_seed: int = 0  # not 0: a teacher of the student's widths has other weights

    @property
    def tokens_per_microbatch(self) -> int:
        return self.micro_batch_size * self.seq_length

    def argv(self, dtype: torch.dtype, data_parallel: int) -> list[str]:
        """Return the training command's flags.

        At learning rate 0 a step does all the work of an update, and leaves the model as it was for the next
        one. Teachers are not ahead: steps are timed alone.
        """
        values = {
            "--student-hf": self.student,
            "--teacher-hf": self.teacher,
            "--kd-ratio": self.kd_ratio,
            "--train-iters": 1,
            "--lr": 0.0,
            "--seq-length": self.seq_length,
            "--micro-batch-size": self.micro_batch_size,
            "--global-batch-size": self.micro_batch_size * self.num_microbatches * data_parallel,
            "--tensor-model-parallel-size": self.tensor_parallel,
            "--pipeline-model-parallel-size": self.pipeline_parallel,
            "--teacher-prefetch": 0,
        }
        argv = [str(word) for pair in values.items() for word in pair]
        argv += ["--bf16"] if dtype == torch.bfloat16 else []
        argv += ["--sequence-parallel"] if self.tensor_parallel > 1 else []
        if self.virtual_stages > 1:
            argv += ["--num-virtual-stages-per-pipeline-rank", str(self.virtual_stages)]
        return [*argv, *self.flags]


class RandomCheckpoint(HFCheckpoint):
    """Substitute for a model's files: norms are 1, every other tensor is drawn on the device when it is read.

    A tensor depends on its name and `seed` alone, so that all processes, and other engines, have the same
    model.
    """

    def __init__(self, shape: ModelShape, device: torch.device, seed: int = 0):
        self.directory, self.is_sharded = Path("random weights"), False
        self.bytes_read, self.unfilled = 0, {}
        self.headers = {
            name: TensorHeader("", tuple(full), "F32") for name, full in hf_tensor_shapes(shape).items()
        }
        self.names = DiskNames.of_shape(shape)
        self.tower = {}
        if shape.vision is not None:
            tower = VisionTower(shape, torch.float32, torch.device("meta"))
            parameters = tower.named_parameters(prefix=TOWER.removesuffix("."))
            self.tower = {name: TensorHeader("", tuple(one.shape), "F32") for name, one in parameters}
        self._device, self._std, self._seed = device, shape.initializer_range, seed

    def read(self, tensor: str, cut: Cut) -> Tensor:
        size = (self.headers | self.tower)[tensor].shape
        if len(size) == 1:
            return torch.ones(size, device=self._device)[cut]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(tensor.encode()) + self._seed)
        whole = torch.empty(size, device=self._device).normal_(std=self._std, generator=generator)
        return whole[cut].clone()


@contextmanager
def parallel_context(platform: Platform, settings: PairSettings) -> Iterator[ParallelContext]:
    """Provide the process groups of the layout, for all engines of a benchmark."""
    parallel = load_config(settings.argv(torch.float32, 1)).config.parallel
    context = ParallelContext.create(platform, Sizes.of(parallel), virtual_stages=settings.virtual_stages)
    try:
        yield context
    finally:
        context.close()


def random_plan(settings: PairSettings, machine: Machine, context: ParallelContext) -> Plan:
    """Return a plan whose weights are random and never on disk. With kd_ratio 0 it has no teacher."""
    config = load_config(settings.argv(machine.dtype, context.dp_size)).config

    def source(name: str, seed: int = 0) -> ModelSource:
        shape = shape_of(name)
        return ModelSource(shape, Path(name), RandomCheckpoint(shape, context.device, seed), None)

    student = source(settings.student)
    teachers = (source(settings.teacher, settings.teacher_seed),) if settings.kd_ratio > 0 else ()
    shapes = tuple(teacher.shape for teacher in teachers)
    facts = RunFacts(config, context.world_size, student.shape, shapes, kinds=KINDS)
    setups = tuple(teacher_setup([], facts, index, source) for index, source in enumerate(teachers))
    return Plan(facts, student, teachers, setups, gpu_gib=gpu_gib())


def random_engine(settings: PairSettings, machine: Machine, context: ParallelContext) -> tuple[Engine, Plan]:
    """Build the engine of a random plan. Raises UsageError if the machine's device is not the platform's."""
    if machine.device.type != context.device.type:
        what = f"--device {machine.device.type} on a machine with a GPU"
        raise UsageError(
            what, "the engine runs on the GPU where there is one", "leave --device out", code="remove-flag"
        )
    plan = random_plan(settings, machine, context)
    return build_engine(plan, context)[0], plan
