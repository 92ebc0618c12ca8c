"""Let the decoder layers of all models run as CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

from megatron.core.distributed import DistributedDataParallel
from torch import nn

from mkd.models.graphs.graph_memory import GraphMemory
from mkd.models.graphs.graphed_decoder import GraphedDecoder
from mkd.models.language_model import LanguageModel
from mkd.models.stage import DistillationStage
from mkd.parallel.context import ParallelContext


@dataclass(frozen=True)
class DDPSync:
    """Does for layers in graphs what Megatron's DDP does in the hooks of modules and parameters."""

    wrapped: DistributedDataParallel
    parameters: tuple[nn.Parameter, ...]  # of the layers, those that are trained

    def before_forward(self) -> None:
        """Wait for parameters that are still being gathered."""
        if self.wrapped.ddp_config.overlap_param_gather:
            groups = self.wrapped.param_to_bucket_group
            for group in dict.fromkeys(groups[one] for one in self.parameters):
                group.finish_param_sync()

    def after_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Let the reduction of these gradients start, after the last micro-batch."""
        if self.wrapped.ddp_config.overlap_grad_reduce:
            for one in parameters:
                self.wrapped.param_to_bucket_group[one].register_grad_ready(one)


def graph_layers(
    stages: Sequence[DistributedDataParallel],
    context: ParallelContext,
    student: bool,
    teachers: Sequence[bool],  # for each teacher that runs
    recomputes: bool = False,  # the student's layers, in packs without graphs
    cuts_at_experts: bool = False,  # also where the host need not wait for them
    most_layers: int | None = None,  # of the student in one graph; None: as many as possible
) -> None:
    """Let layers run as graphs: those of the student, and those of the teachers that are marked.

    Each of `stages` wraps a `DistillationStage`. Nothing is captured yet. The graphs go with the context.
    """
    memory = GraphMemory()

    def graphed(
        model: LanguageModel, name: str, sync: DDPSync | None = None, most_layers: int | None = None
    ) -> None:
        model.graphs = GraphedDecoder(
            model.decoder,
            name,
            model.rotary_pos_emb,
            memory,
            sync,
            recomputes=recomputes,
            cuts_at_experts=cuts_at_experts,
            most_layers=most_layers,
            is_pipelined=context.pp_size > 1,
        )
        _release_with(context, model.graphs)

    for wrapped in stages:
        stage: DistillationStage = wrapped.module
        if student:
            trained = (one for one in stage.student.decoder.parameters() if one.requires_grad)
            graphed(stage.student, "the student", DDPSync(wrapped, tuple(trained)), most_layers)
        for index, (teacher, marked) in enumerate(zip(stage.teachers, teachers, strict=True)):
            if marked:
                graphed(teacher, f"teacher {index}" if len(teachers) > 1 else "the teacher")


def graph_teacher(model: LanguageModel, context: ParallelContext) -> None:
    """Let the layers of a teacher that runs alone run as graphs, which go with the context."""
    memory = GraphMemory()
    model.graphs = GraphedDecoder(model.decoder, "the teacher", model.rotary_pos_emb, memory)
    _release_with(context, model.graphs)


def graph_bytes(stages: Sequence[DistributedDataParallel]) -> int:
    """Return the bytes that graphs of this process keep; see `graph_layers` for `stages`."""
    models = [model for wrapped in stages for model in (wrapped.module.student, *wrapped.module.teachers)]
    return max((one.graphs.memory.kept_bytes for one in models if one.graphs is not None), default=0)


def _release_with(context: ParallelContext, graphs: GraphedDecoder) -> None:
    """Free the graphs before the context closes, unless their model has gone by then."""
    release = WeakMethod(graphs.release)

    def close() -> None:
        if (free := release()) is not None:
            free()

    context.before_close.append(close)
