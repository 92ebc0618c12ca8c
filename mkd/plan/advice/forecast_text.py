"""The text of a forecast."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.human import counted, duration, floating_point, gpu_hours, milliseconds, number, size
from mkd.plan.advice.cuda_graphs import planned_graphs
from mkd.plan.checks.prefetch_limits import is_auto, obstacles, states_ahead
from mkd.plan.forecast import MOST_PLANNED, Forecast
from mkd.plan.models.lora_shape import LoRAShape
from mkd.plan.models.mixer_kernels import fla_version, unfused_reason
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.parameters import active_parameters, model_parameters, saved_bytes, weight_bytes
from mkd.plan.times.bubble import balanced_bubble


def describe_forecast(forecast: Forecast) -> str:
    """Return batch, layouts, times and memory as a few lines."""
    lines = [forecast.batch.equation(), *_layouts(forecast), *_features(forecast), *parameters(forecast)]
    lines += [*_padded_attention(forecast), *_mixers(forecast), *_times(forecast)]
    return "\n".join([*lines, forecast.memory.describe(), planned_graphs(forecast).describe()])


def summarise_forecast(forecast: Forecast, predicts: bool) -> list[str]:
    """Return the batch, the layouts of pipelines and the models; with `predicts`, time and memory in a line.

    `describe_forecast` has everything.
    """
    lines = [forecast.batch.equation()]
    if forecast.student_layout.pipeline_parallel > 1:
        lines += [*_layouts(forecast), *_ahead(forecast)]
    lines += [*_features(forecast), *parameters(forecast)]
    if predicts:
        step_ms, steps = forecast.planned_step_ms(), forecast.config.training.train_iters
        gib = forecast.planned_gib
        lines.append(
            f"predicted on H200: {milliseconds(step_ms)} a step, {duration(steps * step_ms / 1000)} for "
            f"{counted(steps, 'step')}; {gib:.1f} GiB on the fullest GPU (--dry-run shows the whole plan)"
        )
        lines += [planned_graphs(forecast).describe(), *_mixers(forecast)]
    return lines


def _layouts(forecast: Forecast) -> Iterator[str]:
    yield f"student layers by stage: {forecast.student_layout.layers}"
    for teacher, layout in zip(forecast.teachers, forecast.facts.layouts.teachers, strict=True):
        packs = f"; packs of {teacher.seq_length} tokens of its own" if teacher.has_own_row else ""
        packs += "" if teacher.is_length_known else " (as the student's, until its text is read)"
        yield f"{teacher.role} layers by stage: {layout.layers}{packs}"


def _features(forecast: Forecast) -> Iterator[str]:
    """Yield what features say about a step."""
    for teacher in forecast.teachers:
        if teacher.share < 1:
            yield f"{teacher.role}: runs in {teacher.share:.3g} of the micro-batches of a process"
    for describe in forecast.facts.work.lines:
        yield describe(forecast.batch.global_batch_size)


def models(forecast: Forecast) -> Iterator[tuple[str, ModelShape, int]]:
    """Yield the role, the shape and the expert parallelism of each model."""
    yield "student", forecast.student, forecast.facts.pair.sizes.expert
    for teacher in forecast.teachers:
        yield teacher.role, teacher.shape, teacher.sizes.expert


def parameters(forecast: Forecast) -> Iterator[str]:
    """Yield a line for each model."""
    lora = LoRAShape.of(forecast.config)
    for role, shape, expert_parallel in models(forecast):
        line = f"{role}: {number(model_parameters(shape).total)} parameters"
        if lora is not None and role == "student":
            line += f", frozen, and {number(lora.parameters(shape, shape.layers))} of adapters, which learn"
        if shape.moe:
            layers = sum(not layer.is_dense for layer in shape.layers)
            line += (
                f", {number(active_parameters(shape))} active: {shape.moe.top_k} of "
                f"{shape.num_experts} experts in {layers} of {counted(shape.num_layers, 'layer')}, "
                f"spread over {counted(expert_parallel, 'process')}"
            )
        yield line
    yield from _heads(forecast)


def _heads(forecast: Forecast) -> Iterator[str]:
    """Yield a line for each teacher that does not run here: where it is, and the memory of its head."""
    teachers, numbers = forecast.config.teachers, forecast.facts.head_numbers
    element, pair = 2 if forecast.config.training.bf16 else 4, forecast.facts.pair
    seconds = forecast.planned_step_ms() / 1000
    tokens = forecast.batch.global_batch_size * forecast.batch.seq_length / forecast.facts.sizes.copies
    for teacher, settings in zip(pair.heads, (teachers[one] for one in numbers), strict=True):
        row, rows = teacher.shape.hidden_size * element, teacher.shape.padded_vocab_size(pair.sizes.tensor)
        head = f"on the last stage the head takes {size(rows // pair.sizes.tensor * row)}"
        if settings.is_apart:
            yield f"{teacher.role}: runs on {counted(settings.processes, 'process')} of its own; {head}"
            continue
        yield (
            f"{teacher.role}: hidden states are stored, {row:,} bytes a loss token; {head}, and a process "
            f"reads up to {size(round(tokens * row / seconds))} a second"
        )


def _padded_attention(forecast: Forecast) -> list[str]:
    tensor = forecast.config.parallel.tensor_model_parallel_size
    return [
        f"{role} attention: {shape.num_query_groups} key/value heads padded to "
        f"{shape.padded_query_groups(tensor)} for tensor parallel"
        for role, whole, _ in models(forecast)
        for shape in dict.fromkeys(map(whole.for_layer, whole.layers))
        if shape.num_query_groups % tensor
    ]


def _mixers(forecast: Forecast) -> Iterator[str]:
    """Yield how mixers run on GPUs, if there are some."""
    shapes = [shape for _, shape, _ in models(forecast)]
    mixers = {layer.mixer for shape in shapes for layer in shape.layers if layer.mixer}
    training = forecast.config.training
    reasons = {unfused_reason(mixer, training.bf16, training.deterministic_mode) for mixer in mixers}
    if None in reasons:
        yield f"mixers: fused kernels of fla-core {fla_version()}"
    for reason in sorted(filter(None, reasons)):
        yield f"mixers: plain torch, slower and with more memory ({reason})"


def _ahead(forecast: Forecast) -> Iterator[str]:
    """Yield a line about the teacher forwards ahead, also if `auto` keeps possible ones back."""
    wanted, usable_gib = states_ahead(forecast.config), forecast.usable_gib()
    chosen = ", chosen by auto" if is_auto(forecast.config) else ""
    if forecast.prefetch is not None:
        step_ms, held = forecast.prefetch.step_ms, max(forecast.prefetch.plan.held)
        yield (
            f"predicted step with teachers ahead (--teacher-prefetch {forecast.states_ahead}{chosen}): "
            f"{milliseconds(step_ms)}, {step_ms / forecast.step.ideal_ms:.3f} x the ideal; at most {held} "
            "micro-batches of their hidden states wait for the loss"
        )
    elif wanted and forecast.teachers:
        tasks = forecast.student_layout.pipeline_parallel * forecast.batch.num_microbatches
        why = f"no order of work with {wanted} micro-batches ahead was found that is faster"
        if tasks > MOST_PLANNED:
            why = f"{tasks} ranks x micro-batches are more than {MOST_PLANNED}, and take too long to plan"
        elif usable_gib is not None and forecast.need_gib(wanted) > usable_gib:
            why = f"{wanted} micro-batches ahead would need {forecast.need_gib(wanted):.1f} GiB"
            why += f", but only {usable_gib:.1f} GiB are usable"
        yield f"teachers do not run ahead (--teacher-prefetch 0{chosen}): {why}"
    elif is_auto(forecast.config) and forecast.teachers and forecast.student_layout.pipeline_parallel > 1:
        why = next(obstacles(forecast.config)).why
        yield f"teachers do not run ahead (--teacher-prefetch 0{chosen}): {why}"


def _times(forecast: Forecast) -> list[str]:
    step, layout, microbatches = forecast.step, forecast.student_layout, forecast.batch.num_microbatches
    copies_ms, optimizer_ms = forecast.optimizer_copies_ms(), forecast.optimizer_ms
    step_ms = forecast.planned_step_ms()
    equal = balanced_bubble(layout.pipeline_parallel, microbatches, layout.virtual_stages)
    by_stage = ", ".join(f"{_ms(time.forward_ms)} + {_ms(time.backward_ms)}" for time in forecast.stage_times)
    copies = f", {milliseconds(copies_ms)} of them copies from and to the host" if copies_ms else ""
    update = milliseconds(forecast.student_step_ms() / forecast.updates)
    replicas = f" and {milliseconds(forecast.replica_ms)} of gradients and weights between replicas"
    replicas = replicas if forecast.replica_ms else ""
    optimizer = f"with {milliseconds(optimizer_ms)} of the optimizer's update{copies}{replicas}: {update}"
    sent = {
        "all-to-all of experts": forecast.exchange_ms(),
        "tensor and context parallel collectives that nothing hides": forecast.collectives_ms(),
    }
    bf16 = forecast.config.training.bf16
    of_teachers = dict.fromkeys(one.precision.title for one in forecast.teachers if one.precision.title)
    precision = " and ".join(["bf16" if bf16 else "fp32", *of_teachers])
    peak = " of the bf16 peak" if of_teachers or not bf16 else ""
    flops, gpus = floating_point(forecast.flops_per_step), counted(forecast.num_gpus, "GPU")
    share = f"share of the teachers in these FLOPs: {forecast.teacher_share():.3f}"
    return [
        f"predicted on H200 in {precision}, forward + backward ms of a micro-batch by stage: {by_stage}",
        f"predicted step: {milliseconds(step.step_ms)}, {step.ratio:.3f} x the ideal "
        f"{milliseconds(step.ideal_ms)}; bubble {step.bubble:.3f} (equal stages {equal:.3f})",
        *_ahead(forecast),
        optimizer,
        *(
            [f"{forecast.updates} updates of a step's completions: {milliseconds(step_ms)}"]
            if forecast.updates > 1
            else []
        ),
        f"{flops} a step on {gpus}: predicted MFU {forecast.mfu(step_ms):.3f}{peak}; "
        f"at MFU 0.5 a step takes {milliseconds(forecast.mfu(1.0) / 0.5)}",
        *([share] if forecast.teachers or forecast.sides else []),
        *(
            f"{what}: {milliseconds(ms)} of a rank's step, share {ms / step_ms:.3f}"
            for what, ms in sent.items()
            if ms
        ),
    ]


def _ms(time: float) -> str:
    """Return three digits without an exponent: 0.04, 69.8, 2,260."""
    return f"{time:.3g}" if 0.1 <= time < 999.5 else f"{time:.2f}" if time < 0.1 else f"{time:,.0f}"


def describe_totals(forecast: Forecast) -> str:
    """Return time, GPU-hours, tokens and disk of a whole run as a line."""
    config, student = forecast.config, forecast.student
    steps, bf16 = config.training.train_iters, config.training.bf16
    hours = steps * forecast.planned_step_ms() / 3.6e6
    checkpoint = saved_bytes(config, student)
    return (
        f"{counted(steps, 'step')}: {duration(3600 * hours)}, {gpu_hours(hours * forecast.num_gpus)}, "
        f"{number(steps * forecast.batch.tokens_per_step)} tokens; on disk a checkpoint takes about "
        f"{size(checkpoint)}, the exported student {size(weight_bytes(student, bf16))}"
    )
