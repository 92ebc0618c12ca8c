"""Benchmark a training step of models with images: plan, parts, varlen against looped attention.

Half of the tokens are image tokens, as a plan assumes, and all images have one size. Figures are printed as
they come, the most important ones first. Models of one engine are freed before the next one is built.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from megatron.core.utils import get_attr_wrapped_model

from mkd.config.load import load_config
from mkd.data.batch import PackedBatch, collate
from mkd.data.images.rotary_positions import rotary_positions
from mkd.families.vision_shape import VisionShape
from mkd.models.language_model import LanguageModel
from mkd.models.packed import packed_documents
from mkd.models.vision.features import row_features
from mkd.models.vision.tower_attention import NAME
from mkd.parallel.context import ParallelContext
from mkd.parallel.image_row import ImageRow, deal_images, held_rows, image_row
from mkd.plan.auto_layout import layouts_of
from mkd.plan.batch import BatchPlan
from mkd.plan.layer_time import Rates
from mkd.plan.memory import predict_memory
from mkd.plan.towers import towers_time
from mkd.platform import Platform
from mkd.run.run_plan import Plan
from mkd.train.step import Engine
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped
from tools.benchmarks.kernel_times import kernel_times
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine
from tools.benchmarks.shapes import config_of, shape_of
from tools.benchmarks.step_benchmark import GIB, KD, SFT, TEACHER, memory_note, step_of
from tools.benchmarks.synthetic_documents import lay_out

PARTS = 18  # of the layers of Qwen2.5-VL 3B and 7B, 36 and 28
USED = 0.88  # of a GPU's memory, as planned: the images of a step and fragments need the rest
LOOPED_ROUNDS, LISTED = 2, 12  # calls of the slowest arm; kernels
TOWERS, LOOPED, REPLICATED = "towers, forward", "KD step, looped attention", "KD step, towers replicated"


def benchmark(machine: Machine, platform: Platform, settings: PairSettings, side: int) -> Report:
    """Time the step and its parts with images of `side` x `side` patches. Collective."""
    with parallel_context(platform, settings) as context:
        speak = print_on_rank_0(context)
        if machine.is_cuda:
            total_gib = torch.cuda.get_device_properties(machine.device).total_memory / GIB
            settings = with_layers_that_fit(settings, machine.dtype, context, USED * total_gib)
        tokens = settings.num_microbatches * settings.seq_length
        speak(f"vision {settings.student} <- {settings.teacher}, TP {context.tp_size}, {tokens} tokens")
        timer = Timer(machine, speak)
        if context.tp_size == 1:
            _fine_tuning(timer, settings, side, context)
            gc.collect()
            if machine.is_cuda:
                torch.cuda.empty_cache()
        _distillation(timer, settings, side, context)
    return _report(timer.times, settings)


@dataclass
class Timer:
    """Times arms, prints each median at once, and keeps them all."""

    machine: Machine
    speak: Callable[[str], None]
    times: dict[str, float] = field(default_factory=dict)

    def measure(self, *arms: Arm, rounds: int | None = None, warmup: int = 1) -> None:
        """Time the arms in turn; rounds of the machine without a number."""
        found = time_arms(arms, self.machine.device, rounds or self.machine.rounds, warmup)
        self.times.update(found)
        for name, ms in found.items():
            self.speak(f"{name}: {ms:.1f} ms")


def with_layers_that_fit(
    settings: PairSettings, dtype: torch.dtype, context: ParallelContext, limit_gib: float
) -> PairSettings:
    """Return the settings with the largest part of both models' layers that fits by the plan, in eighteenths.

    A model whose number of layers is given (NAME:N) keeps them.
    """
    for part in range(PARTS, 0, -1):
        names = [_shortened(name, part) for name in (settings.student, settings.teacher)]
        found = replace(settings, student=names[0], teacher=names[1])
        config = load_config(found.argv(dtype, context.dp_size)).config
        student, teacher = (shape_of(name) for name in names)
        layouts = layouts_of(config, student, [teacher], stages=1)
        batch = BatchPlan.from_config(config, context.world_size)
        memory = predict_memory(config, student, [teacher], *layouts, batch)
        if max(rank.total_gib for rank in memory.ranks) <= limit_gib:
            return found
    return found


def _shortened(name: str, part: int) -> str:
    layers = config_of(name)["num_hidden_layers"]
    return name if ":" in name else f"{name}:{max(layers * part // PARTS, 1)}"


def print_on_rank_0(context: ParallelContext) -> Callable[[str], None]:
    """Return a function that prints at once on rank 0, because a long benchmark may be cut."""
    return lambda text: print(text, flush=True) if context.rank == 0 else None


def _fine_tuning(timer: Timer, settings: PairSettings, side: int, context: ParallelContext) -> None:
    """Time the student's step alone. Its engine is freed on return."""
    engine, plan = random_engine(replace(settings, kd_ratio=0.0), timer.machine, context)
    batches = batches_of(plan, settings, side, timer.machine, context)
    timer.measure(Arm(SFT, step_of(engine, batches)), warmup=2)


def _distillation(timer: Timer, settings: PairSettings, side: int, context: ParallelContext) -> None:
    """Time the arms that need both models, the most important ones first."""
    machine, speak, times = timer.machine, timer.speak, timer.times
    engine, plan = random_engine(settings, machine, context)
    batches = batches_of(plan, settings, side, machine, context)
    images = sum(len(batch.images.rows) for batch in batches)
    speak(f"rank 0 has {images} of its image tokens in rows, {side} x {side} patches an image")
    kd = Arm(KD, step_of(engine, batches))
    memory = memory_note(machine, plan, kd, context)  # its steps warm the others up
    if context.tp_size > 1:
        replicated = batches_of(plan, settings, side, machine, context, is_dealt=False)
        timer.measure(kd, Arm(REPLICATED, step_of(engine, replicated)))
    else:
        timer.measure(kd, Arm(TEACHER, teacher_forward(engine, batches)))
        speak(f"KD step / (teacher forward + SFT step): {of_parts(times):.3f}")
    planned_ms = plan.forecast.planned_step_ms()
    speak(f"plan: {planned_ms:.1f} ms, measured / plan {times[KD] / planned_ms:.3f} (rates of an H200)")
    speak(memory)
    if context.tp_size > 1:
        return
    towers = Arm(TOWERS, towers_forward(engine, batches))
    timer.measure(towers)
    shapes = plan.student.shape, [one.shape for one in plan.teachers]
    planned_ms = settings.num_microbatches * towers_time(plan.config, *shapes, Rates()).forward_ms
    share = times[TOWERS] / times[KD]
    speak(f"towers, measured / plan {times[TOWERS] / planned_ms:.3f}; share of the step {share:.3f}")
    speak(kernel_note(towers.run, machine.is_cuda))
    if any(one.visual.config._attn_implementation == NAME for one in towers_of(engine)):
        timer.measure(Arm(LOOPED, looped(engine, kd.run)), rounds=min(machine.rounds, LOOPED_ROUNDS))
    else:
        speak("varlen attention needs a GPU and bf16: attention is looped in all arms")


def of_parts(times: Mapping[str, float]) -> float:
    """Return the time of the KD step over that of its parts."""
    return times[KD] / (times[TEACHER] + times[SFT])


def kernel_note(run: Callable[[], object], is_cuda: bool) -> str:
    """Profile one call; return its time by kind of kernel, and the longest kernels."""
    kernels = kernel_times(run, is_cuda)
    kinds = sorted(kernels.by_kind.items(), key=lambda item: -item[1])
    longest = list(kernels.by_name.items())[:LISTED]
    lines = ["kernels of the towers: " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds) + " ms"]
    lines += [f"  {ms:8.2f} ms {calls:6d} x {name[:90]}" for name, (ms, calls) in longest]
    return "\n".join(lines)


def batches_of(
    plan: Plan,
    settings: PairSettings,
    side: int,
    machine: Machine,
    context: ParallelContext,
    is_dealt: bool = True,  # False: every process runs the towers on all images
) -> list[PackedBatch]:
    """Return the micro-batches of a step on this rank, the same documents with both values of `is_dealt`."""
    random = np.random.default_rng(machine.seed + context.dp_rank)
    vision = plan.student.shape.vision
    assert vision is not None, "the shapes have images"
    vocab = min(
        plan.student.shape.vocab_size, *(one.shape.vocab_size for one in plan.teachers or [plan.student])
    )
    sequence_parallel = plan.config.parallel.sequence_parallel
    batches = []
    for _ in range(settings.num_microbatches):
        batch, row = image_pack(settings.seq_length, vision, side, vocab, random, context, sequence_parallel)
        images = row if is_dealt else replicated_row(row, context)
        batches.append(replace(batch, images=images).to(context.device))
    return batches


def image_pack(
    seq_length: int,
    vision: VisionShape,
    side: int,
    vocab: int,
    random: np.random.Generator,
    context: ParallelContext,
    sequence_parallel: bool,
) -> tuple[PackedBatch, ImageRow]:
    """Return a pack of documents that are half an image, and its images for this rank."""
    count, grid = (side // vision.merge) ** 2, (1, side, side)
    documents, starts = [], []
    while sum(map(len, documents)) + 2 * count <= seq_length:
        text = random.integers(min(vocab, vision.image_token_id), size=count)
        starts.append(sum(map(len, documents)) + count // 2)
        image = np.full(count, vision.image_token_id)
        documents.append(np.concatenate([text[: count // 2], image, text[count // 2 :]]))
    if rest := seq_length - sum(map(len, documents)):
        documents.append(random.integers(min(vocab, vision.image_token_id), size=rest))
    pack = lay_out(documents, [len(one) for one in documents])
    mask = pack.loss_mask * (pack.labels != vision.image_token_id) * (pack.tokens != vision.image_token_id)
    positions = [
        rotary_positions(len(one), [(count // 2, grid)] if number < len(starts) else [], vision.merge)
        for number, one in enumerate(documents)
    ]
    grids = [grid] * len(starts)
    owners = deal_images(grids, context.tp_size)
    size = side * side * owners.count(context.tp_rank), *vision.pixel_unit
    pixels = torch.from_numpy(random.integers(256, size=size, dtype=np.uint8))
    kept = (
        held_rows(torch.arange(seq_length), context.tp_rank, context.tp_size) if sequence_parallel else None
    )
    places = np.flatnonzero(pack.tokens == vision.image_token_id)
    unit = torch.ones(1, *vision.pixel_unit)
    row = image_row(
        *(pixels, grids, owners, places, vision.merge),
        rank=context.tp_rank,
        ranks=context.tp_size,
        kept=kept,
        positions=torch.from_numpy(np.concatenate(positions, axis=1)),
        scale=unit / 64,
        shift=-2 * unit,
    )
    return collate([replace(pack, loss_mask=mask.astype(np.float32))]), row


def replicated_row(row: ImageRow, context: ParallelContext) -> ImageRow:
    """Return the row with every image on every rank: as many times the work, gathered as before."""
    ranks = context.tp_size
    return replace(
        row,
        pixels=row.pixels.repeat(ranks, *[1] * (row.pixels.dim() - 1)),
        grids=row.grids * ranks,
        slots=row.slots * ranks,
    )


def models_of(engine: Engine) -> list[LanguageModel]:
    """Return student and teachers on this rank's only stage."""
    stage = engine.stages[0]
    return [get_attr_wrapped_model(stage, "student"), *get_attr_wrapped_model(stage, "teachers")]


def towers_of(engine: Engine) -> list:
    """Return the towers of all models."""
    return [model.tower for model in models_of(engine)]


def teacher_forward(engine: Engine, batches: Sequence[PackedBatch]) -> Callable[[], None]:
    """Return a call that runs the teacher with its tower, and its head on the rows with loss."""
    _, teacher = models_of(engine)
    joins = engine.context.platform.transformer_engine

    @torch.no_grad()
    def run() -> None:
        for batch in batches:
            borders = batch.cu_seqlens, batch.cu_seqlens_padded, batch.max_seqlen
            packed = packed_documents(*borders, padding_joins_document=joins)
            hidden = teacher(batch.tokens, batch.position_ids, packed_seq_params=packed, images=batch.images)
            teacher.logits(hidden[batch.loss_rows])

    return run


def towers_forward(engine: Engine, batches: Sequence[PackedBatch]) -> Callable[[], None]:
    """Return a call that runs the towers of all models alone."""

    @torch.no_grad()
    def run() -> None:
        for batch in batches:
            for model in models_of(engine):
                size = model.config.hidden_size, model.config.params_dtype
                row_features(model.tower, batch.images, *size, engine.context)

    return run


@contextmanager
def attention(towers: Sequence, name: str) -> Iterator[None]:
    """Let the towers attend by another of transformers' functions inside."""
    before = [one.visual.config._attn_implementation for one in towers]
    for one in towers:
        one.visual.config._attn_implementation = name
    try:
        yield
    finally:
        for one, own in zip(towers, before, strict=True):
            one.visual.config._attn_implementation = own


def looped(engine: Engine, run: Callable[[], object]) -> Callable[[], object]:
    """Return `run` with transformers' loop over images and windows."""

    def of_loop() -> object:
        with attention(towers_of(engine), "sdpa"):
            return run()

    return of_loop


def _report(times: dict[str, float], settings: PairSettings) -> Report:
    lines: list[Requirement | Skipped] = []
    if SFT in times:
        lines.append(Requirement("R21", of_parts(times), "of teacher forward + SFT step", "<=", 1.08))
    if LOOPED in times:
        lines.append(
            Requirement("R22", times[KD] / times[LOOPED], "of the step with looped attention", "<=", 1.0)
        )
    if REPLICATED in times:
        lines.append(
            Requirement("R23", times[KD] / times[REPLICATED], "of the step with replicated towers", "<=", 1.0)
        )
    layout = f"TP {settings.tensor_parallel}, {settings.num_microbatches} packs with images"
    return Report(lines, times={layout: times})
