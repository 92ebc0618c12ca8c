"""Check that Megatron's 1F1B talks and works in the order that plans of teacher forwards ahead rely on."""

from __future__ import annotations

import pytest

from mkd.plan.times.prefetch import stops


def compare(pipeline: int) -> None:
    """Compare the stops of each rank with what Megatron does there."""
    from tests.parallel.recorded_schedule import order_of_megatron

    for microbatches in (1, 2, 3, 5, 8, 11):
        for rank in range(pipeline):
            expected: list = []
            for stop in stops(rank, pipeline, microbatches):
                expected += [] if stop.link is None else [(stop.link, stop.has_gap)]
                expected += [stop.task] if stop.task else []
            assert order_of_megatron(rank, pipeline, microbatches) == expected


@pytest.mark.parametrize("pipeline", [2, 3, 5, 8])
def test_the_stops_are_those_of_megatron(pipeline, ranks):
    ranks.run(compare, 1, pipeline)
