"""Runs whose student learns by adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mkd.checkpoint.hf.hf_folder import model_in_the_way
from mkd.config.schema import Config
from mkd.errors import UsageError, collect_error
from mkd.kinds.kind import NOTHING, Kind, Row
from mkd.kinds.lora.lora_settings import LINEAR_LAYERS, LoRAConfig
from mkd.operations.run_folders import continues
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.lora_shape import NF4, NF4_BLOCK, LoRAShape
from mkd.plan.models.model_shape import ModelShape

if TYPE_CHECKING:  # they load torch
    from mkd.resolve.model_source import ModelSource
    from mkd.resolve.preflight import Tokenizers


class LoRAStudents(Kind):
    """Runs whose student learns by adapters."""

    calculates_with = ("lora_rank", "lora_alpha")

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        config, settings, lora = facts.config, facts.config.lora, LoRAShape.of(facts.config)
        if lora is None:
            changed = (one.name for one in fields(LoRAConfig) if getattr(settings, one.name) != one.default)
            for name in changed:
                flag = name.replace("_", "-")
                do = "give --lora-rank" if config.rounding.rounding is None else "remove it"
                yield no_effect(flag, "the student has no adapters", do)
            return
        for unknown in (one for one in lora.targets if one not in LINEAR_LAYERS):
            what = f"lora-targets: {unknown!r} is not a known value"
            why = "routed experts, routers, embedding and head have no adapters"
            yield UsageError(what, why, f"use {', '.join(LINEAR_LAYERS)}", code="value-unknown")
        yield from _others(config)
        if facts.student is not None:
            yield from _widths(lora, facts.student)
        if lora.is_rounded:
            yield from _rounded(lora, facts)
        if facts.student is not None and facts.config.parallel.pipeline_layout != "auto":
            # `check_layouts` reports a layout that is not valid.
            layout = collect_error([], lambda: facts.layout_of(facts.models[0]))
            yield from _stages(lora, facts.student, layout) if layout else ()

    def identity(self, config: Config) -> Mapping[str, object]:
        lora = LoRAShape.of(config)
        if lora is None:
            return NOTHING
        found: dict[str, object] = {
            "student.lora_rank": lora.rank,
            "student.lora_alpha": lora.alpha,
            "student.lora_targets": sorted(lora.targets),
        }
        return found | ({"student.lora_base": NF4} if lora.is_rounded else {})

    def student_rows(self, config: Config) -> Iterator[Row]:
        lora = LoRAShape.of(config)
        if lora is not None:
            factor = f"y = W x + {lora.scale:g} B A x of rank {lora.rank}"
            base = f"; W rounded to {NF4}" if lora.is_rounded else ""
            yield "adapters", f"{factor}, on {', '.join(lora.targets)}{base}; all other weights are frozen"

    def file_problems(
        self,
        facts: RunFacts,
        tokenizers: Tokenizers | None,
        student: ModelSource | None,
        teachers: Sequence[ModelSource | None],
    ) -> Iterator[UsageError]:
        checkpoint, folder = facts.config.checkpoint, facts.config.lora.export_lora
        lora, is_auto = LoRAShape.of(facts.config), facts.config.parallel.pipeline_layout == "auto"
        if lora is not None and facts.student is not None and is_auto and facts.is_known:
            layouts = collect_error([], lambda: facts.layouts)
            yield from _stages(lora, facts.student, layouts.student) if layouts else ()
        if folder is None:
            return
        is_own = checkpoint.overwrite or continues(checkpoint)
        if (Path(folder) / "config.json").exists() or not is_own:
            in_the_way = model_in_the_way("--export-lora", Path(folder))
            yield from [in_the_way] if in_the_way else []


def _others(config: Config) -> Iterator[UsageError]:
    """Yield a problem for every setting that trains other weights than adapters."""
    rank, why = config.lora.lora_rank, "adapters alone learn, and checkpoints hold nothing else"
    parts, default = config.student.train_parts, type(config.student)().train_parts
    others = {
        f"student-train-parts {' '.join(parts)}": parts != default,
        f"moe-router-bias-update-rate {config.training.moe_router_bias_update_rate:g}": (
            config.training.moe_router_bias_update_rate != 0
        ),
    }
    for given in (name for name, is_given in others.items() if is_given):
        what = f"lora-rank is {rank}, and {given} is given"
        yield UsageError(what, why, "remove one of them", code="exclude-each-other")
    if config.lora.export_lora and config.student.load:
        what, why = "export-lora and student-load are given", "PEFT would add the adapters to other weights"
        do = "export the checkpoint and name that folder as --student-hf, or use --export-hf"
        yield UsageError(what, why, do, code="exclude-each-other")


def _stages(lora: LoRAShape, student: ModelShape, layout: PipelineLayout) -> Iterator[UsageError]:
    """Yield a problem for a pipeline stage that would learn nothing: checkpoints would have no part of it."""
    first = 0
    for stage, count in enumerate(layout.layers):
        layers, first = student.layers[first : first + count], first + count
        if not any(lora.linears(student, layer) for layer in layers):
            what = f"pipeline stage {stage} of the student has no layer with an adapter"
            why = "its process would have nothing to learn and to save"
            do = "give each stage such a layer with --student-pipeline-layout, or give more --lora-targets"
            yield UsageError(what, why, do, code="layout-not-valid")
            return


def _rounded(lora: LoRAShape, facts: RunFacts) -> Iterator[UsageError]:
    """Yield a problem for weights that cannot be stored in NF4."""
    given, tensor = f"lora-base is {NF4}", facts.config.parallel.tensor_model_parallel_size
    if find_spec("bitsandbytes") is None:
        what, why = f"{given}, and bitsandbytes is not installed", "it has the kernels of this format"
        yield UsageError(what, why, "pip install 'megatron-kd[quantised]'", code="package-missing")
    if facts.config.student.load:
        what, why = (
            f"{given}, and student-load is given",
            "layers are rounded as they are read from --student-hf",
        )
        yield UsageError(what, why, "export the checkpoint and name that folder", code="exclude-each-other")
    if facts.student is None:
        return
    found = {one for layer in facts.student.layers for one in lora.linears(facts.student, layer, tensor)}
    odd = min((one for one in found if one.input % NF4_BLOCK), default=None)
    if odd is not None:
        what = f"{given}, and {odd.target} has rows of {odd.input} weights on a process"
        why = f"scales are for {NF4_BLOCK} weights of a row, and the layout must not change them"
        do = "use a smaller --tensor-model-parallel-size, other --lora-targets, or --lora-base bf16"
        yield UsageError(what, why, do, code="value-not-valid")


def _widths(lora: LoRAShape, student: ModelShape) -> Iterator[UsageError]:
    """Yield a problem for targets that no layer has, and for a rank that a layer cannot have.

    The default targets mean those that the student has.
    """
    found = {one for layer in student.layers for one in lora.linears(student, layer)}
    known = [target for target in lora.targets if target in LINEAR_LAYERS]
    missing = [target for target in known if target not in {one.target for one in found}]
    is_default = lora.targets == LINEAR_LAYERS and len(missing) < len(known)
    if missing and not is_default:
        what = f"lora-targets {' '.join(missing)} match no layer of the student"
        why = "its MLPs are routed experts, which have no adapters"
        do = f"leave out {' and '.join(missing)}"
        yield UsageError(what, why, do, code="value-not-valid")
    narrow = min(found, key=lambda one: min(one.input, one.output), default=None)
    if narrow is not None and lora.rank > min(narrow.input, narrow.output):
        what = (
            f"lora-rank {lora.rank} is above the width of {narrow.target}, {narrow.output} x {narrow.input}"
        )
        why = "a product of its factors could not have this rank"
        do = f"use {min(narrow.input, narrow.output)} or less; 8 to 64 is usual"
        yield UsageError(what, why, do, code="out-of-range")
