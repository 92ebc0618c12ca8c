"""Check that a student can be rounded as its run says: precision, layout, groups, patterns and family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mkd.config.models import EMA
from mkd.config.rounding_formats import FORMATS, ROW, Rounding
from mkd.config.schema import Config
from mkd.errors import UsageError
from mkd.kinds.rounded.rounding_settings import RoundingConfig
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.rounded_tensors import LayerMatrix, layer_matrices


def unused_settings(config: Config) -> Iterator[UsageError]:
    """Yield settings that nothing reads without --student-rounding."""
    settings, defaults = config.rounding, RoundingConfig()
    excluded = config.lora.is_on or any(one.weights == EMA for one in config.teachers)
    do = "remove it" if excluded else "add --student-rounding" + " --bf16" * (not config.training.bf16)
    for name in ("rounding_group", "rounding_exclude", "round_activations", "calibration_batches"):
        if getattr(settings, name) != getattr(defaults, name):
            yield no_effect(f"--{name.replace('_', '-')}", "nothing is rounded", do)


def rounding_problems(facts: RunFacts, rounding: Rounding) -> Iterator[UsageError]:
    """Yield what is wrong with a run that rounds its student."""
    config, flag = facts.config, f"--student-rounding {rounding.format}"
    if not config.training.bf16:
        why = "the rounded weights are copies of the fp32 main weights that only --bf16 has"
        yield UsageError(f"{flag} without --bf16", why, "add --bf16", code="add-flag")
    if config.parallel.overlap_param_gather:
        why = "weights are rounded after all of them have been gathered"
        do = "remove --overlap-param-gather"
        yield UsageError(f"{flag} with --overlap-param-gather", why, do, code="exclude-each-other")
    if config.lora.is_on:
        why = "the weights under adapters are frozen, and the adapters are not rounded"
        do = "keep --lora-rank or --student-rounding"
        yield UsageError(f"{flag} with --lora-rank", why, do, code="exclude-each-other")
    if rounding.inputs:
        yield from _input_problems(facts, rounding)
    if rounding.group not in rounding.kind.groups:
        yield _unknown_group(rounding)
    elif facts.student is not None:
        yield from _student_problems(facts.student, rounding, config.parallel.tensor_model_parallel_size)


def _input_problems(facts: RunFacts, rounding: Rounding) -> Iterator[UsageError]:
    """Yield what is wrong with a run that rounds inputs of matrices, too."""
    config, student = facts.config, facts.student
    if not rounding.kind.inputs:
        formats = ", ".join(name for name, one in FORMATS.items() if one.inputs)
        what = f"--round-activations with --student-rounding {rounding.format}"
        why = "mkd rounds only weights to this format"
        do = f"remove --round-activations, or use {formats}"
        yield UsageError(what, why, do, code="exclude-each-other")
    if config.rollout.is_on and not config.rollout.samples_here:
        what = f"--round-activations with --rollout-source {config.rollout.rollout_source}"
        why = "the sampler gets rounded weights, but computes with exact inputs"
        do = "let the student sample in this process, or remove --round-activations"
        yield UsageError(what, why, do, code="exclude-each-other")
    if student is None:
        return
    unlike = "experts" if student.moe else ""
    unlike = "latent attention" if any(one.mla is not None for one in student.layers) else unlike
    unlike = "mixers" if any(one.mixer is not None for one in student.layers) else unlike
    if unlike:
        what, why = f"--round-activations, but the student has {unlike}", "their inputs are not rounded yet"
        yield UsageError(what, why, "round weights alone", code="model-feature-not-supported")


def _unknown_group(rounding: Rounding) -> UsageError:
    what = f"--rounding-group {rounding.group} with --student-rounding {rounding.format}"
    lengths = rounding.kind.groups
    if len(lengths) > 1:
        sizes = ", ".join(map(str, lengths))
        return UsageError(what, f"the format has groups of {sizes}", f"use {sizes}", code="value-unknown")
    scale = "each row has one scale" if lengths == (ROW,) else f"its groups have {lengths[0]} elements"
    with_groups = ", ".join(name for name, one in FORMATS.items() if len(one.groups) > 1)
    return UsageError(
        what, scale, f"remove --rounding-group; {with_groups} has a choice", code="value-unknown"
    )


def _student_problems(shape: ModelShape, rounding: Rounding, tensor: int) -> Iterator[UsageError]:
    flag = f"--student-rounding {rounding.format}"
    if shape.vision is not None:
        what, why = f"{flag}, but the student takes images", "rounded students with a tower were never tried"
        yield UsageError(what, why, "use a student of text alone", code="model-feature-not-supported")
        return
    matrices = list(layer_matrices(shape, tensor))
    rounded = [one for one in matrices if not any(map(rounding.excludes, one.tensors))]
    if stacked := next((one for one in rounded if one.is_stacked), None):
        what = f"{flag}, but {stacked.tensors[0]} holds the experts of a whole layer"
        why = "no file format has codes and scales of such tensors that transformers and vLLM both read"
        do = "exclude the experts, --rounding-exclude '*.experts.*'"
        yield UsageError(what, why, do, code="model-feature-not-supported")
    yield from _pattern_problems(matrices, rounding)
    if wrong := next((one for one in rounded if not _fits(one, rounding, tensor)), None):
        yield _group_problem(wrong, shape, rounding, tensor)


def _pattern_problems(matrices: list[LayerMatrix], rounding: Rounding) -> Iterator[UsageError]:
    """Yield patterns that match nothing, and those that match a part of what mkd keeps as one matrix."""
    for pattern in rounding.exclude:
        alone = replace(rounding, exclude=(pattern,))
        if not any(alone.excludes(name) for one in matrices for name in one.tensors):
            example = matrices[0].tensors[0].removesuffix(".weight") if matrices else "its modules"
            what = f"--rounding-exclude {pattern!r} matches no matrix of the student"
            why = f"their names are like {example}; embedding, head, norms and routers are never rounded"
            yield UsageError(what, why, "correct the pattern, or remove it", code="value-unknown")
    for one in matrices:
        found = [rounding.excludes(name) for name in one.tensors]
        if any(found) and not all(found):
            names = [name.removesuffix(".weight").rpartition(".")[2] for name in one.tensors]
            what = f"--rounding-exclude matches only a part of {', '.join(names)} of layer {one.layer}"
            why = "mkd keeps them as one matrix, which is rounded whole or not at all"
            yield UsageError(what, why, "match all of them, or none", code="value-not-valid")
            return


def _fits(one: LayerMatrix, rounding: Rounding, tensor: int) -> bool:
    """Return True if no group lies on two processes, and no block of rows on two processes or matrices."""
    group, rows = rounding.group, rounding.kind.block_rows
    whole = group == ROW or (one.row % group == 0 and one.row_of_process % group == 0)
    return whole and not any(part % rows for part in one.parts)


def _group_problem(one: LayerMatrix, shape: ModelShape, rounding: Rounding, tensor: int) -> UsageError:
    name = one.tensors[0].removesuffix(".weight")
    flag = f"--student-rounding {rounding.format}"
    sizes = f"{max(one.parts)} rows of {one.row_of_process} elements"
    cut = f" on each of {tensor} tensor-parallel processes" if tensor > 1 else ""
    rows, group = rounding.kind.block_rows, rounding.group
    block = f"blocks of {rows} x {group}" if rows > 1 else f"groups of {group} elements"
    parts = (
        f", of which {', '.join(map(str, one.parts))} belong together"
        if len(one.parts) > 1 and rows > 1
        else ""
    )
    why = "a group must not lie on two processes, or end behind a row"
    patterns = " ".join(f"'*.{part.removesuffix('.weight').rpartition('.')[2]}'" for part in one.tensors)
    do = _remedies(shape, rounding, tensor) or f"exclude it: --rounding-exclude {patterns}"
    what = f"{flag}: {name} has {sizes}{cut}{parts}, not a multiple of {block}"
    return UsageError(what, why, do, code="model-not-divisible")


def _remedies(shape: ModelShape, rounding: Rounding, tensor: int) -> str:
    """Return the largest group that works here, and the largest tensor parallelism for the given group."""

    def works(group: int, tensor: int) -> bool:
        tried = replace(rounding, group=group)
        matrices = layer_matrices(shape, tensor)
        return all(any(map(tried.excludes, one.tensors)) or _fits(one, tried, tensor) for one in matrices)

    groups = [group for group in rounding.kind.groups if group != rounding.group and works(group, tensor)]
    smaller = (one for one in range(tensor - 1, 0, -1) if tensor % one == 0)
    largest = next((one for one in smaller if works(rounding.group, one)), None)
    found = [f"--rounding-group {groups[0]}"] if groups else []
    found += [f"--tensor-model-parallel-size {largest}"] if largest else []
    return "use " + " or ".join(found) if found else ""
