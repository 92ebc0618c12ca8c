"""Each sample once per epoch, across crashes and changes of the layout.

The tests count the sample ids of real streams.
"""

from __future__ import annotations

from collections import Counter
from itertools import cycle

import numpy as np
import pytest

from mkd.data.corpus.store import TokenStore
from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.loader import TrainStream

GLOBAL_BATCH, SAVE_EVERY, CRASH_EVERY = 8, 3, 7
LAYOUTS = ((2, 2), (4, 1), (1, 4), (1, 8), (8, 1))  # (data-parallel ranks, packs of a micro-batch)


@pytest.fixture
def members(make_store):
    """Return members of 23 and 10 packs."""
    options = dict(seq_length=8, vocab_size=1000, pad_id=0)
    stores = [make_store([[i + 100 * m] * 6 for i in range(n)], name=f"m{m}") for m, n in enumerate((23, 10))]
    return [PackedDataset(store, **options) for store in stores]


def take_steps(
    dataset, first_step: int, count: int, data_parallel: int, micro_batch: int, workers: int = 0, **options
):
    """Return the samples of steps [first_step, first_step + count) of all ranks, in order of position."""
    streams = [
        TrainStream(
            dataset,
            micro_batch_size=micro_batch,
            global_batch_size=GLOBAL_BATCH,
            data_parallel_rank=rank,
            data_parallel_size=data_parallel,
            consumed_samples=first_step * GLOBAL_BATCH,
            num_workers=workers,
            **options,
        )
        for rank in range(data_parallel)
    ]
    steps = {}
    for step in range(first_step, first_step + count):
        ranks = [stream.next_step() for stream in streams]
        steps[step] = [i for micro in zip(*ranks, strict=True) for batch in micro for i in batch.sample_ids]
    assert {stream.consumed_samples for stream in streams} == {(first_step + count) * GLOBAL_BATCH}
    return steps


def crash_loop(dataset, num_steps: int, layouts, **options) -> list[int]:
    """Return the samples of a run that crashes every seven steps.

    It resumes from its last save, each time in the next layout.
    """
    done, crashes = {}, 0
    saved = 0
    for layout in cycle(layouts):
        count = min(CRASH_EVERY, num_steps - saved)
        steps = take_steps(dataset, saved, count, *layout, **options)
        again = steps.keys() & done.keys()
        assert not crashes or len(again) == CRASH_EVERY % SAVE_EVERY, "what was lost is done again"
        assert all(Counter(steps[step]) == Counter(done[step]) for step in again), (
            "with the very same samples"
        )
        done |= steps
        if max(done) + 1 == num_steps:
            return [i for step in range(num_steps) for i in done[step]]
        saved, crashes = (saved + count) // SAVE_EVERY * SAVE_EVERY, crashes + 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "layouts", [LAYOUTS[:1], LAYOUTS[:3], LAYOUTS], ids=["one layout", "DP 2, 4, 1", "five layouts"]
)
@pytest.mark.fault(22)
def test_a_crash_loop_sees_each_sample_once_per_epoch(members, layouts, shuffle):
    """An epoch of 33 packs ends inside a step, so eight epochs are counted, which end with one."""
    dataset = BlendedDataset(members)
    size = len(dataset)
    seen = crash_loop(dataset, size, layouts, seed=3, shuffle=shuffle)
    epochs = np.array(seen).reshape(GLOBAL_BATCH, size)
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs.tolist())
    assert (len({tuple(epoch) for epoch in epochs.tolist()}) == GLOBAL_BATCH) == shuffle, (
        "each in an order of its own"
    )


@pytest.mark.fault(22)
def test_a_crash_loop_with_workers_that_read_ahead(members):
    seen = crash_loop(members[0], 2 * CRASH_EVERY, LAYOUTS[:1], seed=3, workers=1)
    epochs = [seen[first : first + 23] for first in range(0, len(seen) - 22, 23)]
    assert len(epochs) == 4 and all(sorted(epoch) == list(range(23)) for epoch in epochs)


def test_members_of_a_blend_have_epochs_of_their_own(members):
    """With any weights, a member's second epoch starts when its first has ended."""
    seen = np.array(crash_loop(BlendedDataset(members, [1, 3]), 40, LAYOUTS, seed=3))
    for own, size in ((seen[seen < 23], 23), (seen[seen >= 23] - 23, 10)):
        whole = own[: len(own) // size * size].reshape(-1, size)
        assert len(whole) >= 3 and all(sorted(epoch) == list(range(size)) for epoch in whole.tolist())
    assert (seen >= 23).sum() == 240


def read_on_rank(prefix: str, tensor: int, pipeline: int, first_step: int, count: int):
    """Return (data-parallel rank, samples of each micro-batch of `count` steps) of this rank in a layout."""
    from mkd.parallel.context import ParallelContext
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect

    context = ParallelContext.create(detect(), Sizes(tensor=tensor, pipeline=pipeline))
    stream = TrainStream(
        PackedDataset(TokenStore(prefix), seq_length=8, vocab_size=1000, pad_id=0),
        micro_batch_size=2,
        global_batch_size=GLOBAL_BATCH,
        data_parallel_rank=context.dp_rank,
        data_parallel_size=context.dp_size,
        consumed_samples=first_step * GLOBAL_BATCH,
        seed=3,
    )
    return context.dp_rank, [[batch.sample_ids for batch in stream.next_step()] for _ in range(count)]


@pytest.mark.fault(23)
def test_an_epoch_whose_tensor_and_pipeline_layout_changes(members, ranks):
    """Every rank of a real process group reads; ranks with the same data-parallel rank must read the same."""
    prefix, seen = members[0].store.prefix, []
    for part, (world, tensor, pipeline) in enumerate(
        [(1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 1, 1), (2, 2, 1), (1, 1, 1)]
    ):
        replicas = {}
        for dp_rank, steps in ranks.run(read_on_rank, world, prefix, tensor, pipeline, 4 * part, 4):
            assert replicas.setdefault(dp_rank, steps) == steps
        assert len(replicas) * tensor * pipeline == world
        for step in range(4):
            of_ranks = [replicas[rank][step] for rank in sorted(replicas)]
            seen += [i for micro in zip(*of_ranks, strict=True) for samples in micro for i in samples]
    assert len(seen) == 24 * GLOBAL_BATCH
    assert all(
        sorted(seen[23 * epoch : 23 * (epoch + 1)]) == list(range(23)) for epoch in range(GLOBAL_BATCH)
    )
