"""Build the models of a run with their weights: the student, the teachers that run, the heads of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from mkd.checkpoint.distributed import TrainingState, base_alone, load_checkpoint, load_layer_by_layer
from mkd.checkpoint.hf.hf_adapters import start_adapters
from mkd.checkpoint.hf.hf_weights import load_hf_weights, tell_of_unfilled
from mkd.config.models import EMA, LIVE
from mkd.config.schema import Config, TeacherConfig
from mkd.errors import MkdError, collect_error
from mkd.kinds.placed.known_places import PLACES, PRECISIONS
from mkd.models.attention_check import agreed_own_attention
from mkd.models.builder import build_base_parts, build_copied_parts, build_model_parts, train_parts
from mkd.models.language_model import LanguageModel
from mkd.models.lora import freeze_base, rounded_loading
from mkd.models.placed.converted_weights import ConvertedWeights, LayerMemory
from mkd.models.placed.residency import layer_parameters
from mkd.models.stored_head import StoredHead
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.agreement import agree
from mkd.parallel.context import ParallelContext
from mkd.parallel.side_links import SideLinks, receive_head
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.lora_shape import LoRAShape
from mkd.resolve.model_source import ModelSource
from mkd.resolve.run_plan import Plan
from mkd.resolve.teacher_setup import TeacherSetup


def model_options(config: Config) -> ModelOptions:
    """Return the options that all models of a run have."""
    return ModelOptions(
        dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute_granularity=config.training.recompute_granularity,
        recompute_method=config.training.recompute_method,
        recompute_num_layers=config.training.recompute_num_layers,
        recompute_modules=config.training.recompute_modules,
        deterministic=config.training.deterministic_mode,
        balance_coeff=config.training.moe_aux_loss_coeff,
        z_coeff=config.training.moe_z_loss_coeff,
    )


def build_students(
    plan: Plan, options: ModelOptions, context: ParallelContext, vocab: int
) -> list[LanguageModel]:
    """Return the student's parts with their weights; what is frozen requires no gradient. Collective."""
    config, lora = plan.config, LoRAShape.of(plan.config)
    is_rounded = lora is not None and lora.is_rounded  # layer by layer: the whole base may not fit
    apart = config.rounding.round_activations
    recipe = config.student.fp8_recipe if config.student.precision == "fp8" else None
    options = replace(options, lora=lora, norms_apart=apart, releases_layers=is_rounded, fp8_recipe=recipe)
    options = replace(options, own_attention=agreed_own_attention(plan.student.shape, context, options.dtype))
    students = build_model_parts(plan.student.shape, plan.facts.layouts.student, options, context, vocab)
    load_weights(students, plan.student, context, rounded_loading if is_rounded else None)
    train_parts(students, config.student.train_parts)  # before DDP, which takes what requires a gradient
    if lora is not None:
        add_adapters(students, context, config.training.seed)
    return students


def add_adapters(students: Sequence[LanguageModel], context: ParallelContext, seed: int) -> None:
    """Give the students' adapters their first values, and freeze everything else."""
    for part in students:
        start_adapters(part, part.shape, context, part.first_layer, seed)
    freeze_base(students)


def build_running_teachers(
    plan: Plan,
    setups: list[TeacherSetup],
    students: list[LanguageModel],
    options: ModelOptions,
    context: ParallelContext,
    vocab: int,
) -> list[list[LanguageModel]]:
    """Return this rank's parts of each teacher that runs, with their weights. Collective.

    Teachers whose last part is here are fitted to the student in `setups`.
    """
    models, lora, layouts = [], LoRAShape.of(plan.config), plan.facts.layouts
    contexts = expert_contexts(plan, context)
    running = zip(plan.facts.read_teachers, plan.teachers, layouts.teachers, contexts, strict=True)
    for number, source, layout, own_context in running:
        setup = setups[number]
        rows = None if setup.has_own_tokens else vocab
        if setup.settings.weights == LIVE:
            parts = students
        elif setup.settings.weights == EMA:
            like = replace(options, lora=lora, releases_layers=lora is not None)
            parts = build_copied_parts(students, layouts.student, like, context, vocab)
        elif PLACES.of(setup.settings).shares_base:
            apart = replace(options, norms_apart=True, releases_layers=True)
            build = partial(build_model_parts, source.shape, layout, apart, own_context, rows)
            parts = build_base_parts(students, build)
        else:
            parts = build_teacher_parts(source, setup.settings, layout, options, own_context, rows)
        if parts[-1].post_process:
            setups[number] = setup.beside(students[-1], parts[-1], vocab, context)
        models.append(parts)
    return models


def expert_contexts(plan: Plan, context: ParallelContext) -> list[ParallelContext]:
    """Return the context of each teacher: the run's, with the teacher's own expert parallelism. Collective.

    Groups are made once for every size.
    """
    contexts = {context.ep.size: context}
    teachers, minutes = plan.facts.planned_teachers, plan.config.parallel.distributed_timeout_minutes
    sizes = [context.ep.size if one.shape.moe is None else one.sizes.expert for one in teachers]
    for size in sorted(set(sizes) - contexts.keys()):  # all ranks must make groups in the same order
        contexts[size] = context.with_expert_parallel(size, minutes)
    return [contexts[size] for size in sizes]


def build_teacher_parts(
    source: ModelSource,
    settings: TeacherConfig,
    layout: PipelineLayout,
    options: ModelOptions,
    context: ParallelContext,
    padded_vocab_size: int | None = None,
) -> list[LanguageModel]:
    """Build this rank's parts of a teacher, with their weights where its residency wants them. Collective.

    Unless the weights stay on the device as they are, they are loaded layer by layer.
    """
    place, precision = PLACES.of(settings), PRECISIONS.of(settings)
    options = replace(options, releases_layers=place.streams or precision.converts)
    parts = build_model_parts(source.shape, layout, options, context, padded_vocab_size)
    # Before the stream, which moves the converted tensors and not the parameters that they replace.
    converted = precision.weights(parts, source.hf is not None)
    stream = place.stream(parts, context, converted.tensors if converted else layer_parameters)
    memory = stream.loading if stream else None
    # Last: `memory` converts a layer, or moves it away, as soon as its weights are read.
    memory = partial(converted.loading, memory=memory) if converted else memory
    load_weights(parts, source, context, memory, converted)
    return parts


def load_weights(
    parts: list[LanguageModel],
    source: ModelSource,
    context: ParallelContext,
    memory: LayerMemory | None = None,  # gives the decoder layers memory; None: they have it
    converted: ConvertedWeights | None = None,  # may keep what files store
) -> None:
    """Fill this rank's parts of one model. Each rank reads only its slices. Collective.

    If one rank finds a tensor that cannot be used, all raise its error.
    """
    if source.load is not None:
        if memory is None:
            load_checkpoint(source.load, TrainingState(parts, holds=base_alone), context)
        else:
            load_layer_by_layer(source.load, parts, context, memory)
        return
    problems: list[MkdError] = []
    for part in parts:
        load = partial(
            load_hf_weights,
            part,
            source.shape,
            source.hf,
            context,
            part.first_layer,
            layer_memory=None if memory is None else partial(_loading, memory, part),
            stored_codes=None if converted is None else converted.stored_codes,
        )
        collect_error(problems, load)
    # After all parts: a rank that raised earlier would leave the others waiting here.
    agree(problems[0] if problems else None)
    assert source.hf is not None, "the weights are in one of the two"
    tell_of_unfilled(source.hf)


def _loading(memory: LayerMemory, part: LanguageModel, layer: int) -> AbstractContextManager[None]:
    return memory(part.decoder.layers[layer])


def build_heads(
    setups: list[TeacherSetup],
    student: LanguageModel,
    vocab: int,
    dtype: torch.dtype,
    context: ParallelContext,
    links: Mapping[int, SideLinks],
) -> list[StoredHead]:
    """Return the heads of teachers of which only those are here; none unless this is the last stage.

    Teachers that run on other processes are fitted to the student in `setups`. Collective with them.
    """
    found = []
    for one in tuple(setups) if context.holds_last_stage else ():
        if one.index in links:
            shape = one.head_shape
            assert shape is not None, "a teacher that runs elsewhere has its head here"
            link, real = links[one.index], (shape.vocab_size, shape.hidden_size)
            theirs = shape.padded_vocab_size(link.others.tensor)
            rows = shape.padded_vocab_size(context.tp_size) if one.has_own_tokens else vocab
            found.append(StoredHead(shape, receive_head(link, context, real, dtype, rows, theirs)))
            setups[one.index] = one.beside(student, found[-1], vocab, context)
        elif one.head_shape is not None:
            found.append(one.head(vocab, dtype, context))
    return found
