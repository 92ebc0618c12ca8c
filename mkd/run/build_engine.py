"""Builds the models with their weights, the schedule and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mkd.checkpoint.distributed import TrainingState, load_checkpoint
from mkd.checkpoint.hf.hf_reader import load_hf_weights
from mkd.models.builder import build_chunks, common_padded_vocab_size, join_stages
from mkd.models.language_model import LanguageModel
from mkd.models.residency import HostResidency
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import TeacherHiddenCommunicator
from mkd.run.cross_tokenizer import CrossTokenizerTeacher
from mkd.run.model_source import ModelSource
from mkd.run.run_plan import Plan
from mkd.train.optimizer import build_optimizer, wrap_stages
from mkd.train.schedule import PipelineSchedule
from mkd.train.step import Engine
from mkd.train.teachers.teacher_loss import TeacherLoss
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary
from mkd.xtoken.vocabulary.slots import TeacherSlots


def build_engine(
    plan: Plan,
    context: ParallelContext,
    cross_tokenizer: Sequence[
        CrossTokenizerTeacher | None
    ] = (),  # of each teacher; empty: all read the student's tokens
) -> tuple[Engine, TrainingState]:
    """All models with their weights, joined stage by stage, under one schedule and one optimizer."""
    config = plan.config
    options = ModelOptions(
        dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute_granularity=config.training.recompute_granularity,
        recompute_method=config.training.recompute_method,
        recompute_num_layers=config.training.recompute_num_layers,
        deterministic=config.training.deterministic_mode,
    )
    cross_tokenizer = cross_tokenizer or [None] * len(plan.teachers)
    vocab = common_padded_vocab_size([source.shape for source in plan.same_vocabulary], context.tp_size)
    students = build_chunks(plan.student.shape, plan.student_layout, options, context, vocab)
    load_weights(students, plan.student, context)
    teachers, vocabularies = [], []
    for source, layout, own in zip(plan.teachers, plan.teacher_layouts, cross_tokenizer, strict=True):
        chunks = build_chunks(source.shape, layout, options, context, None if own else vocab)
        load_weights(chunks, source, context)
        vocabularies.append(own and place_beside(students[-1], chunks[-1], own, vocab, context))
        if config.teachers[len(teachers)].residency == "host":
            HostResidency(chunks, context.device)
        teachers.append(chunks)
    chunks = wrap_stages(join_stages(students, teachers), config, context)
    optimizer = build_optimizer(chunks, config, context)
    context.seed(config.training.seed)  # whatever building the models drew, training starts from the seed
    schedule = build_schedule(plan, students, options, context, cross_tokenizer)
    engine = Engine(config.kd, context, schedule, chunks, optimizer, teacher_losses(plan, vocabularies))
    return engine, TrainingState(students, optimizer.optimizer, optimizer.scheduler)


def teacher_losses(plan: Plan, vocabularies: Sequence[ChunkVocabulary | None]) -> tuple[TeacherLoss, ...]:
    """How each teacher is compared; the shares are the weights divided by their sum."""
    settings = plan.config.teachers[: len(plan.teacher_names)]
    total = sum(one.weight for one in settings)
    vocabularies = list(vocabularies) or [None] * len(settings)
    return tuple(
        TeacherLoss.of_kd(plan.config.kd, one, name, one.weight / total, vocabulary)
        for one, name, vocabulary in zip(settings, plan.teacher_names, vocabularies, strict=True)
    )


def place_beside(
    student: LanguageModel,
    teacher: LanguageModel,
    own: CrossTokenizerTeacher,
    student_rows: int,
    context: ParallelContext,
) -> ChunkVocabulary | None:
    """Put the rows of the teacher's head where the student has the same tokens; None where no head is."""
    if not teacher.post_process:
        return None
    slots = TeacherSlots.build(
        own.relation,
        student_rows,
        teacher.shape.vocab_size,
        context.tp_size,
        student_vocab_size=student.shape.vocab_size,
    )
    teacher.select_head_rows(torch.from_numpy(slots.teacher_ids[context.tp_rank]).to(context.device))
    vocabulary = ChunkVocabulary.build(
        slots,
        student.shape.vocab_size,
        context.tp_rank,
        relation=own.relation,
        loss=own.settings.loss,
        relaxed=own.settings.relaxed_map,
    )
    return vocabulary.to(context.device)


def build_schedule(
    plan: Plan,
    students: list[LanguageModel],
    options: ModelOptions,
    context: ParallelContext,
    cross_tokenizer: Sequence[CrossTokenizerTeacher | None] = (),
) -> PipelineSchedule:
    """The schedule and its communicator; the teachers' hidden states ride along."""
    seq_length, student_config = plan.config.training.seq_length, students[0].config
    shards = context.sequence_shards(student_config.sequence_parallel)
    teacher_hidden_shapes = []
    for source, own in zip(plan.teachers, cross_tokenizer, strict=True):
        tokens = plan.batch.micro_batch_size * (own.seq_length if own else seq_length)
        teacher_hidden_shapes.append((tokens // shards, 1, source.shape.hidden_size))
    if teacher_hidden_shapes:
        communicator = TeacherHiddenCommunicator(
            context.pp_group, student_config, teacher_hidden_shapes, options.dtype
        )
    else:
        communicator = P2PCommunicator(context.pp_group, student_config)
    return PipelineSchedule(context, communicator, plan.batch.micro_batch_size * seq_length)


def load_weights(chunks: list[LanguageModel], source: ModelSource, context: ParallelContext) -> None:
    """Fill the chunks of one model; each rank reads only its slices."""
    if source.load is not None:
        load_checkpoint(source.load, TrainingState(chunks), context)
        return
    for chunk in chunks:
        load_hf_weights(
            chunk,
            source.shape,
            source.hf,
            first_layer=chunk.first_layer,
            tp_rank=context.tp_rank,
            tp_size=context.tp_size,
        )
