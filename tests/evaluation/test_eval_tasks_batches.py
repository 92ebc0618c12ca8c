"""Check how packs of requests are distributed: all of them, once, in equal schedule calls on every rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mkd.evaluation.requests import Request
from mkd.evaluation.scores import MICROBATCHES_PER_STAGE, RequestBatches
from mkd.parallel.axes import Axis
from mkd.parallel.context import ParallelContext
from mkd.platform import detect

NUM_PACKS, SEQ_LENGTH = 75, 8


def context(dp_rank: int, dp_size: int, pp_size: int = 1, virtual_stages: int = 1) -> ParallelContext:
    """Return the context of a rank that communicates with no other."""
    return ParallelContext(
        platform=detect(),
        rank=0,
        world_size=dp_size * pp_size,
        axes={
            "tp": Axis(0, 1, None),
            "cp": Axis(0, 1, None),
            "dp": Axis(dp_rank, dp_size, None),
            "pp": Axis(0, pp_size, None),
            "ep": Axis(0, 1, None),
        },
        virtual_stages=virtual_stages,
        groups=None,
    )


def requests() -> list[Request]:
    """Return requests of which each fills one pack."""
    ids = np.arange(NUM_PACKS * SEQ_LENGTH, dtype=np.int32).reshape(NUM_PACKS, SEQ_LENGTH)
    return [Request(row, row[-2:], False) for row in ids]


@pytest.mark.parametrize(
    ("dp", "pp", "vp", "micro", "calls"),
    [
        (1, 1, 1, 1, [16, 16, 16, 16, 11]),
        (2, 1, 1, 3, [13]),
        (1, 2, 1, 1, [32, 32, 11]),
        (1, 2, 2, 1, [32, 32, 12]),
        (2, 4, 2, 1, [40]),
    ],
)
def test_every_pack_once(dp, pp, vp, micro, calls):
    found = Counter()
    for rank in range(dp):
        batches = list(RequestBatches.of(requests(), context(rank, dp, pp, vp), micro, SEQ_LENGTH, pad_id=0))
        assert [len(call) for call in batches] == calls
        assert max(calls) <= MICROBATCHES_PER_STAGE * pp
        for batch in (batch for call in batches for batch in call):
            assert batch.tokens.shape == (1, micro * SEQ_LENGTH)
            found.update(batch.score_requests.tolist())
    assert found == dict.fromkeys(range(NUM_PACKS), 2)
