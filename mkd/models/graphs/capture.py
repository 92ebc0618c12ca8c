"""Record work of the device as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import convert_cuda_rng_state


@contextmanager
def graph_safe_random_states() -> Iterator[list[torch.Generator]]:
    """Keep Megatron's random states in the form that a capture allows to switch, inside the block.

    Megatron's layers switch between them although mkd's models draw nothing (no dropout). Outside a capture
    the usual form stays, because checkpoints hold it.
    """
    tracker = get_cuda_rng_tracker()
    states, was_safe = tracker.get_states(), tracker.use_cudagraphable_rng
    safe = {name: convert_cuda_rng_state(state, to_graphable=True) for name, state in states.items()}
    tracker.use_cudagraphable_rng = True
    tracker.set_states(safe)
    try:
        yield list(safe.values())
    finally:
        tracker.use_cudagraphable_rng = was_safe
        tracker.set_states(states)


@contextmanager
def captured(
    pool: Any,  # of torch.cuda.graph_pool_handle: graphs whose tensors live at different times share one
    stream: torch.cuda.Stream,
    generators: list[torch.Generator],
) -> Iterator[torch.cuda.CUDAGraph]:
    """Record the block's work as the graph. It is not carried out.

    Other threads, such as NCCL's watchdog and the loader, may call CUDA meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph
