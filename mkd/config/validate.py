"""Checks across settings that need no process group: the numbers, the batch, the parallel layout, both models' shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from mkd.config.options import all_options
from mkd.config.schema import Config, KDConfig
from mkd.errors import MkdError, UsageError
from mkd.plan.auto_layout import auto_layouts
from mkd.plan.batch import BatchPlan, document_multiple
from mkd.plan.cost import DOCUMENT_LENGTH, pair_cost
from mkd.plan.layout import PipelineLayout, count_virtual_stages
from mkd.plan.model_shape import ModelShape

_RANGES = {
    "distributed_timeout_minutes": ("above 0", lambda x: x > 0),
    "kd_ratio": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "kd_temperature": ("from 0.01 to 100", lambda x: 0.01 <= x <= 100),  # beyond, fp32 statistics lose their digits
    "kd_jsd_beta": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "kd_mixed_kl_weight": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "eval_interval": ("0 (never) or more", lambda x: x >= 0),
    "exit_duration_in_mins": ("above 0", lambda x: x > 0),
    "num_workers": ("0 or more", lambda x: x >= 0),
    "lr": ("above 0", lambda x: x > 0),
    "min_lr": ("0 or more", lambda x: x >= 0),
    "lr_warmup_iters": ("0 or more", lambda x: x >= 0),
    "lr_warmup_fraction": ("from 0 to below 1", lambda x: 0 <= x < 1),
    "weight_decay": ("0 or more", lambda x: x >= 0),
    "clip_grad": ("0 (never) or more", lambda x: x >= 0),
    "adam_beta1": ("from 0 to below 1", lambda x: 0 <= x < 1),
    "adam_beta2": ("from 0 to below 1", lambda x: 0 <= x < 1),
    "adam_eps": ("above 0", lambda x: x > 0),
    "ckpt_step": ("0 or more", lambda x: x >= 0),
    "seed": ("0 or more", lambda x: x >= 0),
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "micro_batch_size",
            "global_batch_size",
            "seq_length",
            "eval_iters",
            "exit_interval",
            "recompute_num_layers",
            "lr_decay_iters",
            "lr_wsd_decay_iters",
            "save_interval",
            "log_interval",
        ),
        ("1 or more", lambda x: x >= 1),
    ),
    "expert_model_parallel_size": ("1 in this release", lambda x: x == 1),
}
"""Option -> (what it must be, whether a value is that). Settings that were not given (None) are not asked."""


def validate(
    config: Config, world_size: int, student: ModelShape | None = None, teacher: ModelShape | None = None
) -> list[MkdError]:
    """Every problem of `config` on `world_size` processes; empty when the run can start.

    Checks of a model are left out where its shape is None. Whether files exist is for those who read them.
    """
    problems: list[MkdError] = list(_ranges(config))
    is_in_range = not problems
    for check in (_models, _objective, _training, _optimizer, _recompute, _parallel):
        problems += check(config)
    if not is_in_range:
        return problems  # the arithmetic below needs sizes that make sense
    problems += _sequence(config)
    stages = config.parallel.num_virtual_stages_per_pipeline_rank or 1
    if student is not None:
        stages = _attempt(problems, lambda: virtual_stages(config, student))
    batch = _attempt(problems, lambda: BatchPlan.from_config(config, world_size))
    if batch is not None:
        problems += _batch(config, batch, stages or 1)
    for role, shape in (("student", student), ("teacher", teacher)):
        if shape is not None:
            problems += _shape(config, role, shape)
            if stages is not None and config.parallel.pipeline_layout == "even":
                _attempt(problems, lambda role=role, shape=shape: layout_of(config, role, shape, stages))
    if not problems and student is not None and config.parallel.pipeline_layout == "auto":
        _attempt(problems, lambda: layouts_of(config, student, teacher, stages))
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
    teacher: ModelShape | None,
    stages: int,  # virtual ones of each pipeline rank
    document_length: int = DOCUMENT_LENGTH,  # tokens, for the cost of attention
) -> tuple[PipelineLayout, PipelineLayout | None]:
    """The layouts of student and teacher (None without one), as asked for or chosen. Raises UsageError if there is none."""
    if config.parallel.pipeline_layout == "auto":
        pipeline = config.parallel.pipeline_model_parallel_size
        cost = pair_cost(config, student, teacher, pipeline * stages, document_length)
        return auto_layouts(cost, student.num_layers, teacher.num_layers if teacher else None, pipeline, stages)
    of_teacher = layout_of(config, "teacher", teacher, stages) if teacher else None
    return layout_of(config, "student", student, stages), of_teacher


def layout_of(config: Config, role: str, shape: ModelShape, stages: int) -> PipelineLayout:
    """The layers of the `student` or the (first) `teacher` over all stages. Raises UsageError as `PipelineLayout.create`."""
    text = config.student.pipeline_layout if role == "student" else config.teachers[0].pipeline_layout
    pipeline = config.parallel.pipeline_model_parallel_size
    return PipelineLayout.create(text, shape.num_layers, pipeline, stages, flag=f"--{role}-pipeline-layout")


def _attempt(problems: list[MkdError], compute: Callable):
    """The result of `compute()`, or None with its error added to `problems`."""
    try:
        return compute()
    except UsageError as error:
        problems.append(error)
        return None


def _ranges(config: Config) -> Iterator[UsageError]:
    if config.training.train_iters < 1:
        yield UsageError(
            f"train-iters is {config.training.train_iters}", "a run needs at least one step", "give --train-iters N"
        )
    for option in all_options():
        if option.name in _RANGES:
            wanted, is_fine = _RANGES[option.name]
            value = getattr(getattr(config, option.section), option.field)
            if value is not None and not is_fine(value):
                why = f"{option.name} is {option.help}"
                yield UsageError(f"{option.flag[2:]} {value} must be {wanted}", why, f"change {option.flag}")


def _models(config: Config) -> Iterator[UsageError]:
    if not (config.student.hf or config.student.load):
        yield UsageError(
            "no student is given", "there is nothing to train", "give --student-hf DIR or --student-load CKPT"
        )
    if len(config.teachers) > 1:
        yield UsageError(
            f"{len(config.teachers)} teachers are given: several teachers are not supported yet",
            "this release distils from exactly one",
            "keep one entry below teachers:",
        )
    elif config.kd.kd_ratio > 0 and not any(t.hf or t.load or t.topk for t in config.teachers):
        yield UsageError(
            f"no teacher is given, but kd-ratio is {config.kd.kd_ratio}",
            "the distillation loss needs the teacher's logits",
            "give --teacher-hf DIR, --teacher-load CKPT or --teacher-topk DIR, or --kd-ratio 0 for plain training",
        )
    elif config.kd.kd_ratio > 0 and config.teachers[0].topk and config.kd.kd_divergence != "forward_kl":
        yield UsageError(
            f"kd-divergence {config.kd.kd_divergence} cannot be computed from --teacher-topk",
            "of the ids outside the teacher's top-k only their total is stored, which suffices for forward_kl alone",
            "use --kd-divergence forward_kl, or --teacher-hf instead of --teacher-topk",
        )
    elif config.teachers and config.teachers[0].weight != 1:
        yield UsageError(
            f"teachers[0].weight is {config.teachers[0].weight}",
            "a single teacher has the whole weight",
            "remove it; --kd-ratio sets the share of distillation in the loss",
        )


def _objective(config: Config) -> Iterator[UsageError]:
    """Settings of the loss that the rest of the configuration leaves without effect."""
    kd, stored = config.kd, any(teacher.topk for teacher in config.teachers)
    if kd.kd_jsd_beta != KDConfig().kd_jsd_beta and kd.kd_divergence != "jsd":
        yield _no_effect(f"kd-jsd-beta {kd.kd_jsd_beta}", f"kd-divergence is {kd.kd_divergence}", "add --kd-divergence jsd")
    if kd.kd_mixed_kl_weight != KDConfig().kd_mixed_kl_weight and kd.kd_divergence != "mixed_kl":
        why = f"kd-divergence is {kd.kd_divergence}"
        yield _no_effect(f"kd-mixed-kl-weight {kd.kd_mixed_kl_weight}", why, "add --kd-divergence mixed_kl")
    if kd.kd_fp32_logits and not config.training.bf16:
        yield _no_effect("kd-fp32-logits", "without --bf16 everything is fp32", "remove it")
    elif kd.kd_fp32_logits and (stored or not kd.kd_fused_head):
        yield _no_effect("kd-fp32-logits", "only the fused head makes logits of another precision than the model", "remove it")
    if stored and not kd.kd_fused_head:
        yield _no_effect("no-kd-fused-head", "a stored teacher has no head to fuse", "remove it")


def _no_effect(setting: str, why: str, do: str) -> UsageError:
    return UsageError(f"{setting} would have no effect", why, do if do == "remove it" else f"{do}, or remove it")


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
    elif training.eval_interval and not data.valid_data_path and parts[1] == 0:
        yield UsageError(
            f"eval-interval {training.eval_interval} has no held-out data",
            f"split {data.split} gives validation nothing, and there is no valid-data-path",
            "give --valid-data-path PATH, or --split 99,1,0",
        )
    if checkpoint.save_interval is not None and not checkpoint.save:
        yield UsageError(f"save-interval {checkpoint.save_interval} has no folder", "", "give --save DIR")
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


def _optimizer(config: Config) -> Iterator[UsageError]:
    settings = config.optimizer
    decay_iters = settings.lr_decay_iters or config.training.train_iters
    if settings.min_lr > settings.lr:
        yield UsageError(
            f"min-lr {settings.min_lr} is above lr {settings.lr}", "lr decays down to min-lr", "lower --min-lr"
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
    given = [name for name in ("recompute_method", "recompute_num_layers") if getattr(training, name) is not None]
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
    by_layers, by_stages = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
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
    models = [("student", config.student), *(("teacher", teacher) for teacher in config.teachers[:1])]
    flags = [f"--{role}-pipeline-layout" for role, model in models if model.pipeline_layout]
    flags += ["--num-layers-per-virtual-pipeline-stage"] * (by_layers is not None)
    flags = " and ".join(flags)
    if parallel.pipeline_layout == "auto" and flags:
        yield UsageError(
            f"--pipeline-layout auto and {flags} exclude each other",
            "both say how layers are split over the pipeline; auto chooses the splits of both models together",
            f"remove {flags}, or --pipeline-layout auto",
        )
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
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


def _sequence(config: Config) -> Iterator[UsageError]:
    """What context and sequence parallelism ask of the length of packs."""
    parallel, training = config.parallel, config.training
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    multiple, shards = document_multiple(context), tensor * context if parallel.sequence_parallel else 1
    fitting = math.lcm(multiple, shards)
    fitting *= math.ceil(training.seq_length / fitting)
    tokens = training.seq_length * training.micro_batch_size
    if training.seq_length % multiple:
        yield UsageError(
            f"seq-length {training.seq_length} is not divisible by 2 x context-parallel-size {context} = {multiple}",
            "context parallelism gives every process two equal parts of each document",
            f"use --seq-length {fitting}",
        )
    elif tokens % shards:
        by_context = f" x context-parallel-size {context} = {shards}" if context > 1 else ""
        yield UsageError(
            f"seq-length {training.seq_length} x micro-batch-size {training.micro_batch_size} = {tokens} tokens are not "
            f"divisible by tensor-model-parallel-size {tensor}{by_context}",
            "sequence parallelism gives every tensor-parallel process the same number of tokens",
            f"use --seq-length {fitting}, or leave --sequence-parallel away",
        )


def _shape(config: Config, role: str, shape: ModelShape) -> Iterator[UsageError]:
    """What one model's sizes ask of the layout; heads and vocabulary are padded, so that they ask nothing."""
    tensor, context = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    groups = shape.padded_query_groups(tensor) // tensor
    if shape.sliding_window is not None and groups % context:
        yield UsageError(
            f"the {role}'s {groups} key/value heads of a process are not divisible by context-parallel-size {context}",
            f"it attends to a window of {shape.sliding_window} tokens: context parallelism then trades tokens for heads",
            "lower --context-parallel-size or --tensor-model-parallel-size",
        )
    if shape.ffn_hidden_size % tensor:
        largest = next(size for size in range(tensor, 0, -1) if shape.ffn_hidden_size % size == 0)
        yield UsageError(
            f"the {role}'s ffn_hidden_size {shape.ffn_hidden_size} is not divisible by tensor-model-parallel-size {tensor}",
            "every tensor-parallel process holds the same number of MLP channels",
            f"use --tensor-model-parallel-size {largest}",
        )
