"""The wiring: from a plan to a `Run`. With the builders of data and engine, the only files that know all the parts."""

from __future__ import annotations

from functools import partial

from mkd.checkpoint.distributed import TrainingPosition, load_checkpoint
from mkd.checkpoint.folders import read_state
from mkd.checkpoint.save_folder import checkpoint_bytes
from mkd.config.options import flat_settings
from mkd.data.loader import EvalStream, TrainStream
from mkd.errors import DataError
from mkd.evaluation.evaluate import is_evaluated
from mkd.evaluation.task_evaluator import build_tasks
from mkd.log.records import curve, read_records, split_of
from mkd.log.wandb_writer import WandbWriter
from mkd.log.writers import JsonlWriter, MetricLogger, TensorBoardWriter, set_aside
from mkd.models.stage import take_teacher_ms
from mkd.operations.crash_loop import CrashCounter, count_crashes
from mkd.operations.ending import Ending
from mkd.operations.folders import log_folder
from mkd.operations.profiling import Profiler
from mkd.operations.signals import Signals
from mkd.operations.stopping import Stopper
from mkd.operations.watchdog import MARGIN_S, Watchdog
from mkd.parallel.agreement import on_rank_0
from mkd.parallel.context import ParallelContext
from mkd.platform import Platform
from mkd.run.build_data import build_data
from mkd.run.build_engine import build_engine
from mkd.run.checkpoints import build_saver, find_start, lock_save, take_origin
from mkd.run.cross_tokenizer import find_cross_tokenizer
from mkd.run.loop import Run
from mkd.run.run_plan import Plan
from mkd.train.nonfinite import NonFinitePolicy
from mkd.train.report import Reporter
from mkd.train.spikes import SpikeWatch
from mkd.train.step import Engine


def join(plan: Plan, platform: Platform) -> ParallelContext:
    """Join the process group in the layout of the plan."""
    parallel = plan.config.parallel
    return ParallelContext.create(
        platform,
        tensor_parallel=parallel.tensor_model_parallel_size,
        pipeline_parallel=parallel.pipeline_model_parallel_size,
        context_parallel=parallel.context_parallel_size,
        virtual_stages=plan.virtual_stages,
        timeout_minutes=parallel.distributed_timeout_minutes
        + MARGIN_S / 60,  # the watchdog, which says more, comes first
    )


def build_run(
    plan: Plan,
    platform: Platform,
    signals: Signals | None = None,
    watchdog: Watchdog | None = None,
    ending: Ending | None = None,  # which the caller enters before, so that a failure in here is ended too
) -> Run:
    """Join the process group, then build data, models, optimizer and reporter, and resume if there is something to resume."""
    config, ending = plan.config, ending or Ending()
    context = join(plan, platform)
    watchdog = watchdog or Watchdog.idle(context.rank, context.world_size)
    watchdog.meet_peers()
    crashes, profiler = begin(plan, context, ending)
    tokenizer = plan.tokenizers.student
    cross_tokenizer = find_cross_tokenizer(plan, tokenizer, context)
    train_set, valid_set = build_data(plan, context, cross_tokenizer, signals, watchdog)
    tasks = build_tasks(
        config, tokenizer, min(source.shape.vocab_size for source in plan.same_vocabulary), context
    )
    origin = take_origin(plan, tokenizer, train_set, valid_set, context)
    start_folder = find_start(config.checkpoint, plan.student.shape, origin, context)
    engine, state = build_engine(plan, context, cross_tokenizer, train_set.teacher_seq_lengths)
    with engine.optimizer.state_on_device():
        position = (
            load_checkpoint(start_folder, state, context, is_verified=True)
            if start_folder
            else TrainingPosition()
        )
    train_stream, eval_stream = build_streams(plan, context, train_set, valid_set, position.consumed_samples)
    start = read_state(start_folder) if start_folder else {}
    first = {"evaluation": start.get("evaluation", origin.get("evaluation"))}  # of before the first step
    reporter = build_reporter(
        plan, context, position, engine, has_baseline=first["evaluation"] == origin.get("evaluation")
    )
    reporter.go_on(start.get("open_interval", {}))
    ending.add(lambda error: reporter.close())
    for line in describe_data(train_set, valid_set, tasks) if context.rank == 0 else ():
        reporter.note(line)
    run = Run(
        config=config,
        engine=engine,
        train_stream=train_stream,
        eval_stream=eval_stream,
        tasks=tasks,
        state=state,
        position=position,
        reporter=reporter,
        saver=build_saver(plan, context, origin | first, reporter),
        profiler=profiler,
        stopper=build_stopper(plan, context, signals or Signals()),
        non_finite=NonFinitePolicy.of(config, engine, train_set, reporter.note),
        spikes=SpikeWatch(
            train_set, log_folder(config) / "loss_spikes.jsonl" if context.rank == 0 else None, reporter.note
        ),
        crashes=crashes,
        watchdog=watchdog,
        ending=ending,
        global_batch_size=plan.batch.global_batch_size,
        assets=plan.assets,
        kept_iteration=position.iteration,
        kept_in=start_folder,
    )
    run.due = still_due(run)
    return run


def begin(plan: Plan, context: ParallelContext, ending: Ending) -> tuple[CrashCounter, Profiler]:
    """Take the save folder, count crashes, record the memory: what a run begins with, and ends with. Collective."""
    config = plan.config
    lock = lock_save(config.checkpoint, context)
    if lock is not None:
        ending.add(lambda error: lock.release())
    crashes = count_crashes(config, context)
    ending.add(crashes.end)
    profiler = Profiler.of(config.log, log_folder(config) / "profile", context.rank)
    ending.add(profiler.close)
    return crashes, profiler


def build_streams(
    plan: Plan, context: ParallelContext, train_set, valid_set, consumed_samples: int
) -> tuple[TrainStream, EvalStream | None]:
    """This rank's batches for training, after `consumed_samples`, and of the held-out set."""
    data, training = plan.config.data, plan.config.training
    sizes = dict(
        micro_batch_size=plan.batch.micro_batch_size,
        global_batch_size=plan.batch.global_batch_size,
        data_parallel_rank=context.dp_rank,
        data_parallel_size=context.dp_size,
        context_parallel_rank=context.cp_rank,
        context_parallel_size=context.cp_size,
        num_workers=data.num_workers,
        pin_memory=context.platform.is_cuda,
    )
    order = dict(seed=training.seed, shuffle=data.shuffle, consumed_samples=consumed_samples)
    held_out = None if valid_set is None else EvalStream(valid_set, eval_iters=training.eval_iters, **sizes)
    return TrainStream(train_set, **order, **sizes), held_out


def build_stopper(plan: Plan, context: ParallelContext, signals: Signals) -> Stopper:
    training, size = plan.config.training, 0
    if plan.config.checkpoint.save:
        size = checkpoint_bytes(plan.student.shape, training.bf16)
    return Stopper(context, signals, training.exit_duration_in_mins, first_save_bytes=size)


def still_due(run: Run) -> frozenset[str]:
    """Parts of an evaluation at the position of the start that have no record: the run was stopped before them. Collective."""
    iteration = run.position.iteration
    if not is_evaluated(iteration, run.config.training):
        return frozenset()
    records = on_rank_0(
        lambda: read_records(log_folder(run.config)),
        lambda error: DataError(f"cannot read metrics: {error}", code="metrics-unreadable"),
    )
    recorded = {split_of(record) for record in records or () if record["iteration"] == iteration}
    return run.parts - run.engine.context.broadcast_object(recorded)


def describe_data(train_set, valid_set, tasks) -> list[str]:
    """Sizes of what is trained and evaluated on, and what teachers with their own tokens have of it."""
    named = [
        (name, part) for name, part in (("training", train_set), ("held-out", valid_set)) if part is not None
    ]
    lines = [
        line if line.startswith(" ") else f"{name} {line}" for name, part in named for line in part.describe()
    ]
    return lines + (tasks.describe() if tasks else [])


def build_reporter(
    plan: Plan, context: ParallelContext, position: TrainingPosition, engine: Engine, has_baseline: bool
) -> Reporter:
    """Writers on rank 0 only; lines after the resumed iteration are dropped, they will be written again.

    `has_baseline`: the evaluation before the first step, if there is one, was of what this run evaluates.
    """
    config = plan.config
    writers, metrics = [], log_folder(config) / "metrics.jsonl"
    if context.rank == 0:
        kept = None if config.checkpoint.load else set_aside(metrics)
        if kept is not None:
            print(f" the metrics of the run before, in the same folder, are now in {kept}", flush=True)
        writers.append(JsonlWriter(metrics))
        if config.log.tensorboard_dir:
            writers.append(TensorBoardWriter(config.log.tensorboard_dir))
        if config.log.wandb_project:
            writers.append(
                WandbWriter(config.log, log_folder(config), flat_settings(config), position.iteration > 0)
            )
    logger = MetricLogger(writers)
    logger.truncate_after(
        position.iteration or -1
    )  # a fresh run also replaces the evaluation before the first step
    return Reporter(
        context=context,
        logger=logger,
        student=plan.student.shape,
        teachers=tuple(source.shape for source in plan.teachers),
        kd_ratio=config.kd.kd_ratio,
        log_interval=config.log.log_interval,
        train_iters=config.training.train_iters,
        global_batch_size=plan.batch.global_batch_size,
        seq_length=config.training.seq_length,
        is_cross_tokenizer=any(one.xtoken for one in config.teachers),
        initial_kd=curve(read_records(log_folder(config)), "valid", "kd_loss").get(0)
        if writers and has_baseline
        else None,
        take_teacher_ms=partial(take_teacher_ms, engine.chunks),
    )
