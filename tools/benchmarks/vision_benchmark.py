"""Benchmark a training step of models with images: plan, parts, varlen against looped attention.

Half of the tokens are image tokens, as a plan assumes, and all images have one size. Figures are printed as
they come. Models of one engine are freed before the next one is built.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from megatron.core.utils import get_attr_wrapped_model

from mkd.data.batch import PackedBatch, collate
from mkd.data.images.rotary_positions import rotary_positions
from mkd.errors import UsageError
from mkd.families.vision_shape import VisionShape
from mkd.models.language_model import LanguageModel
from mkd.models.packed import packed_documents
from mkd.models.vision.features import row_features
from mkd.models.vision.tower_attention import NAME
from mkd.parallel.context import ParallelContext
from mkd.parallel.image_row import ImageRow, deal_images, held_rows, image_row
from mkd.platform import Platform
from mkd.run.run_plan import Plan
from mkd.train.step import Engine
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped
from tools.benchmarks.machine import Machine
from tools.benchmarks.measure import Arm, time_arms
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine, random_plan
from tools.benchmarks.step_benchmark import GIB, KD, SFT, TEACHER, memory_note, step_of
from tools.benchmarks.synthetic_documents import lay_out

TOWERS, LOOPED, REPLICATED = "towers, forward", "KD step, looped attention", "KD step, towers replicated"


def benchmark(machine: Machine, platform: Platform, settings: PairSettings, side: int) -> Report:
    """Time the step and its parts with images of `side` x `side` patches. Collective."""
    with parallel_context(platform, settings) as context:
        speak = print_on_rank_0(context)
        times = _distillation(machine, settings, side, context, speak)
        if context.tp_size > 1:
            return _report(times, settings)
        gc.collect()
        if machine.is_cuda:
            torch.cuda.empty_cache()
        engine, plan = random_engine(replace(settings, kd_ratio=0.0), machine, context)
        step = Arm(SFT, step_of(engine, batches_of(plan, settings, side, machine, context)))
        times |= time_arms([step], machine.device, machine.rounds)
        speak(f"{SFT}: {times[SFT]:.1f} ms")
    return _report(times, settings)


def require_room(machine: Machine, plan: Plan) -> None:
    """Raise `UsageError` if the models do not fit on the GPU by the plan, before they are built."""
    if not machine.is_cuda:
        return
    total = torch.cuda.get_device_properties(machine.device).total_memory / GIB
    needed = max(rank.allocated_gib for rank in plan.forecast.memory().ranks)
    if needed > 0.93 * total:
        what = f"both models need {needed:.1f} GiB by the plan, the GPU has {total:.1f}"
        do = "take fewer layers: --student-shape qwen2.5-vl-3b:18 --teacher-shape qwen2.5-vl-7b:14"
        raise UsageError(what, "a step would run out of memory", do, code="benchmark-beyond-memory")


def print_on_rank_0(context: ParallelContext) -> Callable[[str], None]:
    """Return a function that prints at once on rank 0, because a long benchmark may be cut."""
    return lambda text: print(text, flush=True) if context.rank == 0 else None


def _distillation(
    machine: Machine,
    settings: PairSettings,
    side: int,
    context: ParallelContext,
    speak: Callable[[str], None],
) -> dict[str, float]:
    """Time the arms that need both models. Print plan, memory and every median."""
    require_room(machine, random_plan(settings, machine, context))
    engine, plan = random_engine(settings, machine, context)
    batches = batches_of(plan, settings, side, machine, context)
    images = sum(len(batch.images.rows) for batch in batches)
    tokens = settings.num_microbatches * settings.seq_length
    speak(f"vision {settings.student} <- {settings.teacher}, TP {context.tp_size}, {tokens} tokens")
    speak(f"rank 0 has {images} of its image tokens in rows, {side} x {side} patches an image")
    kd = Arm(KD, step_of(engine, batches))
    speak(memory_note(machine, plan, kd, context))
    times: dict[str, float] = {}

    def measure(*arms: Arm) -> None:
        found = time_arms(arms, machine.device, machine.rounds)
        times.update(found)
        for name, ms in found.items():
            speak(f"{name}: {ms:.1f} ms")

    if context.tp_size > 1:
        replicated = batches_of(plan, settings, side, machine, context, is_dealt=False)
        measure(kd, Arm(REPLICATED, step_of(engine, replicated)))
        return times
    arms = [kd, Arm(TEACHER, teacher_forward(engine, batches)), Arm(TOWERS, towers_forward(engine, batches))]
    if any(one.visual.config._attn_implementation == NAME for one in towers_of(engine)):
        arms.append(Arm(LOOPED, looped(engine, kd.run)))
    else:
        speak("varlen attention needs a GPU and bf16: attention is looped in all arms")
    measure(*arms)
    planned = plan.forecast.planned_step_ms()
    speak(f"plan: {planned:.1f} ms, measured / plan {times[KD] / planned:.3f} (rates of an H200)")
    speak(f"share of the towers' forward in the step: {times[TOWERS] / times[KD]:.3f}")
    return times


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
        parts = times[TEACHER] + times[SFT]
        lines.append(Requirement("R21", times[KD] / parts, "of teacher forward + SFT step", "<=", 1.08))
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
