"""Checks across settings that need no process group: the numbers, the batch, the parallel layout, both models' shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mkd.config.models import teacher_roles
from mkd.config.options import Option, settings
from mkd.config.schema import Config
from mkd.errors import MkdError, UsageError
from mkd.plan.auto_layout import auto_layouts
from mkd.plan.batch import BatchPlan, document_multiple
from mkd.plan.checks.validate_log import check_log
from mkd.plan.checks.validate_ranges import BATCH, PACKS, SHARDS, STAGES, check_ranges
from mkd.plan.checks.validate_teachers import check_objective, check_teachers, no_effect
from mkd.plan.cost import DOCUMENT_LENGTH, pair_cost
from mkd.plan.layout import PipelineLayout, count_virtual_stages
from mkd.plan.model_shape import ModelShape


def validate(
    config: Config,
    world_size: int,
    student: ModelShape | None = None,
    teachers: Sequence[ModelShape | None] = (),  # those that run, in the order of the configuration
) -> list[MkdError]:
    """Every problem of `config` on `world_size` processes; empty when the run can start.

    Checks of a model are left out where its shape is None. Whether files exist is for those who read them.
    """
    out_of_range = list(check_ranges(config))
    problems: list[MkdError] = [error for _, error in out_of_range]
    for check in (
        _models,
        check_objective,
        _training,
        _evaluation,
        _optimizer,
        _recompute,
        _parallel,
        check_log,
    ):
        problems += check(config)
    wrong = {name for name, _ in out_of_range}  # what reads one of these is left out below
    if wrong.isdisjoint((*PACKS, *SHARDS)):
        problems += _sequences(config)
    stages = None
    if wrong.isdisjoint(STAGES):
        stages = config.parallel.num_virtual_stages_per_pipeline_rank or 1
        if student is not None:
            stages = _attempt(problems, lambda: virtual_stages(config, student))
    if wrong.isdisjoint((*BATCH, *SHARDS, *STAGES)):
        batch = _attempt(problems, lambda: BatchPlan.from_config(config, world_size))
        if batch is not None:
            problems += _batch(config, batch, stages or 1)
    models = list(_models_of(config, (student, *teachers)))
    if "tensor_model_parallel_size" not in wrong:
        problems += _ffn(config, models, world_size)
    for model in models:
        if wrong.isdisjoint(SHARDS):
            problems += _windows(config, model)
        if stages is not None and config.parallel.pipeline_layout == "even":
            _attempt(problems, lambda model=model: _layout(config, model, stages))
    if not problems and None not in (student, *teachers) and config.parallel.pipeline_layout == "auto":
        _attempt(problems, lambda: layouts_of(config, student, teachers, stages))
    return problems


def virtual_stages(config: Config, student: ModelShape) -> int:
    """Model chunks of each pipeline rank, for both models. Raises UsageError as `count_virtual_stages`."""
    parallel = config.parallel
    return count_virtual_stages(
        student.num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.num_layers_per_virtual_pipeline_stage,
        parallel.num_virtual_stages_per_pipeline_rank,
    )


def layouts_of(
    config: Config,
    student: ModelShape,
    teachers: Sequence[ModelShape],  # those that run, in the order of the configuration
    stages: int,  # virtual ones of each pipeline rank
    document_length: int = DOCUMENT_LENGTH,  # tokens, for the cost of attention
) -> tuple[PipelineLayout, tuple[PipelineLayout, ...]]:
    """The layouts of the student and of each teacher, as asked for or chosen. Raises UsageError if there is none."""
    if config.parallel.pipeline_layout == "auto":
        pipeline = config.parallel.pipeline_model_parallel_size
        cost = pair_cost(config, student, teachers, pipeline * stages, document_length)
        return auto_layouts(
            cost, student.num_layers, [teacher.num_layers for teacher in teachers], pipeline, stages
        )
    of_student, *of_teachers = (
        _layout(config, model, stages) for model in _models_of(config, (student, *teachers))
    )
    return of_student, tuple(of_teachers)


class _Model(NamedTuple):
    role: str
    shape: ModelShape
    layout: str | None
    layout_flag: str  # or the key of a file, for teachers without flags


def _models_of(config: Config, shapes: Sequence[ModelShape | None]) -> Iterator[_Model]:
    """Student and teachers, without those whose shape is None."""
    assert len(shapes) <= 1 + len(config.teachers), (
        f"{len(shapes) - 1} shapes of {len(config.teachers)} teachers"
    )
    roles = ("student", *teacher_roles(config.teachers))
    models = zip(roles, shapes, (config.student, *config.teachers), _layout_flags(config), strict=False)
    for role, shape, source, flag in models:
        if shape is not None:
            yield _Model(role, shape, source.pipeline_layout, flag)


def _layout_flags(config: Config) -> list[str]:
    """What sets the layout of the student and of each teacher."""
    return [
        option.place
        for option, _ in settings(config)
        if option.name in ("student_pipeline_layout", "teacher_pipeline_layout")
    ]


def _layout(config: Config, model: _Model, stages: int) -> PipelineLayout:
    """The layers of one model over all stages. Raises UsageError as `PipelineLayout.create`, which says whose they are."""
    pipeline = config.parallel.pipeline_model_parallel_size
    try:
        return PipelineLayout.create(
            model.layout, model.shape.num_layers, pipeline, stages, flag=model.layout_flag
        )
    except UsageError as error:
        raise UsageError(f"{model.role}: {error.what}", error.why, error.do) from error


def _attempt(problems: list[MkdError], compute: Callable):
    """The result of `compute()`, or None with its error added to `problems`."""
    try:
        return compute()
    except UsageError as error:
        problems.append(error)
        return None


def _models(config: Config) -> Iterator[UsageError]:
    if not (config.student.hf or config.student.load):
        yield UsageError(
            "no student is given", "there is nothing to train", "give --student-hf DIR or --student-load CKPT"
        )
    yield from check_teachers(config)


def _training(config: Config) -> Iterator[UsageError]:
    data, training, checkpoint = config.data, config.training, config.checkpoint
    if not data.data_path:
        yield UsageError("no training data is given", "", "give --data-path PATH")
    parts = _split_parts(data.split)
    if parts is None:
        yield UsageError(
            f"split {data.split} is not a split",
            "it has up to three non-negative numbers, for training, validation and test, that are not all 0",
            "use for example --split 99,1,0",
        )
    elif training.eval_interval and not (data.valid_data_path or parts[1] or _eval_tasks(config)):
        yield UsageError(
            f"eval-interval {training.eval_interval} has no held-out data",
            f"split {data.split} gives validation nothing, and there is no valid-data-path",
            "give --valid-data-path PATH, or --split 99,1,0",
        )
    if checkpoint.save_interval is not None and not checkpoint.save:
        yield UsageError(f"save-interval {checkpoint.save_interval} has no folder", "", "give --save DIR")
    for name in ("save_retain_interval", "keep_checkpoints", "async_save"):
        value = getattr(checkpoint, name)
        if value and not checkpoint.save:
            yield UsageError(f"{name.replace('_', '-')} {value} has no folder", "", "give --save DIR")
    if checkpoint.accept_change and not checkpoint.load:
        yield no_effect(
            "accept-change", "a run is compared with the checkpoint that it goes on from", "add --load DIR"
        )
    if checkpoint.ckpt_step is not None and not (checkpoint.load or config.student.load):
        yield UsageError(f"ckpt-step {checkpoint.ckpt_step} has no folder", "", "give --load DIR")


def _split_parts(split: str) -> list[float] | None:
    """[training, validation, test], or None where `split` is not a split."""
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        return None
    if len(parts) > 3 or not all(0 <= part < math.inf for part in parts) or not sum(parts):
        return None
    return parts + [0.0] * (3 - len(parts))


def _eval_tasks(config: Config) -> tuple[str, ...]:
    return config.data.eval_multiple_choice + config.data.eval_completions


def _evaluation(config: Config) -> Iterator[UsageError]:
    """Tasks that evaluations run besides the held-out data."""
    if _eval_tasks(config) and not config.training.eval_interval:
        given = [name for name in ("eval_multiple_choice", "eval_completions") if getattr(config.data, name)]
        setting = " and ".join(given).replace("_", "-")
        yield no_effect(setting, "there are no evaluations without eval-interval", "add --eval-interval N")
    if config.data.eval_num_fewshot and not config.data.eval_multiple_choice:
        setting = f"eval-num-fewshot {config.data.eval_num_fewshot}"
        yield no_effect(
            setting,
            "only multiple-choice questions have examples before them",
            "add --eval-multiple-choice FILE",
        )


def _optimizer(config: Config) -> Iterator[UsageError]:
    settings = config.optimizer
    decay_iters = settings.lr_decay_iters or config.training.train_iters
    if settings.min_lr > settings.lr > 0:
        yield UsageError(
            f"min-lr {settings.min_lr} is above lr {settings.lr}",
            "lr decays down to min-lr",
            "lower --min-lr",
        )
    if settings.lr_warmup_iters and settings.lr_warmup_fraction is not None:
        yield UsageError(
            f"lr-warmup-iters {settings.lr_warmup_iters} and lr-warmup-fraction {settings.lr_warmup_fraction} exclude "
            "each other",
            "both set the length of warm-up",
            "give one of them",
        )
    elif 0 < decay_iters <= settings.lr_warmup_iters:
        yield UsageError(
            f"lr-warmup-iters {settings.lr_warmup_iters} is not below the {decay_iters} decay iterations",
            "the learning rate would never reach its course after warm-up",
            "lower --lr-warmup-iters, or raise --lr-decay-iters or --train-iters",
        )
    if settings.lr_decay_style == "WSD" and settings.lr_wsd_decay_iters is None:
        yield UsageError(
            "lr-decay-style WSD needs lr-wsd-decay-iters",
            "it is the length of the last phase",
            "give --lr-wsd-decay-iters N",
        )


def _recompute(config: Config) -> Iterator[UsageError]:
    training = config.training
    given = [
        name for name in ("recompute_method", "recompute_num_layers") if getattr(training, name) is not None
    ]
    if training.recompute_granularity == "full" and len(given) < 2:
        yield UsageError(
            "recompute-granularity full needs recompute-method and recompute-num-layers",
            "they say which layers are computed again",
            "add for example --recompute-method uniform --recompute-num-layers 1",
        )
    if training.recompute_granularity != "full" and given:
        yield UsageError(
            f"{' and '.join(given).replace('_', '-')} would have no effect",
            "only recompute-granularity full recomputes whole layers",
            "add --recompute-granularity full, or remove them",
        )


def _parallel(config: Config) -> Iterator[UsageError]:
    parallel = config.parallel
    by_layers, by_stages = (
        parallel.num_layers_per_virtual_pipeline_stage,
        parallel.num_virtual_stages_per_pipeline_rank,
    )
    if by_layers is not None and by_stages is not None:
        yield UsageError(
            f"num-layers-per-virtual-pipeline-stage {by_layers} and num-virtual-stages-per-pipeline-rank {by_stages} "
            "exclude each other",
            "both set the number of virtual stages",
            "give one of them",
        )
    if parallel.pipeline_model_parallel_size == 1 and (by_layers is not None or (by_stages or 1) > 1):
        yield UsageError(
            "virtual pipeline stages need pipeline-model-parallel-size above 1",
            "interleaving fills the bubble of a pipeline, and there is none",
            "raise --pipeline-model-parallel-size, or remove the virtual stages",
        )
    models = zip((config.student, *config.teachers), _layout_flags(config), strict=True)
    flags = [flag for model, flag in models if model.pipeline_layout]
    flags += ["--num-layers-per-virtual-pipeline-stage"] * (by_layers is not None)
    flags = " and ".join(flags)
    if parallel.pipeline_layout == "auto" and flags:
        yield UsageError(
            f"--pipeline-layout auto and {flags} exclude each other",
            "both say how layers are split over the pipeline; auto chooses the splits of all models together",
            f"remove {flags}, or --pipeline-layout auto",
        )
    if parallel.overlap_param_gather and not (
        parallel.use_distributed_optimizer and parallel.overlap_grad_reduce
    ):
        yield UsageError(
            "overlap-param-gather needs use-distributed-optimizer and overlap-grad-reduce",
            "only the distributed optimizer gathers parameters, and Megatron overlaps both directions together",
            "add --use-distributed-optimizer --overlap-grad-reduce",
        )


def _batch(config: Config, batch: BatchPlan, stages: int) -> Iterator[UsageError]:
    """What the schedule asks of the batch."""
    pipeline = config.parallel.pipeline_model_parallel_size
    if stages > 1 and batch.num_microbatches % pipeline:
        below = batch.num_microbatches // pipeline * pipeline
        sizes = [n * batch.micro_batch_size * batch.data_parallel for n in (below, below + pipeline) if n]
        yield UsageError(
            f"{batch.num_microbatches} micro-batches of each data-parallel rank are not a multiple of "
            f"pipeline-model-parallel-size {pipeline}",
            "the interleaved schedule runs micro-batches in groups of the pipeline's size",
            f"use --global-batch-size {' or '.join(map(str, sizes))}",
        )


def _sequences(config: Config) -> Iterator[UsageError]:
    """What context and sequence parallelism ask of the length of packs, the student's and those of teachers."""
    for option, seq_length in settings(config):
        if option.name in ("seq_length", "xtoken_seq_length") and seq_length is not None:
            yield from _sequence(config, option, seq_length)


def _sequence(config: Config, option: Option, seq_length: int) -> Iterator[UsageError]:
    parallel, micro_batch_size = config.parallel, config.training.micro_batch_size
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    multiple, shards = document_multiple(context), tensor * context if parallel.sequence_parallel else 1
    fitting = math.lcm(multiple, shards)
    fitting *= math.ceil(seq_length / fitting)
    tokens = seq_length * micro_batch_size
    if tokens >= 2**31:
        yield UsageError(
            f"{option.label} {seq_length} x micro-batch-size {micro_batch_size} = {tokens} tokens are too many",
            "borders of documents are counted in 32 bits",
            f"lower {option.place} or --micro-batch-size",
        )
    if seq_length % multiple:
        yield UsageError(
            f"{option.label} {seq_length} is not divisible by 2 x context-parallel-size {context} = {multiple}",
            "context parallelism gives every process two equal parts of each document",
            f"use {option.place} {fitting}",
        )
    elif tokens % shards:
        by_context = f" x context-parallel-size {context} = {shards}" if context > 1 else ""
        yield UsageError(
            f"{option.label} {seq_length} x micro-batch-size {micro_batch_size} = {tokens} tokens are not "
            f"divisible by tensor-model-parallel-size {tensor}{by_context}",
            "sequence parallelism gives every tensor-parallel process the same number of tokens",
            f"use {option.place} {fitting}, or leave --sequence-parallel away",
        )


def _windows(config: Config, model: _Model) -> Iterator[UsageError]:
    """What a model's attention asks of the layout."""
    role, shape = model.role, model.shape
    tensor, context = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    groups = shape.padded_query_groups(tensor) // tensor
    if shape.sliding_windows and groups % context:
        yield UsageError(
            f"the {role}'s {groups} key/value heads of a process are not divisible by context-parallel-size {context}",
            f"it attends to a window of {shape.sliding_windows[0]} tokens: context parallelism then trades tokens for heads",
            "lower --context-parallel-size or --tensor-model-parallel-size",
        )


def _ffn(config: Config, models: Sequence[_Model], world_size: int) -> Iterator[UsageError]:
    """What the models' widths ask of tensor parallelism; heads and vocabulary are padded, so that they ask nothing."""
    parallel = config.parallel
    tensor = parallel.tensor_model_parallel_size
    others = max(1, parallel.pipeline_model_parallel_size * parallel.context_parallel_size)
    common = math.gcd(*(layer.ffn_hidden_size for model in models for layer in model.shape.layers))
    dividing = [size for size in range(1, min(tensor, common) + 1) if common % size == 0]
    fitting = [size for size in dividing if world_size % (size * others) == 0] or dividing
    for role, shape, *_ in models:
        for width in sorted(
            {layer.ffn_hidden_size for layer in shape.layers if layer.ffn_hidden_size % tensor}
        ):
            yield UsageError(
                f"the {role}'s ffn_hidden_size {width} is not divisible by tensor-model-parallel-size {tensor}",
                "every tensor-parallel process holds the same number of MLP channels",
                f"use --tensor-model-parallel-size {fitting[-1]}",
            )
