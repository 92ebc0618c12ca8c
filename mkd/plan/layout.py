"""How the decoder layers of one model are split over pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.errors import UsageError


@dataclass(frozen=True)
class PipelineLayout:
    """Layers per stage in model order: stage `virtual_stage * pipeline_parallel + pipeline_rank`."""

    layers: tuple[int, ...]
    pipeline_parallel: int
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        assert len(self.layers) == self.pipeline_parallel * self.virtual_stages

    @classmethod
    def even(cls, num_layers: int, pipeline_parallel: int, virtual_stages: int = 1) -> PipelineLayout:
        """The same number of layers everywhere. Raises UsageError when that is impossible."""
        stages = pipeline_parallel * virtual_stages
        if num_layers % stages:
            raise UsageError(
                f"{num_layers} layers do not divide over {stages} pipeline stages", "every stage needs whole layers", ""
            )
        return cls((num_layers // stages,) * stages, pipeline_parallel, virtual_stages)

    @classmethod
    def parse(cls, text, num_layers, pipeline_parallel, virtual_stages=1):
        return cls(tuple(int(x) for x in text.split(",")), pipeline_parallel, virtual_stages)

    def to_megatron(self) -> list[list[str]]:
        """Megatron's `pipeline_model_parallel_layout`, one list per stage."""
        stages = [["decoder"] * count for count in self.layers]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        return stages

    def for_rank(self, pipeline_rank: int, virtual_stage: int = 0) -> tuple[int, int]:
        """(first layer, number of layers) of one chunk."""
        stage = virtual_stage * self.pipeline_parallel + pipeline_rank
        return sum(self.layers[:stage]), self.layers[stage]
