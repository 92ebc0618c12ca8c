"""Build the engine of a run: all models under one schedule, the teachers' losses, and the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist

from mkd.checkpoint.distributed import TrainingState, everything
from mkd.checkpoint.hf.hf_rounded import RoundedWeights
from mkd.config.schema import Config
from mkd.kinds.known_kinds import data_term
from mkd.kinds.routed.route_setup import run_tags
from mkd.models.builder import common_padded_vocab_size, join_stages
from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import PipelineCommunicator
from mkd.parallel.side_links import SideLinks
from mkd.plan.advice.cuda_graphs import planned_graphs
from mkd.plan.forecast import PlannedPrefetch
from mkd.plan.models.lora_shape import is_factor
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.sides import requests_ahead
from mkd.resolve.run_plan import Plan
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.run.build_models import build_heads, build_running_teachers, build_students, model_options
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
    tags: Sequence[str] = (),  # of the packs, in the order of their numbers
    links: Mapping[int, SideLinks] = NO_LINKS,  # with teachers on processes of their own, by their numbers
) -> tuple[Engine, TrainingState]:
    """Return all models with their weights, joined stage by stage, under one schedule and one optimizer."""
    config = plan.config
    options = model_options(config)
    # One padded size for all models with the student's tokens: their shards of the vocabulary must match.
    vocab = common_padded_vocab_size(plan.facts.pair.same_tokens, context.tp_size)
    students = build_students(plan, options, context, vocab)
    setups = list(plan.setups if setups is None else setups)
    teachers = build_running_teachers(plan, setups, students, options, context, vocab)
    heads = build_heads(setups, students[-1], vocab, options.dtype, context, links)
    numbers = plan.facts.read_teachers
    joined = join_stages(students, teachers, heads, (*numbers, *plan.facts.head_numbers))
    # Before DDP, whose last step of backward calls the teachers that run ahead.
    schedule = build_schedule(plan, setups, joined, options, context, links)
    after_backward = schedule.prefetch.finish if schedule.prefetch else None
    stages = wrap_stages(joined, config, context, after_backward)
    if context.platform.is_cuda and context.platform.transformer_engine:
        graph_layers(stages, context, *agreed_graphs(plan, context, students))
    running = (setups[number] for number in numbers)
    averages = build_averages(stages, {one.name: one.settings for one in running})
    optimizer = build_optimizer(stages, config, context, rounded_weights(plan, students, context), averages)
    # Building the models drew random numbers; training starts from the seed.
    context.seed(config.training.seed)
    engine = Engine(
        kd=config.kd,
        context=context,
        schedule=schedule,
        stages=stages,
        optimizer=optimizer,
        teachers=build_teachers(config, setups),
        experts=ExpertMonitor.of(students, context, config.training.moe_router_bias_update_rate),
        data_term=data_term(config, plan.scored_ids),
        rounded_inputs=rounded_inputs(config, students, optimizer.rounded, context),
        tags=run_tags(plan, tags),
    )
    holds = is_factor if config.lora.is_on else everything
    return engine, TrainingState(students, optimizer.optimizer, optimizer.scheduler, holds, averages)


def build_remote_states(
    plan: Plan,
    setups: Sequence[TeacherSetup],
    options: ModelOptions,
    context: ParallelContext,
    links: Mapping[int, SideLinks],
) -> tuple[RemoteStates, ...]:
    """Return what asks the teachers on processes of their own for states, in their order."""
    found = []
    for place, (index, link) in enumerate(links.items()):
        shape = setups[index].head_shape
        assert shape is not None, "a teacher that runs elsewhere has its head here"
        states = RemoteStates(
            link,
            context,
            place=place,
            needed=index,
            shape=state_shape(plan, setups[index], shape, context),
            dtype=options.dtype,
            sequence_parallel=options.sequence_parallel,
            ahead=requests_ahead(plan.config.teachers[index], context.dp_size),
        )
        found.append(states)
    return tuple(found)


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
    setups: Sequence[TeacherSetup],
    stages: list[DistillationStage],
    options: ModelOptions,
    context: ParallelContext,
    links: Mapping[int, SideLinks] = NO_LINKS,
) -> PipelineSchedule:
    """Return the schedule and its communicator, which carries the teachers' hidden states, if there are any.

    It runs the teachers ahead, as far as --teacher-prefetch says. Collective.
    """
    teachers = zip(plan.facts.read_teachers, plan.teachers, strict=True)
    shapes = [state_shape(plan, setups[number], one.shape, context) for number, one in teachers]
    communicator = PipelineCommunicator(context.pp_group, stages[0].config, shapes)
    planned, prefetch = agreed_prefetch(plan, context) if plan.teachers else None, None
    if planned is not None:
        prefetch = TeacherPrefetch(planned.plan, stages[0], communicator, context)
    remote = build_remote_states(plan, setups, options, context, links)
    tokens = plan.batch.micro_batch_size * plan.config.training.seq_length
    return PipelineSchedule(context, communicator, tokens, prefetch, remote)


def state_shape(
    plan: Plan, setup: TeacherSetup, shape: ModelShape, context: ParallelContext
) -> tuple[int, int, int]:
    """Return the shape of a teacher's hidden state on this process, [t_i / cp (/ tp), 1, h_i]."""
    tokens = plan.batch.micro_batch_size * (setup.seq_length or plan.config.training.seq_length)
    shards = context.sequence_shards(plan.config.parallel.sequence_parallel)
    return tokens // shards, 1, shape.hidden_size


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
