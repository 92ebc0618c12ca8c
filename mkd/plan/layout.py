"""The split of one model's decoder layers over pipeline ranks and their virtual stages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from mkd.errors import UsageError

STUDENT_FLAG = "--student-pipeline-layout"


@dataclass(frozen=True)
class PipelineLayout:
    """Layers per stage in model order: stage `virtual_stage * pipeline_parallel + pipeline_rank`."""

    layers: tuple[int, ...]
    pipeline_parallel: int
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        assert len(self.layers) == self.pipeline_parallel * self.virtual_stages

    @classmethod
    def even(
        cls, num_layers: int, pipeline_parallel: int, virtual_stages: int = 1, flag: str = STUDENT_FLAG
    ) -> PipelineLayout:
        """Put the same number of layers on every stage. Raises UsageError, with `flag` as the way out."""
        stages = pipeline_parallel * virtual_stages
        layers, rest = divmod(num_layers, stages)
        if rest:
            split = f"{pipeline_parallel} pipeline stages"
            split += f" x {virtual_stages} virtual stages = {stages}" if virtual_stages > 1 else ""
            what = f"{num_layers} layers do not divide over {split}"
            why = "an even split would drop the remaining layers"
            nearly = nearly_even(num_layers, stages)
            do = f"use {flag} {nearly} or --pipeline-layout auto" if layers else "use fewer pipeline stages"
            raise UsageError(what, why, do, code="layers-not-divisible")
        return cls((layers,) * stages, pipeline_parallel, virtual_stages)

    @classmethod
    def parse(
        cls,
        text: str,
        num_layers: int,
        pipeline_parallel: int,
        virtual_stages: int = 1,
        flag: str = STUDENT_FLAG,
    ) -> PipelineLayout:
        """Read `8,8,7,7` (layers per stage) or Megatron's `Et*8|t*8|t*7|t*7L`, where `(...)*n` repeats.

        Raises UsageError for any other text, and for a layout that does not fit the model or the pipeline.
        Only the first stage (embedding) and the last one (head) may have no layers.
        """
        stages = pipeline_parallel * virtual_stages
        layers = _parse_counts(text) or _parse_megatron(text, flag)
        example = nearly_even(num_layers, stages) if num_layers >= stages else None
        do = f"use for example {flag} {example}" if example else "use fewer pipeline stages"
        if len(layers) != stages:
            what = f"{flag} {text} has {len(layers)} stages, the pipeline has {stages}"
            why = f"{pipeline_parallel} pipeline ranks x {virtual_stages} virtual stages need an entry each"
            raise UsageError(what, why, do, code="layout-not-valid")
        if sum(layers) != num_layers:
            what = f"{flag} {text} has {sum(layers)} layers, the model has {num_layers}"
            why = "every layer of the model belongs to exactly one stage"
            raise UsageError(what, why, do, code="layout-not-valid")
        if 0 in layers[1:-1]:
            what = f"{flag} {text} leaves stage {layers.index(0, 1)} without a layer"
            why = "only the first stage (embedding) and the last one (head) have work without layers"
            raise UsageError(what, why, do, code="layout-not-valid")
        return cls(layers, pipeline_parallel, virtual_stages)

    @classmethod
    def create(
        cls,
        text: str | None,
        num_layers: int,
        pipeline_parallel: int,
        virtual_stages: int = 1,
        flag: str = STUDENT_FLAG,
    ) -> PipelineLayout:
        """Parse the layout if the user gave one, else split evenly."""
        sizes = (num_layers, pipeline_parallel, virtual_stages, flag)
        return cls.parse(text, *sizes) if text else cls.even(*sizes)

    def to_megatron(self) -> list[list[str]]:
        """Return Megatron's `pipeline_model_parallel_layout`: a list of layer kinds per stage."""
        stages = [["decoder"] * count for count in self.layers]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        return stages

    def for_rank(self, pipeline_rank: int, virtual_stage: int = 0) -> tuple[int, int]:
        """Return (first layer, number of layers) of one virtual stage; layers count from 0."""
        stage = virtual_stage * self.pipeline_parallel + pipeline_rank
        return sum(self.layers[:stage]), self.layers[stage]


class Layouts(NamedTuple):
    """The layouts of all models of a run."""

    student: PipelineLayout
    teachers: tuple[PipelineLayout, ...]  # of each teacher that runs


def nearly_even(num_layers: int, stages: int) -> str:
    """Return the most even split as text: `8,8,7,7` for 30 layers on 4 stages."""
    layers, rest = divmod(num_layers, stages)
    return ",".join(str(layers + (stage < rest)) for stage in range(stages))


def count_virtual_stages(
    num_layers: int,  # of the student
    pipeline_parallel: int,
    layers_per_virtual_stage: int | None = None,
    num_virtual_stages: int | None = None,
) -> int:
    """Return the virtual stages of each pipeline rank (default: 1), from Megatron's two settings.

    `--num-layers-per-virtual-pipeline-stage N` counts the student's layers; the teacher gets as many stages.
    Raises UsageError if N does not divide the student's layers of a rank.
    """
    if layers_per_virtual_stage is None:
        return num_virtual_stages or 1
    per_rank, rest = divmod(num_layers, pipeline_parallel)
    if rest or per_rank % layers_per_virtual_stage:
        raise UsageError(
            f"num-layers-per-virtual-pipeline-stage {layers_per_virtual_stage} does not divide the student's "
            f"{num_layers} layers / {pipeline_parallel} pipeline stages",
            "every virtual stage of the student would have to hold that many layers",
            f"use --num-virtual-stages-per-pipeline-rank with {STUDENT_FLAG}",
            code="layers-not-divisible",
        )
    return per_rank // layers_per_virtual_stage


def _parse_counts(text: str) -> tuple[int, ...] | None:
    """Read `8, 8, 7, 7` as (8, 8, 7, 7); return None for another notation."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(map(int, parts)) if all(re.fullmatch(r"\d+", part) for part in parts) else None


def _parse_megatron(text: str, flag: str) -> tuple[int, ...]:
    """Read Megatron's form: E embedding, t decoder layer, L loss, `|` between stages."""
    expanded = re.sub(r"[,\s]", "", text)
    for repeated in (r"\(([^()]*)\)\*(\d+)", r"([EtL|])\*(\d+)"):
        expanded = re.sub(repeated, lambda match: match[1] * int(match[2]), expanded)
    if not re.fullmatch(r"E[t|]*L", expanded):
        raise UsageError(
            f"{flag} {text} is not a layout",
            "write a list of layers per stage, or Megatron's form: E (embedding) comes first, L (loss) last, "
            "t is a decoder layer, | ends a stage and *n repeats",
            f"use for example {flag} 8,8,7,7 or 'Et*8|t*8|t*7|t*7L'",
            code="layout-not-valid",
        )
    return tuple(stage.count("t") for stage in expanded.split("|"))
