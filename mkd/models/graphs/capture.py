"""Record work of the device as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

    After an error, stream, pool and torch's generator are as before.
    Other threads, such as NCCL's watchdog and the loader, may call CUDA meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            try:
                graph.capture_end()
            except RuntimeError:
                with suppress(RuntimeError):  # it has been closed, if the error came later
                    torch._C._cuda_endAllocateToPool(stream.device_index, pool)
                _end_capture_of_generator(stream.device_index)
                raise


def _end_capture_of_generator(device_index: int) -> None:
    """Give torch's generator a state that takes no part in a capture.

    A capture that fails leaves the state as if it went on, and everything random would raise an error.
    """
    generator = torch.cuda.default_generators[device_index]
    generator.graphsafe_set_state(generator.clone_state())


def recorded(
    work: Callable[[], None], pool: Any, stream: torch.cuda.Stream, generators: list[torch.Generator]
) -> torch.cuda.CUDAGraph:
    """Return the graph of what `work` does; see `captured`. Its result goes into tensors that stay."""
    with captured(pool, stream, generators) as graph:
        work()
    return graph


def first_cause(error: BaseException) -> str:
    """Return the first line of the error that made a capture fail; ending the capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error) or repr(error)).splitlines()[0]
