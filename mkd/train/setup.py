"""The wiring: from a configuration to a `Run`. The only file that knows all the parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mkd.checkpoint.distributed import HF_FOLDER, TrainingPosition, TrainingState, find_checkpoint, load_checkpoint
from mkd.checkpoint.hf_reader import HFCheckpoint, check_hf_checkpoint, load_hf_weights, resolve_hf
from mkd.config.schema import Config, StudentConfig, TeacherConfig
from mkd.config.validate import layouts_of, validate, virtual_stages
from mkd.data.build import missing_data, open_datasets
from mkd.data.loader import EvalStream, TrainStream
from mkd.errors import CheckpointError, DataError, ErrorList, MkdError, UsageError
from mkd.log.writers import JsonlWriter, MetricLogger, TensorBoardWriter
from mkd.models.builder import build_chunks, common_padded_vocab_size, pair_stages
from mkd.models.language_model import LanguageModel
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import PairCommunicator
from mkd.plan.batch import BatchPlan, document_multiple
from mkd.plan.forecast import Forecast
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape
from mkd.platform import Platform
from mkd.tokenizers.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from mkd.train.loop import Run
from mkd.train.optimizer import build_optimizer, wrap_stages
from mkd.train.report import Reporter
from mkd.train.schedule import PipelineSchedule
from mkd.train.step import Engine
from mkd.train.topk_teacher import StoredTeacher


@dataclass(frozen=True)
class ModelSource:
    """Where one model comes from: its shape and small files, and its weights."""

    shape: ModelShape
    assets: Path  # folder with config.json and tokenizer files
    hf: HFCheckpoint | None  # weights of a Hugging Face folder ...
    load: Path | None  # ... or of a Megatron checkpoint folder


@dataclass(frozen=True)
class Plan:
    """What is known before any process talks to another: models, batch, layouts. All checked."""

    config: Config
    student: ModelSource
    teacher: ModelSource | None  # None when kd_ratio is 0: it would never run
    batch: BatchPlan
    virtual_stages: int
    student_layout: PipelineLayout
    teacher_layout: PipelineLayout | None
    stored_teacher: StoredTeacher | None = None  # its rows come with the data, and no teacher runs

    def describe(self) -> str:
        """The batch as an equation, the layers of both models on each stage, and what to expect of time and memory."""
        teacher = self.teacher.shape if self.teacher else None
        layouts = (self.student_layout, self.teacher_layout)
        return Forecast(self.config, self.batch, self.student.shape, teacher, *layouts).describe()


def plan_run(config: Config, world_size: int) -> Plan:
    """Resolve models, batch and layouts from files and flags alone. Raises one ErrorList with everything that is wrong."""
    problems: list[MkdError] = []
    student = locate_model(problems, "student", config.student)
    teacher = stored_teacher = None
    if config.kd.kd_ratio > 0 and config.teachers:
        teacher = locate_model(problems, "teacher", config.teachers[0])
        if config.teachers[0].topk:
            stored_teacher = StoredTeacher.find(problems, config, teacher, student.shape.vocab_size if student else None)
            teacher = None
    problems += validate(config, world_size, student.shape if student else None, teacher.shape if teacher else None)
    problems += missing_data(config.data.data_path, config.data.valid_data_path)
    problems += _export_over_source(config, [source for source in (student, teacher) if source])
    if problems:
        raise ErrorList(problems)
    stages = virtual_stages(config, student.shape)
    student_layout, teacher_layout = layouts_of(config, student.shape, teacher.shape if teacher else None, stages)
    return Plan(
        config=config,
        student=student,
        teacher=teacher,
        batch=BatchPlan.from_config(config, world_size),
        virtual_stages=stages,
        student_layout=student_layout,
        teacher_layout=teacher_layout,
        stored_teacher=stored_teacher,
    )


def _export_over_source(config: Config, sources: list[ModelSource]) -> list[MkdError]:
    """Exporting over a model that the run reads would destroy it, and is found out only after all training."""
    export = config.checkpoint.export_hf
    if export is None or Path(export).resolve() not in [source.assets.resolve() for source in sources]:
        return []
    return [UsageError(f"--export-hf {export} is a folder that this run reads", "it would be overwritten", "choose another")]


def locate_model(
    problems: list[MkdError], role: str, source: StudentConfig | TeacherConfig
) -> ModelSource | None:
    """Find a model's files and read its shape and tensor headers, no weights yet. None with a problem, or if not given."""
    if not (source.hf or source.load):
        return None
    try:
        if source.load is None:
            folder = resolve_hf(source.hf)
            shape, checkpoint = ModelShape.from_hf_dir(folder), HFCheckpoint(folder)
            check_hf_checkpoint(shape, checkpoint)
            return ModelSource(shape, folder, checkpoint, None)
        folder = find_checkpoint(Path(source.load))
        if folder is None:
            what = f"--{role}-load {source.load} holds no checkpoint"
            raise CheckpointError(what, "", "name a folder that --save or convert_hf_to_mcore.py has written to")
        assets = resolve_hf(source.hf) if source.hf else folder / HF_FOLDER
        return ModelSource(ModelShape.from_hf_dir(assets), assets, None, folder)
    except MkdError as error:
        problems.append(error)
        return None


def join(plan: Plan, platform: Platform) -> ParallelContext:
    """Join the process group in the layout of the plan."""
    parallel = plan.config.parallel
    return ParallelContext.create(
        platform,
        tensor_parallel=parallel.tensor_model_parallel_size,
        pipeline_parallel=parallel.pipeline_model_parallel_size,
        context_parallel=parallel.context_parallel_size,
        virtual_stages=plan.virtual_stages,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )


def build_run(plan: Plan, platform: Platform) -> Run:
    """Join the process group, then build data, models, optimizer and reporter, and resume if there is something to resume."""
    config = plan.config
    context = join(plan, platform)
    train_set, valid_set = build_data(plan, context)
    engine, state = build_engine(plan, context)
    position = resume(plan, state, context)
    sizes = dict(
        micro_batch_size=plan.batch.micro_batch_size,
        global_batch_size=plan.batch.global_batch_size,
        data_parallel_rank=context.dp_rank,
        data_parallel_size=context.dp_size,
        context_parallel_rank=context.cp_rank,
        context_parallel_size=context.cp_size,
        num_workers=config.data.num_workers,
        pin_memory=context.platform.is_cuda,
    )
    return Run(
        config=config,
        engine=engine,
        train_stream=TrainStream(
            train_set,
            seed=config.training.seed,
            shuffle=config.data.shuffle,
            consumed_samples=position.consumed_samples,
            **sizes,
        ),
        eval_stream=None if valid_set is None else EvalStream(valid_set, eval_iters=config.training.eval_iters, **sizes),
        state=state,
        position=position,
        reporter=build_reporter(plan, context, position),
        global_batch_size=plan.batch.global_batch_size,
        hf_dir=plan.student.assets,
    )


def build_engine(plan: Plan, context: ParallelContext) -> tuple[Engine, TrainingState]:
    """Both models with their weights, joined stage by stage, under one schedule and one optimizer."""
    config = plan.config
    options = ModelOptions(
        dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute_granularity=config.training.recompute_granularity,
        recompute_method=config.training.recompute_method,
        recompute_num_layers=config.training.recompute_num_layers,
        deterministic=config.training.deterministic_mode,
    )
    teacher_shape = plan.teacher.shape if plan.teacher else None
    vocab = common_padded_vocab_size(plan.student.shape, teacher_shape, context.tp_size)
    students = build_chunks(plan.student.shape, plan.student_layout, options, context, vocab)
    load_weights(students, plan.student, context)
    teachers = None
    if plan.teacher is not None:
        teachers = build_chunks(plan.teacher.shape, plan.teacher_layout, options, context, vocab)
        load_weights(teachers, plan.teacher, context)
    stages = pair_stages(students, teachers)
    chunks = wrap_stages(stages, config, context)
    optimizer = build_optimizer(chunks, config, context, plan.batch.global_batch_size)
    context.seed(config.training.seed)  # whatever building the models drew, training starts from the seed
    engine = Engine(config.kd, context, build_schedule(plan, students, options, context), chunks, optimizer)
    return engine, TrainingState(students, optimizer.optimizer, optimizer.scheduler)


def build_schedule(
    plan: Plan, students: list[LanguageModel], options: ModelOptions, context: ParallelContext
) -> PipelineSchedule:
    """The schedule and its communicator; with a teacher, its hidden state rides along."""
    tokens = plan.batch.micro_batch_size * plan.config.training.seq_length
    student_config = students[0].config
    if plan.teacher is None:
        communicator = P2PCommunicator(context.pp_group, student_config)
    else:
        shards = context.cp_size * (context.tp_size if student_config.sequence_parallel else 1)
        rider_shape = (tokens // shards, 1, plan.teacher.shape.hidden_size)
        communicator = PairCommunicator(context.pp_group, student_config, rider_shape, options.dtype)
    return PipelineSchedule(context, communicator, tokens)


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


def build_data(plan: Plan, context: ParallelContext):
    """(training set, held-out set or None); the teacher must read the same ids as the student."""
    data = plan.config.data
    tokenizer = load_tokenizer(data.tokenizer_type, data.tokenizer_model or str(plan.student.assets))
    if plan.teacher is not None:
        require_same_tokenizer(tokenizer, plan.teacher)
    shapes = [plan.student.shape] + ([plan.teacher.shape] if plan.teacher else [])
    train_set, valid_set = open_datasets(
        data_path=data.data_path,
        valid_data_path=data.valid_data_path,
        split=data.split,
        tokenizer=tokenizer,
        seq_length=plan.config.training.seq_length,
        document_multiple=document_multiple(context.cp_size),
        vocab_size=min(shape.vocab_size for shape in shapes),
        pack=data.pack,
        overlong=data.overlong,
        append_eod=data.append_eod,
        cache_dir=data.data_cache_path or str(log_folder(plan.config) / "data_cache"),
        is_builder=context.rank == 0,
        share=context.broadcast_object,
    )
    if valid_set is None and plan.config.training.eval_interval:
        raise DataError(
            f"there is no held-out document: --split {data.split} of {' '.join(data.data_path)} leaves none",
            "--eval-interval asks for evaluations",
            "give --valid-data-path, a larger second part of --split, or drop --eval-interval",
        )
    if plan.stored_teacher is not None:
        held_out = valid_set if plan.config.training.eval_interval else None
        train_set, valid_set = plan.stored_teacher.attach(train_set, held_out, tokenizer, context)
    return train_set, valid_set


def require_same_tokenizer(tokenizer: Tokenizer, teacher: ModelSource) -> None:
    """Refuse a teacher whose ids mean other strings: its logits would be compared with the wrong words."""
    if not has_tokenizer(teacher.assets):
        return  # nothing to compare: a teacher of bare weights is taken at its user's word
    difference = tokenizer.vocabulary_difference(load_tokenizer("HuggingFaceTokenizer", str(teacher.assets)))
    if difference is not None:
        raise UsageError(
            f"teacher {teacher.assets} has another tokenizer than the student: {difference}",
            "distillation compares the two models id by id",
            "use a teacher of the same tokenizer; cross-tokenizer settings (`teachers[i].xtoken`) are not supported yet",
        )


def resume(plan: Plan, state: TrainingState, context: ParallelContext) -> TrainingPosition:
    """Continue from --load when it holds a checkpoint; an empty folder starts from the student's own weights."""
    checkpoint = plan.config.checkpoint
    folder = find_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step) if checkpoint.load else None
    if folder is not None:
        return load_checkpoint(folder, state, context)
    if checkpoint.load and context.rank == 0:
        print(f" {checkpoint.load} holds no checkpoint yet: starting from the student's own weights", flush=True)
    return TrainingPosition()


def log_folder(config: Config) -> Path:
    return Path(config.log.log_dir or config.checkpoint.save or Path("runs") / config.log.name)


def build_reporter(plan: Plan, context: ParallelContext, position: TrainingPosition) -> Reporter:
    """Writers on rank 0 only; lines after the resumed iteration are dropped, they will be written again."""
    config = plan.config
    writers = []
    if context.rank == 0:
        writers.append(JsonlWriter(log_folder(config) / "metrics.jsonl"))
        if config.log.tensorboard_dir:
            writers.append(TensorBoardWriter(config.log.tensorboard_dir))
    logger = MetricLogger(writers)
    logger.truncate_after(position.iteration or -1)  # a fresh run also replaces the evaluation before the first step
    return Reporter(
        context=context,
        logger=logger,
        student=plan.student.shape,
        teacher=plan.teacher.shape if plan.teacher else None,
        kd_ratio=config.kd.kd_ratio,
        log_interval=config.log.log_interval,
        train_iters=config.training.train_iters,
        global_batch_size=plan.batch.global_batch_size,
        seq_length=config.training.seq_length,
    )
