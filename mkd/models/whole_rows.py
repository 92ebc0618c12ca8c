"""Let the parts of a model run rows that this process holds alone, with context parallelism off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from mkd.models.language_model import LanguageModel
from mkd.parallel.axes import NoOthers
from mkd.parallel.context import ParallelContext
from mkd.parallel.zigzag import RowShard


@contextmanager
def whole_rows(parts: Sequence[LanguageModel]) -> Iterator[None]:
    """Let every rank of a context-parallel group run rows of its own inside the block, forward only.

    Weights are whole on each of these ranks, so they need nothing from each other. A layer otherwise takes
    its row for a part, turns it by the positions of that part, and asks the others for the rest.
    """
    with ExitStack() as restored:
        for part in parts:
            if part.context.cp_size > 1:
                _take_whole_rows(part, part.context.with_whole_rows(), restored)
        yield


def _take_whole_rows(part: LanguageModel, context: ParallelContext, restored: ExitStack) -> None:
    """Replace what the modules of `part` know of context parallelism; `restored` puts it back."""
    own = {"context": context, "pg_collection": context.groups, "shard": RowShard()}
    for module in part.modules():
        if hasattr(module, "set_context_parallel_group"):  # attention of Transformer Engine
            _without_ring(module, restored)
            continue
        for name, value in (own | {"cp_group": NoOthers()}).items():
            if vars(module).get(name) is not None:
                restored.callback(setattr, module, name, vars(module)[name])
                setattr(module, name, value)


def _without_ring(attention: Any, restored: ExitStack) -> None:
    """Let attention of Transformer Engine read its own keys and values alone."""
    names = "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"
    restored.callback(attention.set_context_parallel_group, *(getattr(attention, name) for name in names))
    attention.set_context_parallel_group(None, None, None, attention.cp_comm_type)
