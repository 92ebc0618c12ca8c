"""Build the models with their weights, the teachers' losses, the schedule and the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from mkd.checkpoint.distributed import (
    TrainingState,
    base_alone,
    everything,
    load_checkpoint,
    load_layer_by_layer,
)
from mkd.checkpoint.hf.hf_adapters import start_adapters
from mkd.checkpoint.hf.hf_rounded import RoundedWeights
from mkd.checkpoint.hf.hf_weights import load_hf_weights
from mkd.config.models import EMA, LIVE
from mkd.config.schema import Config, TeacherConfig
from mkd.errors import MkdError, collect_error
from mkd.kinds.known_kinds import data_term
from mkd.kinds.placed.known_places import PLACES, PRECISIONS
from mkd.kinds.routed.route_setup import run_tags
from mkd.models.attention_check import agreed_own_attention
from mkd.models.builder import (
    build_base_parts,
    build_copied_parts,
    build_model_parts,
    common_padded_vocab_size,
    join_stages,
    train_parts,
)
from mkd.models.language_model import LanguageModel
from mkd.models.lora import freeze_base, rounded_loading
from mkd.models.placed.converted_weights import ConvertedWeights, LayerMemory
from mkd.models.placed.residency import layer_parameters
from mkd.models.stage import DistillationStage
from mkd.models.stored_head import StoredHead
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.agreement import agree
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import PipelineCommunicator
from mkd.parallel.side_links import SideLinks, receive_head
from mkd.parallel.state_links import StateLinks
from mkd.plan.advice.cuda_graphs import planned_graphs
from mkd.plan.forecast import PlannedPrefetch
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.lora_shape import LoRAShape, is_factor
from mkd.plan.sides import requests_ahead
from mkd.resolve.model_source import ModelSource
from mkd.resolve.run_plan import Plan
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.train.expert_monitor import ExpertMonitor
from mkd.train.input_rounding import RoundedInputs
from mkd.train.layer_graphs import graph_layers
from mkd.train.moving_average import build_averages
from mkd.train.optimizer import build_optimizer, wrap_stages
from mkd.train.remote_states import RemoteStates
from mkd.train.schedule import PipelineSchedule
from mkd.train.step import Engine
from mkd.train.teacher_prefetch import TeacherPrefetch
from mkd.train.teachers.base import Teacher, divergence_settings

LOG = logging.getLogger("mkd")
NO_LINKS: Mapping[int, SideLinks] = MappingProxyType({})


def build_engine(
    plan: Plan,
    context: ParallelContext,
    setups: Sequence[TeacherSetup] | None = None,  # of the teachers; None: those of the plan
    teacher_seq_lengths: Sequence[int] = (),  # for each teacher, tokens of a pack; (): the student's number
    tags: Sequence[str] = (),  # of the packs, in the order of their numbers
    links: Mapping[int, SideLinks] = NO_LINKS,  # with teachers on processes of their own, by their numbers
) -> tuple[Engine, TrainingState]:
    """Return all models with their weights, joined stage by stage, under one schedule and one optimizer."""
    config = plan.config
    options = model_options(config)
    lora = LoRAShape.of(config)
    # One padded size for all models with the student's tokens: their shards of the vocabulary must match.
    vocab = common_padded_vocab_size(plan.facts.pair.same_tokens, context.tp_size)
    layouts = plan.facts.layouts
    students = build_students(plan, lora, options, context, vocab)
    models, setups = [], list(plan.setups if setups is None else setups)
    contexts = expert_contexts(plan, context)
    numbers = plan.facts.read_teachers
    running = zip(numbers, plan.teachers, layouts.teachers, contexts, strict=True)
    for number, source, layout, own_context in running:
        setup = setups[number]
        rows = None if setup.has_own_tokens else vocab
        if setup.settings.weights == LIVE:
            parts = students
        elif setup.settings.weights == EMA:
            like = replace(options, lora=lora, releases_layers=lora is not None)
            parts = build_copied_parts(students, plan.facts.layouts.student, like, context, vocab)
        elif PLACES.of(setup.settings).shares_base:
            apart = replace(options, norms_apart=True, releases_layers=True)
            build = partial(build_model_parts, source.shape, layout, apart, own_context, rows)
            parts = build_base_parts(students, build)
        else:
            parts = build_teacher_parts(source, setup.settings, layout, options, own_context, rows)
        if parts[-1].post_process:
            setups[number] = setup.beside(students[-1], parts[-1], vocab, context)
        models.append(parts)
    heads = build_heads(setups, students[-1], vocab, options.dtype, context, links)
    joined = join_stages(students, models, heads, (*numbers, *plan.facts.head_numbers))
    # Before DDP, whose last step of backward calls the teachers that run ahead.
    schedule = build_schedule(plan, joined, options, context, teacher_seq_lengths, links)
    after_backward = schedule.prefetch.finish if schedule.prefetch else None
    stages = wrap_stages(joined, config, context, after_backward)
    if context.platform.is_cuda and context.platform.transformer_engine:
        graph_layers(stages, context, *agreed_graphs(plan, context, students))
    averages = build_averages(stages, [setups[number].settings for number in numbers])
    optimizer = build_optimizer(stages, config, context, rounded_weights(plan, students, context), averages)
    # Building the models drew random numbers; training starts from the seed.
    context.seed(config.training.seed)
    teachers = build_teachers(config, setups)
    experts = ExpertMonitor.of(students, context, config.training.moe_router_bias_update_rate)
    instead_of_ce = data_term(config, plan.scored_ids)
    inputs = rounded_inputs(config, students, optimizer.rounded, context)
    others = experts, instead_of_ce, inputs, run_tags(plan, tags)
    engine = Engine(config.kd, context, schedule, stages, optimizer, teachers, *others)
    holds = everything if lora is None else is_factor
    return engine, TrainingState(students, optimizer.optimizer, optimizer.scheduler, holds, averages)


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


def build_heads(
    setups: list[TeacherSetup],
    student: LanguageModel,
    vocab: int,
    dtype: torch.dtype,
    context: ParallelContext,
    links: Mapping[int, SideLinks] = NO_LINKS,
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


def build_remote_states(
    plan: Plan,
    options: ModelOptions,
    context: ParallelContext,
    links: Mapping[int, SideLinks],
    teacher_seq_lengths: Sequence[int] = (),
) -> tuple[RemoteStates, ...]:
    """Return what asks the teachers on processes of their own for states, in their order."""
    packs, found = plan.batch.micro_batch_size, []
    for place, (index, link) in enumerate(links.items()):
        shape = plan.setups[index].head_shape
        assert shape is not None, "a teacher that runs elsewhere has its head here"
        length = teacher_seq_lengths[index] if teacher_seq_lengths else plan.config.training.seq_length
        tokens = packs * length // context.sequence_shards(options.sequence_parallel)
        states = RemoteStates(
            link,
            context,
            place=place,
            needed=index,
            shape=(tokens, 1, shape.hidden_size),
            dtype=options.dtype,
            sequence_parallel=options.sequence_parallel,
            ahead=requests_ahead(plan.config.teachers[index], context.dp_size),
        )
        found.append(states)
    return tuple(found)


def build_students(
    plan: Plan, lora: LoRAShape | None, options: ModelOptions, context: ParallelContext, vocab: int
) -> list[LanguageModel]:
    """Return the student's parts with their weights; what is frozen requires no gradient. Collective."""
    config = plan.config
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


def rounded_weights(
    plan: Plan, students: Sequence[LanguageModel], context: ParallelContext
) -> RoundedWeights | None:
    """Return the matrices of this rank's parts of the student that are rounded; None: the run rounds none."""
    rounding = plan.config.rounding.rounding
    parts = [(part, part.first_layer) for part in students]
    return None if rounding is None else RoundedWeights(parts, plan.student.shape, rounding, context)


def rounded_inputs(
    config: Config,
    students: Sequence[LanguageModel],
    weights: RoundedWeights | None,
    context: ParallelContext,
) -> RoundedInputs | None:
    """Let this rank's parts of the student round the inputs of rounded matrices; None: the run does not."""
    if weights is None or not weights.rounding.inputs:
        return None
    batches = config.rounding.calibration_batches
    return RoundedInputs.attach(students, weights.matrices, weights.rounding, context, batches)


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


def build_teachers(config: Config, setups: Sequence[TeacherSetup]) -> tuple[Teacher, ...]:
    """Return the teachers as terms of the loss.

    Their shares are the weights divided by the sum of all weights.
    """
    if config.kd.kd_ratio == 0:  # a model that runs then is a reference
        return ()
    total = sum(one.settings.weight for one in setups)
    return tuple(
        one.term(one.settings.weight / total, divergence_settings(config.kd, one.settings)) for one in setups
    )


def build_schedule(
    plan: Plan,
    stages: list[DistillationStage],
    options: ModelOptions,
    context: ParallelContext,
    teacher_seq_lengths: Sequence[int] = (),  # for each teacher, tokens of a pack; (): the student's number
    links: Mapping[int, SideLinks] = NO_LINKS,
) -> PipelineSchedule:
    """Return the schedule and its communicator, which carries the teachers' hidden states, if there are any.

    It runs the teachers ahead, as far as --teacher-prefetch says. Collective.
    """
    seq_length, student_config = plan.config.training.seq_length, stages[0].config
    shards = context.sequence_shards(student_config.sequence_parallel)
    lengths = teacher_seq_lengths or [seq_length] * len(plan.setups)
    packs, teachers = plan.batch.micro_batch_size, zip(plan.facts.read_teachers, plan.teachers, strict=True)
    shapes = [(packs * lengths[number] // shards, 1, one.shape.hidden_size) for number, one in teachers]
    communicator = PipelineCommunicator(context.pp_group, student_config, shapes)
    # Agreed before the links are made: that is collective, so no rank may do it alone.
    planned, prefetch = agreed_prefetch(plan, context) if plan.teachers else None, None
    if planned is not None:
        pipeline = StateLinks.build(context, shapes, options.dtype)
        prefetch = TeacherPrefetch(planned.plan, stages[0], communicator, pipeline, context)
    remote = build_remote_states(plan, options, context, links, teacher_seq_lengths)
    return PipelineSchedule(context, communicator, packs * seq_length, prefetch, remote)


def agreed_prefetch(plan: Plan, context: ParallelContext) -> PlannedPrefetch | None:
    """Return the plan of teacher forwards ahead; None if there are none.

    `auto` looks at the memory of GPUs, which may differ: the process that wants the fewest decides.
    Collective: all-reduce MIN over all ranks.
    """
    fewest = torch.tensor(plan.forecast.states_ahead, device=context.device)
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
    if fewest < plan.forecast.states_ahead:
        LOG.warning(
            "--teacher-prefetch auto: teachers do not run ahead, because another process lacks the memory"
        )
    return plan.forecast.prefetch if fewest else None


def agreed_graphs(
    plan: Plan, context: ParallelContext, students: Sequence[LanguageModel]
) -> tuple[bool, list[bool], bool]:
    """Return which models run as CUDA graphs: the student, and each teacher that runs.

    The last value is True if the student's packs without graphs are recomputed. The choice looks at the
    memory of GPUs, which may differ: what one process lacks, all do without. Collective: all-reduce MIN over
    all ranks.
    """
    planned = planned_graphs(plan.forecast)
    is_graphed = planned.student and not any(part.has_own_attention for part in students)
    has_room = [is_graphed, not planned.recomputes, *planned.teachers]
    mask = torch.tensor(has_room, dtype=torch.int32, device=context.device)
    dist.all_reduce(mask, op=dist.ReduceOp.MIN)
    student, keeps, *teachers = map(bool, mask.tolist())
    return student, teachers, not keeps


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


def _loading(memory: LayerMemory, part: LanguageModel, layer: int) -> AbstractContextManager[None]:
    return memory(part.decoder.layers[layer])
