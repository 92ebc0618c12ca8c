"""Micro-batches of one data- and context-parallel rank: an endless stream for training, a restartable pass for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mkd.data.batch import PackedBatch, collate
from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.encoding import outlive_signals
from mkd.data.order import SampleOrder
from mkd.errors import MkdError

EMPTY = -1  # the sample that is no pack of the data set, but padding


@dataclass(frozen=True)
class BatchLayout:
    """How the packs of one global batch are dealt out.

    As in Megatron: micro-batch m takes the m-th `micro_batch_size * data_parallel_size` packs, and of those data-parallel
    rank d the d-th `micro_batch_size`. Context-parallel ranks hold each their part of these.
    """

    micro_batch_size: int  # packs
    global_batch_size: int  # packs
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    context_parallel_rank: int = 0
    context_parallel_size: int = 1

    def __post_init__(self):
        assert self.global_batch_size % (self.micro_batch_size * self.data_parallel_size) == 0
        assert 0 <= self.data_parallel_rank < self.data_parallel_size
        assert 0 <= self.context_parallel_rank < self.context_parallel_size

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def microbatches(self, samples: np.ndarray) -> np.ndarray:
        """Samples of one global batch, [global] -> those of this rank, [num_microbatches, micro_batch_size]."""
        shape = (self.num_microbatches, self.data_parallel_size, self.micro_batch_size)
        return samples.reshape(shape)[:, self.data_parallel_rank]


class TrainStream:
    """The micro-batches of one data-parallel rank, step after step, over as many epochs as are asked for.

    A position in the stream is `consumed_samples`, the packs of all ranks in the steps taken so far; a stream that starts
    there goes on with the very same packs. Workers (processes) only read ahead: they change no result.
    """

    def __init__(
        self,
        dataset: PackedDataset | BlendedDataset,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        context_parallel_rank: int = 0,
        context_parallel_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        self._layout = BatchLayout(
            micro_batch_size,
            global_batch_size,
            data_parallel_rank,
            data_parallel_size,
            context_parallel_rank,
            context_parallel_size,
        )
        self.consumed_samples = consumed_samples
        self._order = dataset.sample_order(seed, shuffle)
        samples = _TrainSamples(self._order, self._layout, consumed_samples)
        self._batches = _load(_MicroBatches(dataset, self._layout), samples, num_workers, pin_memory)

    def next_step(self) -> list[PackedBatch]:
        """This rank's micro-batches of the next optimizer step. Raises DataError for data that cannot be read."""
        microbatches = list(islice(self._batches, self._layout.num_microbatches))
        self.consumed_samples += self._layout.global_batch_size
        return microbatches

    def last_samples(self) -> list[int]:
        """The packs that all ranks together have had in the last step."""
        size = self._layout.global_batch_size
        return self._order(self.consumed_samples - size, size).tolist()


class EvalStream:
    """As many packs as a data set has, in steps of a global batch, the same ones at every iteration over the stream.

    That is every pack once. If there are more than `eval_iters` steps take, evenly spaced ones are taken, so that a part of an
    ordered corpus stands for all of it. Of a weighted blend every member gives its share. Empty packs, which have no loss, fill
    up the last step, so that all data-parallel ranks have the same number of micro-batches.
    """

    def __init__(
        self,
        dataset: PackedDataset | BlendedDataset,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        eval_iters: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        context_parallel_rank: int = 0,
        context_parallel_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        self._layout = BatchLayout(
            micro_batch_size,
            global_batch_size,
            data_parallel_rank,
            data_parallel_size,
            context_parallel_rank,
            context_parallel_size,
        )
        self._dataset, self._num_workers, self._pin_memory = dataset, num_workers, pin_memory
        self.num_samples = min(len(dataset), eval_iters * global_batch_size)
        self.num_steps = -(-self.num_samples // global_batch_size)

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        """The steps, each the list of this rank's micro-batches. Raises DataError for data that cannot be read."""
        samples = np.full(self.num_steps * self._layout.global_batch_size, EMPTY)
        samples[: self.num_samples] = self._dataset.evenly_spaced(self.num_samples)
        steps = samples.reshape(self.num_steps, self._layout.global_batch_size)
        microbatches = [row for step in steps for row in self._layout.microbatches(step).tolist()]
        batches = _load(
            _MicroBatches(self._dataset, self._layout), microbatches, self._num_workers, self._pin_memory
        )
        for _ in range(self.num_steps):
            yield list(islice(batches, self._layout.num_microbatches))


@dataclass(frozen=True)
class _TrainSamples:
    """Packs of each micro-batch of a rank, without end."""

    order: SampleOrder
    layout: BatchLayout
    consumed_samples: int

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples
        while True:
            samples = self.order(first, self.layout.global_batch_size)
            yield from self.layout.microbatches(samples).tolist()
            first += self.layout.global_batch_size


class _MicroBatches(Dataset):
    """This rank's part of the micro-batch of a list of samples.

    An error is returned, because a loader would rewrite one that is raised.
    """

    def __init__(self, dataset: PackedDataset | BlendedDataset, layout: BatchLayout):
        self._dataset, self._layout = dataset, layout

    def __getitem__(self, samples: list[int]) -> PackedBatch | MkdError:
        try:
            batch = collate([self._dataset.empty_pack() if i == EMPTY else self._dataset[i] for i in samples])
        except MkdError as error:
            return error
        return batch.context_parallel_shard(
            self._layout.context_parallel_rank, self._layout.context_parallel_size
        )


def _load(
    microbatches: _MicroBatches, samples: Iterable[list[int]], num_workers: int, pin_memory: bool
) -> Iterator[PackedBatch]:
    """Micro-batches in the order of `samples`. Workers start at the first one."""
    loader = DataLoader(
        microbatches,
        sampler=samples,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # a private one: the loader would draw from the global generator
        worker_init_fn=outlive_signals,
    )
    for batch in loader:
        if isinstance(batch, MkdError):
            raise batch
        yield batch
