"""Check the parallel layout: its settings, the batch, the length of packs, and the models' shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mkd.config.options import settings
from mkd.config.schema import Config
from mkd.errors import MkdError, UsageError, collect_error
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.planned_models import given_layouts, layout_flags
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.sides import apart_teachers, document_multiple, teacher_sizes


def check_parallel(facts: RunFacts) -> Iterator[UsageError]:
    """Check that no settings exclude each other, and that each has the others that it needs."""
    config, parallel = facts.config, facts.config.parallel
    by_layers = parallel.num_layers_per_virtual_pipeline_stage
    by_stages = parallel.num_virtual_stages_per_pipeline_rank
    if by_layers is not None and by_stages is not None:
        yield UsageError(
            f"num-layers-per-virtual-pipeline-stage {by_layers} and num-virtual-stages-per-pipeline-rank "
            f"{by_stages} exclude each other",
            "both set the number of virtual stages",
            "give one of them",
            code="exclude-each-other",
        )
    if parallel.pipeline_model_parallel_size == 1 and (by_layers is not None or (by_stages or 1) > 1):
        what = "virtual pipeline stages need pipeline-model-parallel-size above 1"
        why = "interleaving shrinks the bubble of a pipeline, and there is no pipeline"
        do = "raise --pipeline-model-parallel-size, or remove the virtual stages"
        yield UsageError(what, why, do, code="remove-flag")
    models = config.student, *config.teachers
    layouts = zip(models, given_layouts(config), layout_flags(config), strict=True)
    flags = [flag for model, layout, flag in layouts if layout and not getattr(model, "processes", 0)]
    flags += ["--num-layers-per-virtual-pipeline-stage"] * (by_layers is not None)
    if parallel.pipeline_layout == "auto" and flags:
        given = " and ".join(flags)
        what = f"--pipeline-layout auto and {given} exclude each other"
        why = "both split layers over the pipeline; auto chooses the splits of all models together"
        do = f"remove {given}, or --pipeline-layout auto"
        yield UsageError(what, why, do, code="exclude-each-other")
    overlaps_both = parallel.use_distributed_optimizer and parallel.overlap_grad_reduce
    if parallel.overlap_param_gather and not overlaps_both:
        what = "overlap-param-gather needs use-distributed-optimizer and overlap-grad-reduce"
        why = "only the distributed optimizer gathers parameters; Megatron overlaps both directions together"
        do = "add --use-distributed-optimizer --overlap-grad-reduce"
        yield UsageError(what, why, do, code="add-flag")


def check_sequences(facts: RunFacts) -> Iterator[UsageError]:
    """Check that context and sequence parallelism can split the packs of the student and of teachers."""
    for option, seq_length in settings(facts.config):
        if option.name in ("seq_length", "xtoken_seq_length") and seq_length is not None:
            yield from sequence_problems(facts.config, option.label, option.place, seq_length)
    for index, teacher in enumerate(facts.config.teachers):
        if teacher.context is not None and teacher.context.seq_length is not None:
            path = f"teachers[{index}].context.seq_length"
            yield from sequence_problems(facts.config, path, path, teacher.context.seq_length)


def sequence_problems(config: Config, label: str, place: str, seq_length: int) -> Iterator[UsageError]:
    """Yield what keeps the student's processes from splitting packs of a length, the setting `place`.

    The length to use fits the sides of teachers on processes of their own too.
    """
    parallel, micro_batch_size = config.parallel, config.training.micro_batch_size
    sizes = Sizes.of(parallel)
    multiple, shards = sizes.document_multiple, sizes.row if parallel.sequence_parallel else 1
    rows = [teacher_sizes(one).row for one in apart_teachers(config).values()]
    fitting = math.lcm(multiple, shards, document_multiple(config), *rows)
    fitting *= math.ceil(seq_length / fitting)
    tokens = seq_length * micro_batch_size
    if tokens >= 2**31:
        yield UsageError(
            f"{label} {seq_length} x micro-batch-size {micro_batch_size} = {tokens} tokens are too many",
            "document boundaries are 32-bit positions",
            f"lower {place} or --micro-batch-size",
            code="numbers-contradict",
        )
    if seq_length % multiple:
        yield UsageError(
            f"{label} {seq_length} is not divisible by 2 x context-parallel-size {sizes.context} = "
            f"{multiple}",
            "context parallelism gives every process two equal parts of each document",
            f"use {place} {fitting}",
            code="length-not-divisible",
        )
    elif tokens % shards:
        by_context = f" x context-parallel-size {sizes.context} = {shards}" if sizes.context > 1 else ""
        yield UsageError(
            f"{label} {seq_length} x micro-batch-size {micro_batch_size} = {tokens} tokens are not "
            f"divisible by tensor-model-parallel-size {sizes.tensor}{by_context}",
            "sequence parallelism gives every tensor-parallel process the same number of tokens",
            f"use {place} {fitting}, or remove --sequence-parallel",
            code="length-not-divisible",
        )


def check_batch(facts: RunFacts) -> Iterator[MkdError]:
    """Check that the global batch divides over processes and micro-batches, and fits interleaving."""
    problems: list[MkdError] = []
    batch = collect_error(problems, lambda: facts.batch)
    yield from problems
    pipeline = facts.config.parallel.pipeline_model_parallel_size
    # `check_layouts` reports the error.
    stages = collect_error([], lambda: facts.virtual_stages) or 1
    if batch is not None and stages > 1 and batch.num_microbatches % pipeline:
        below = batch.num_microbatches // pipeline * pipeline
        sizes = [n * batch.micro_batch_size * batch.data_parallel for n in (below, below + pipeline) if n]
        yield UsageError(
            f"{batch.num_microbatches} micro-batches of each data-parallel rank are not a multiple of "
            f"pipeline-model-parallel-size {pipeline}",
            "the interleaved schedule runs micro-batches in groups of the pipeline's size",
            f"use --global-batch-size {' or '.join(map(str, sizes))}",
            code="batch-not-divisible",
        )


def check_heads(facts: RunFacts) -> Iterator[UsageError]:
    """Check that tensor and context parallelism suit the attention and the mixers of all models."""
    sizes = Sizes.of(facts.config.parallel)
    context = sizes.context
    for role, shape, *_ in facts.models:
        yield from _check_mixers(role, shape, sizes)
        groups = _fewest_groups(shape, sizes)
        if context > 1 and any(layer.attention_sinks for layer in shape.layers):
            yield UsageError(
                f"context-parallel-size {context} does not work with the {role}'s attention sinks",
                "its attention needs all keys of a document on one process",
                "use --context-parallel-size 1, and more tensor or pipeline parallelism to save memory",
                code="exclude-each-other",
            )
        elif shape.sliding_windows and groups % context:
            yield UsageError(
                f"the {role}'s {groups} key/value heads of a process are not divisible by "
                f"context-parallel-size {context}",
                f"it attends to a window of {shape.sliding_windows[0]} tokens: context parallelism "
                "then trades tokens for heads",
                "lower --context-parallel-size or --tensor-model-parallel-size",
                code="model-not-divisible",
            )


def _fewest_groups(shape: ModelShape, sizes: Sizes) -> int:
    """Return the key/value heads of a process, in the layer that context parallelism divides least."""
    kinds = {one.heads for one in shape.layers if one.heads is None or not one.heads.is_wide}
    shapes = [replace(shape, num_query_groups=one.num_query_groups) if one else shape for one in kinds]
    groups = [one.padded_query_groups(sizes.tensor) // sizes.tensor for one in shapes]
    return max(groups, key=lambda number: number % sizes.context, default=0)


def _check_mixers(role: str, shape: ModelShape, sizes: Sizes) -> Iterator[UsageError]:
    """Check that the blocks of a model's mixers can be spread over the processes."""
    mixers = {layer.mixer for layer in shape.layers if layer.mixer}
    for mixer in sorted(mixers, key=lambda one: one.blocks):
        if mixer.blocks % sizes.row:
            given = f"tensor-model-parallel-size {sizes.tensor}"
            given += f" x context-parallel-size {sizes.context} = {sizes.row}" if sizes.context > 1 else ""
            yield UsageError(
                f"the {role}'s {mixer.blocks} {mixer.blocks_title} of a {mixer.title} are not divisible by "
                f"{given}",
                f"each of these processes runs the recurrence of the same number of {mixer.blocks_title}",
                "lower --tensor-model-parallel-size or --context-parallel-size",
                code="model-not-divisible",
            )


def check_ffn(facts: RunFacts) -> Iterator[UsageError]:
    """Check that tensor parallelism can split the models' MLPs. Heads and vocabularies are padded instead."""
    sizes, models = Sizes.of(facts.config.parallel), facts.models
    tensor, others = sizes.tensor, max(1, sizes.pipeline * sizes.context)
    common = math.gcd(*(width for model in models for width in _cut_widths(model.shape))) or tensor
    dividing = [size for size in range(1, min(tensor, common) + 1) if common % size == 0]
    fitting = [size for size in dividing if facts.world_size % (size * others) == 0] or dividing
    for role, shape, *_ in models:
        for width in sorted(width for width in _cut_widths(shape) if width % tensor):
            yield UsageError(
                f"the {role}'s ffn_hidden_size {width} is not divisible by "
                f"tensor-model-parallel-size {tensor}",
                "every tensor-parallel process holds the same number of MLP channels",
                f"use --tensor-model-parallel-size {fitting[-1]}",
                code="model-not-divisible",
            )


def _cut_widths(shape: ModelShape) -> set[int]:
    """Return the widths of the MLPs that tensor parallelism cuts: not those of experts, which stay whole."""
    shared = {layer.moe.shared_ffn_hidden_size for layer in shape.layers if layer.moe} - {0}
    return {layer.ffn_hidden_size for layer in shape.layers if layer.has_dense_mlp} | shared


def check_layouts(facts: RunFacts) -> Iterator[MkdError]:
    """Check that each model's layers can be split over the stages, as given or evenly."""
    problems: list[MkdError] = []
    stages = collect_error(problems, lambda: facts.virtual_stages)
    if stages is not None and facts.config.parallel.pipeline_layout == "even":
        for model in facts.models:
            collect_error(problems, partial(facts.layout_of, model))
    yield from problems


def check_auto_layout(facts: RunFacts) -> Iterator[MkdError]:
    """Check that `--pipeline-layout auto` finds a split. All models must have shapes and no other problem."""
    problems: list[MkdError] = []
    if facts.config.parallel.pipeline_layout == "auto":
        collect_error(problems, lambda: facts.layouts)
    yield from problems
