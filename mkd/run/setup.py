"""Wire a run: from a plan to a `Run`.

Only this file and the builders of data and engine know all the parts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from mkd.checkpoint.distributed import TrainingState, load_checkpoint
from mkd.checkpoint.folders import TrainingPosition, read_state
from mkd.checkpoint.rounded_runs import ROUNDING
from mkd.config.options import flat_settings
from mkd.config.schema import Config
from mkd.data.images.row_images import ImageLayout
from mkd.data.loader import EvalStream, TrainStream
from mkd.errors import DataError
from mkd.evaluation.evaluate import is_evaluated
from mkd.evaluation.task_evaluator import TaskEvaluator
from mkd.kinds.averaged.averaged_teachers import follows_student
from mkd.kinds.known_kinds import METRICS
from mkd.kinds.routed.route_setup import teacher_routes
from mkd.kinds.sampled.rollout_stream import RolloutStream
from mkd.kinds.sampled.rollouts_setup import build_rollouts
from mkd.kinds.texts import Texts
from mkd.log.loggers.known_loggers import start_loggers
from mkd.log.loggers.logger import LoggerStart
from mkd.log.progress import build_lines
from mkd.log.records import curve, read_records, split_of
from mkd.log.writers import JsonlWriter, MetricLogger, set_aside
from mkd.models.stage import take_teacher_ms
from mkd.operations.cleanup import Cleanup
from mkd.operations.console import LOG
from mkd.operations.crash_loop import count_crashes
from mkd.operations.phases import Phases
from mkd.operations.profiling import Profiler
from mkd.operations.run_folders import log_folder, logs_of_another_run
from mkd.operations.signals import Signals
from mkd.operations.stopping import StopNotice, Stopper
from mkd.operations.watchdog import Watchdog
from mkd.parallel.agreement import on_rank_0, require_same_choices
from mkd.parallel.context import ParallelContext
from mkd.parallel.side_groups import Launch
from mkd.plan.models.parameters import saved_bytes
from mkd.plan.sides import apart_teachers, require_even_row, sent_rows, sides_of
from mkd.platform import Platform
from mkd.resolve.run_plan import Plan
from mkd.run.build_engine import build_engine
from mkd.run.checkpoints import build_saver, describe_resume, find_start, lock_save, take_identity
from mkd.run.loop import DataStreams, Guards, Progress, Run
from mkd.run.one_model import join
from mkd.run.read_texts import describe_texts, read_texts
from mkd.run.student_side import end_teachers, idle_share, launch_timeout, links_of_student
from mkd.train.layer_graphs import graph_bytes
from mkd.train.nonfinite import NonFinitePolicy
from mkd.train.remote_states import take_wait_ms
from mkd.train.report import Figures, Reporter, peak_memory_gib
from mkd.train.spikes import SpikeWatch
from mkd.train.step import Engine


def build_run(
    plan: Plan,
    platform: Platform,
    signals: Signals | None = None,
    watchdog: Watchdog | None = None,
    cleanup: Cleanup | None = None,  # the caller enters it, so that it also runs if this function fails
    launch: Launch | None = None,  # all processes, if some are teachers' own; None: this side is alone
) -> Run:
    """Join the process group, build data, models, optimizer and reporter, and load a checkpoint."""
    config, cleanup, signals = plan.config, cleanup or Cleanup(), signals or Signals()
    if launch is not None:
        launch.join(sides_of(config, launch.size)[0], platform, launch_timeout(config))
    context = join(config, plan.facts.pair.sizes, plan.facts.virtual_stages, platform)
    watchdog = watchdog or Watchdog.idle(context.rank, context.world_size)
    watchdog.meet_peers(launch)  # as early as ranks can talk: from here on a killed rank is noticed
    phases = Phases(watchdog)
    # Before anything is written: another run may be using the folder.
    notice = begin(plan, context, phases, cleanup, signals)
    # Text before models: bad records end the run before weights are read.
    plan, texts, tasks = read_texts(plan, context, phases, cleanup, signals)
    # The identity covers the data, and is compared with the checkpoint's before weights are read.
    run_identity = take_identity(plan, texts, context)
    start_folder = find_start(plan, run_identity, context)
    for index in apart_teachers(plan.config):
        require_even_row(plan.config, index, texts.teachers[index].seq_length)
    links = {} if launch is None else links_of_student(plan.config, launch, context)
    engine, state = build_engine(plan, context, texts.teachers, texts.tag_names, links)
    cleanup.add(partial(end_teachers, engine.schedule.remote))
    position = load_start(start_folder, engine, state, notice)
    start = read_state(start_folder) if start_folder else {}
    # `gap_closed` compares with the evaluation before the first step, if it was of the same thing.
    first = {"evaluation": start.get("evaluation", run_identity.get("evaluation"))}
    has_baseline = first["evaluation"] == run_identity.get("evaluation")
    # After the checkpoint, whose position says which records of metrics.jsonl are still valid.
    reporter = build_reporter(plan, context, position, engine, has_baseline, watchdog)
    reporter.go_on(start.get("open_interval", {}))
    cleanup.add(lambda error: reporter.close())
    for line in describe_texts(plan, texts, tasks):
        LOG.info(line)
    # After the engine, whose models sample, and from the checkpoint's position on.
    known: Any = run_identity.get("fingerprints", {})
    rollouts, meter = build_rollouts(plan, engine, state, texts, position, phases, known, signals)
    streams = build_streams(plan, context, texts, tasks, position.consumed_samples, rollouts)
    guards = build_guards(plan, engine, rollouts or texts.train_set, signals)
    phases.follow(guards.stopper)  # it learns from every step how long the next may take
    run = Run(
        plan=plan,
        engine=engine,
        state=state,
        data=streams,
        progress=Progress(position, kept_iteration=position.iteration, kept_in=start_folder),
        guards=guards,
        reporter=reporter,
        saver=build_saver(plan, context, run_identity | first, phases, engine.rounding_entry),
        meter=meter,
        phase=phases,
    )
    run.progress.due = still_due(run)  # reads the records that the reporter has kept
    return run


def begin(
    plan: Plan, context: ParallelContext, phases: Phases, cleanup: Cleanup, signals: Signals
) -> StopNotice:
    """Lock the save folder, count crashes, and start to profile. `cleanup` ends all three. Collective.

    Return what keeps the texts of `signals` up to date. Raises UsageError if ranks mean different folders.
    """
    require_same_choices(plan.choices)  # before the lock, which is in a folder that ranks may have chosen
    config, notice = plan.config, StopNotice(signals, plan.config.checkpoint.save)
    phases.follow(notice)
    lock = lock_save(config.checkpoint, context)
    if lock is not None:
        cleanup.add(lambda error: lock.release())
    crashes = count_crashes(config, context)  # under the lock: another run's steps are not a crash
    cleanup.add(crashes.end)
    signals.when_forced.append(crashes.forgive)
    profiler = Profiler.from_config(config.log, log_folder(config) / "profile", context.rank)
    cleanup.add(profiler.close)
    phases.follow(crashes)
    phases.follow(profiler)
    return notice


def load_start(
    folder: Path | None, engine: Engine, state: TrainingState, notice: StopNotice
) -> TrainingPosition:
    """Load the checkpoint in `folder`, if there is one, say so, and return its position. Collective."""
    if folder is None:
        return TrainingPosition()
    with engine.optimizer.state_on_device():
        given: dict[str, Any] = dict(is_verified=True, has_tower=True, note=LOG.info)  # the student's weights
        position = load_checkpoint(folder, state, engine.context, **given)
    engine.optimizer.round_weights()  # checkpoints hold exact ones
    if engine.rounded_inputs is not None:
        engine.rounded_inputs.load(read_state(folder).get(ROUNDING, {}))
    notice.keep(folder, position.iteration)
    LOG.info(describe_resume(folder, position.iteration))
    return position


def build_streams(
    plan: Plan,
    context: ParallelContext,
    texts: Texts,
    tasks: TaskEvaluator | None,
    consumed_samples: int,
    rollouts: RolloutStream | None = None,
) -> DataStreams:
    """Build this rank's batches for training, after `consumed_samples`, and of the held-out set.

    `rollouts` take the place of the former.
    """
    data, training = plan.config.data, plan.config.training
    sizes: dict[str, Any] = dict(
        micro_batch_size=plan.batch.micro_batch_size,
        global_batch_size=plan.batch.global_batch_size,
        data_parallel_rank=context.dp_rank,
        data_parallel_size=context.dp_size,
        shard=context.row_shard,
        images=ImageLayout.of_context(context, plan.config.parallel.sequence_parallel),
        routes=teacher_routes(plan, texts.tag_names, context),
        host_rows=sent_rows(plan.config, context.holds_last_stage),
        num_workers=data.num_workers,
        pin_memory=context.platform.is_cuda,
    )
    held_out = None
    if texts.valid_set is not None and training.eval_iters:
        held_out = EvalStream(texts.valid_set, eval_iters=training.eval_iters, **sizes)
    stream = rollouts or TrainStream(
        texts.train_set, seed=training.seed, shuffle=data.shuffle, consumed_samples=consumed_samples, **sizes
    )
    return DataStreams(stream, held_out, tasks)


def build_guards(plan: Plan, engine: Engine, samples, signals: Signals) -> Guards:
    """Build the checks that run after every step. `samples` has the `documents_of` a sample."""
    config, context = plan.config, engine.context
    saves = bool(config.checkpoint.save)
    save_bytes = saved_bytes(config, plan.student.shape)
    stopper = Stopper(
        context,
        signals,
        config.training.exit_duration_in_mins,
        first_save_bytes=save_bytes if saves else 0,
        save_interval_in_mins=config.checkpoint.minutes_without_save if saves else 0,
        slow_saves_are_rare=config.checkpoint.save_interval_in_mins is None,
    )
    if stopper.note:
        LOG.warning(stopper.note)
    spikes = log_folder(config) / "loss_spikes.jsonl" if context.rank == 0 else None
    non_finite = NonFinitePolicy.from_config(config, engine, samples)
    return Guards(stopper, non_finite, SpikeWatch(samples, spikes))


def still_due(run: Run) -> frozenset[str]:
    """Return the parts of an evaluation that a stop cut short: they have no record. Collective."""
    iteration = run.position.iteration
    if not is_evaluated(iteration, run.config.training):
        return frozenset()

    def unreadable(error: Exception) -> DataError:
        do = "repair metrics.jsonl in the log folder, or choose another --log-dir"
        return DataError(f"cannot read metrics: {error}", "", do, code="metrics-unreadable")

    records = on_rank_0(lambda: read_records(log_folder(run.config)), unreadable)
    recorded = {split_of(record) for record in records or () if record["iteration"] == iteration}
    return run.data.parts - run.engine.context.broadcast_object(recorded)


def build_reporter(
    plan: Plan,
    context: ParallelContext,
    position: TrainingPosition,
    engine: Engine,
    has_baseline: bool,
    watchdog: Watchdog,
) -> Reporter:
    """Build the reporter, with metrics.jsonl and loggers on rank 0 only.

    Records after the resumed iteration are dropped and rewritten. `has_baseline` means that the evaluation
    before the first step, if there is one, had this run's loss, teachers and held-out set.
    """
    config = plan.config
    logger, metrics = MetricLogger(), log_folder(config) / "metrics.jsonl"
    if context.rank == 0:
        is_own = config.checkpoint.load and not logs_of_another_run(config)
        kept = None if is_own else set_aside(metrics)
        if kept is not None:
            LOG.info("the metrics of the earlier run in the same folder are now in %s", kept)
        start = LoggerStart(config.log, log_folder(config), flat_settings(config), position.iteration > 0)
        logger = MetricLogger(JsonlWriter(metrics), start_loggers(start))
    # A fresh run also replaces the evaluation before the first step.
    logger.truncate_after(position.iteration or -1)
    of_valid = (
        curve(read_records(log_folder(config)), "valid", "kd_loss") if logger.metrics and has_baseline else {}
    )
    return Reporter(
        context=context,
        logger=logger,
        student=plan.student.shape,
        teachers={n: one.shape for n, one in zip(plan.facts.read_teachers, plan.teachers, strict=True)},
        kd_ratio=config.kd.kd_ratio,
        log_interval=config.log.log_interval,
        lines=build_lines(
            config.log.log_format, config.training.train_iters, plan.batch.global_batch_size, METRICS.metrics
        ),
        metrics=METRICS,
        global_batch_size=plan.batch.global_batch_size,
        seq_length=config.training.seq_length,
        has_own_rows=any(one.settings.has_own_row for one in plan.setups),
        teachers_move=any(follows_student(one.settings) for one in plan.setups),
        initial_kd=of_valid.get(0),
        updates=config.grpo.rollout_updates,
        is_frozen=config.lora.is_on,
        of_interval=interval_figures(config, engine, watchdog),
    )


def interval_figures(config: Config, engine: Engine, watchdog: Watchdog) -> Figures:
    """Return the metrics of a log interval that no single step has."""
    context, stages, remote = engine.context, engine.stages, engine.schedule.remote
    idle = idle_share(config, remote, context, watchdog)

    def over(total: float | None, divisor: float) -> float | None:
        return None if total is None or not divisor else total / divisor

    return {
        "peak_memory_gib": lambda interval: peak_memory_gib(context, graph_bytes(stages)),
        "teacher_share": lambda interval: over(take_teacher_ms(stages), interval.timed_ms),
        "teacher_wait_ms": lambda interval: over(take_wait_ms(remote, context), interval.steps),
        "teacher_idle_share": lambda interval: idle(interval.timed_ms),
    }
