"""Check `--teacher-precision fp8`: teachers, packs and layouts whose products Transformer Engine can make."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mkd.config.schema import Config, TeacherConfig
from mkd.errors import UsageError
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.checks.teacher_peers import place_of
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes

ROWS, WIDTHS = 8, 16
"""Multiples of the tokens and of the channels that an FP8 product takes, in Transformer Engine."""

BLOCK = 128
"""Multiple of both if sequence parallelism gathers activations that have a scale for each block."""

LENGTH_UNIT = 64
"""Multiple of the length of packs that follows from the data (mkd/data/aligned/teacher_pieces.py)."""


def fp8_recipes(facts: RunFacts) -> set[str]:
    """Return the recipes of the teachers that run in FP8."""
    return {one.fp8_recipe for one in facts.running.values() if one.precision == "fp8"}


def check_precision(facts: RunFacts) -> Iterator[UsageError]:
    """Check the settings: bf16 besides the products, packs of a fitting length, a recipe only for FP8."""
    config = facts.config
    for index, teacher in facts.running.items():
        place = place_of(index)
        if teacher.precision == "fp8":
            if not config.training.bf16:
                why = "everything but the products stays in bf16, and the run is in fp32"
                do = f"add --bf16, or remove {place}precision"
                yield UsageError(f"{place}precision fp8 without --bf16", why, do, code="add-flag")
            yield from _check_rows(config, teacher, place)
        elif teacher.fp8_recipe != TeacherConfig.fp8_recipe:
            name = f"{place}fp8_recipe" if index else "--teacher-fp8-recipe"
            why, do = f"{place}precision is bf16", f"add {place}precision fp8"
            yield no_effect(f"{name} {teacher.fp8_recipe}", why, do)


def _check_rows(config: Config, teacher: TeacherConfig, place: str) -> Iterator[UsageError]:
    """Check that the tokens of a process in front of a product are a fitting number."""
    parallel, packs = config.parallel, config.training.micro_batch_size
    sizes = Sizes.of(parallel)
    length, label = config.training.seq_length, "--seq-length"
    if teacher.xtoken is not None:
        known = teacher.xtoken.seq_length
        length, label = known or LENGTH_UNIT * sizes.document_multiple, "the teacher's xtoken seq_length"
    rows = BLOCK if _gathers_blocks(config, teacher) else ROWS
    multiple = rows * (sizes.row if parallel.sequence_parallel else sizes.context)
    if packs * length % multiple:
        given = f"context-parallel-size {sizes.context}"
        given += f" x tensor-model-parallel-size {sizes.tensor}" if parallel.sequence_parallel else ""
        unit = multiple // math.gcd(packs, multiple)
        yield UsageError(
            f"{place}precision fp8: {label} {length} x micro-batch-size {packs} over {given} is not a "
            f"multiple of {rows} tokens",
            "FP8 products take only such numbers of rows",
            f"use {label} {unit * math.ceil(length / unit)}",
            code="length-not-divisible",
        )


def _gathers_blocks(config: Config, teacher: TeacherConfig) -> bool:
    """Return True if tensor-parallel processes gather activations with scales of blocks."""
    parallel = config.parallel
    is_sharded = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    return is_sharded and teacher.fp8_recipe == "blockwise"


def check_precision_of_models(facts: RunFacts) -> Iterator[UsageError]:
    """Check the models: dense layers with plain attention, whose widths fit."""
    config = facts.config
    for model in facts.models:
        if model.teacher is None or model.teacher not in facts.running:
            continue
        teacher = facts.running[model.teacher]
        if teacher.precision == "fp8":
            place = f"{place_of(model.teacher)}precision fp8"
            width = BLOCK if _gathers_blocks(config, teacher) else WIDTHS
            yield from _check_shape(config, place, model.shape, width)


def _check_shape(config: Config, place: str, shape: ModelShape, hidden: int) -> Iterator[UsageError]:
    """Check one teacher, whose hidden size has to be a multiple of `hidden`."""
    do = f"remove {place}: --teacher-residency peers or host saves memory, too"
    if shape.moe is not None:
        what, why = f"{place}, but the teacher has experts", "FP8 products of experts are not supported yet"
        yield UsageError(what, why, do, code="fp8-not-possible")
    elif any(layer.mla is not None for layer in shape.layers):
        what = f"{place}, but the teacher has latent attention"
        yield UsageError(what, "its FP8 products are not supported yet", do, code="fp8-not-possible")
    else:
        tensor = config.parallel.tensor_model_parallel_size
        widths = sorted(width for width in _widths(shape, tensor) if width % WIDTHS)
        if not widths and shape.hidden_size % hidden:
            what = (
                f"{place} with blockwise scales and sequence parallelism, but hidden size {shape.hidden_size}"
            )
            why = f"blocks of activations have {hidden} channels"
            do = "use --teacher-fp8-recipe tensorwise"
            yield UsageError(what, why, do, code="fp8-not-possible")
        if widths:
            given = ", ".join(map(str, widths))
            what = f"{place}, but weights of the teacher have {given} channels on a process"
            why = f"FP8 products take multiples of {WIDTHS}"
            do = f"{do}; a smaller --tensor-model-parallel-size may fit" if tensor > 1 else do
            yield UsageError(what, why, do, code="fp8-not-possible")


def _widths(shape: ModelShape, tensor: int) -> set[int]:
    """Return the channels of the weights of one process."""
    groups = shape.padded_query_groups(tensor) // tensor
    query, key_value = groups * shape.heads_per_group * shape.head_dim, groups * shape.head_dim
    widths = {shape.hidden_size, query, query + 2 * key_value}
    return widths | {layer.ffn_hidden_size // tensor for layer in shape.layers}
