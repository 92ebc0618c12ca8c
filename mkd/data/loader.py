"""Micro-batches of one data- and context-parallel rank: a stream for training, a pass for evaluation.

The stream is endless; the pass can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mkd.data.batch import PackedBatch, collate
from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.images.row_images import ImageLayout, images_of_row
from mkd.data.order import SampleOrder
from mkd.data.tags import TeacherRoutes
from mkd.data.workers import iterating, outlive_signals, worker_deaths_explained, worker_ended
from mkd.errors import MkdError
from mkd.parallel.zigzag import RowShard

Batch = TypeVar("Batch")
EMPTY = -1  # sample number of an empty pack, which fills up the last step of an evaluation


@dataclass(frozen=True)
class BatchLayout:
    """Assignment of the packs of one global batch to ranks, as in Megatron.

    Micro-batch m has the m-th `micro_batch_size * data_parallel_size` packs; data-parallel rank d takes the
    d-th `micro_batch_size` packs of these, and `shard` of their row.
    """

    micro_batch_size: int  # packs
    global_batch_size: int  # packs
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    shard: RowShard = RowShard()
    images: ImageLayout = ImageLayout()
    host_rows: tuple[int, ...] = ()  # teachers whose rows other processes run
    routes: TeacherRoutes | None = None  # which teachers a micro-batch needs; None: all

    def __post_init__(self):
        assert self.global_batch_size % (self.micro_batch_size * self.data_parallel_size) == 0
        assert 0 <= self.data_parallel_rank < self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def microbatches(self, samples: np.ndarray) -> np.ndarray:
        """Return this rank's part of one global batch, [num_microbatches, micro_batch_size].

        `samples` [global] are the samples of the whole batch.
        """
        return self.dealt(samples)[:, self.data_parallel_rank]

    def dealt(self, samples: np.ndarray) -> np.ndarray:
        """Return the parts of all ranks, [num_microbatches, data_parallel_size, micro_batch_size]."""
        return samples.reshape(self.num_microbatches, self.data_parallel_size, self.micro_batch_size)

    def deal(self, samples: np.ndarray, dataset: HasTags) -> Iterator[Dealt]:
        """Yield this rank's micro-batches of one global batch.

        If packs have tags, those of one tag are neighbours, so that few teachers run at a time.
        """
        if self.routes is None:
            yield from (Dealt(own, ()) for own in self.microbatches(samples).tolist())
            return
        samples = samples[np.argsort(dataset.tags_of(samples), kind="stable")]
        for of_ranks in self.dealt(samples):
            own = of_ranks[self.data_parallel_rank].tolist()
            yield Dealt(own, self.routes.needed(dataset.tags_of(of_ranks)))


class HasTags(Protocol):
    """A source of samples that knows their tags."""

    def tags_of(self, packs: np.ndarray) -> np.ndarray:
        """Return the numbers of the tags of packs, int64; UNTAGGED for a number below 0."""


class Dealt(NamedTuple):
    """One micro-batch of a rank, before it is read."""

    samples: list[int]
    needed_teachers: tuple[bool, ...] = ()  # see PackedBatch


class TrainStream:
    """The micro-batches of one data-parallel rank, step after step, without end.

    The position in the stream is `consumed_samples`, the packs of all ranks in the steps so far. A stream
    that starts at a position yields the same packs from there. Workers (processes) only read ahead and change
    no result.
    """

    consumed_prompts = 0  # it has none

    def __init__(
        self,
        dataset: PackedDataset | BlendedDataset,
        *,
        seed: int = 0,
        shuffle: bool = True,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        **layout: Any,  # of BatchLayout
    ):
        self._layout = BatchLayout(**layout)
        self.consumed_samples = consumed_samples
        self._order = dataset.sample_order(seed, shuffle)
        samples = _TrainSamples(self._order, dataset, self._layout, consumed_samples)
        self._batches = read_ahead(MicroBatches(dataset, self._layout), samples, num_workers, pin_memory)
        self._following: list[PackedBatch] = []

    def next_step(self) -> list[PackedBatch]:
        """Return this rank's micro-batches of the next optimizer step.

        Raises DataError for data that cannot be read.
        """
        microbatches, self._following = self.following_step(), []
        self.consumed_samples += self._layout.global_batch_size
        return microbatches

    def following_step(self) -> list[PackedBatch]:
        """Return what `next_step` will, without moving the position. Raises DataError as it does."""
        if not self._following:
            self._following = list(islice(self._batches, self._layout.num_microbatches))
        return self._following

    @property
    def step_packs(self) -> int:
        """Packs of one step, on all ranks."""
        return self._layout.global_batch_size

    def last_samples(self) -> list[int]:
        """Return the packs of the last step, of all ranks."""
        size = self._layout.global_batch_size
        return self._order(self.consumed_samples - size, size).tolist()


class EvalStream:
    """The packs of a data set in steps of a global batch, the same at every iteration over the stream.

    Every pack comes once. If `eval_iters` steps cannot hold all packs, evenly spaced ones are taken, so that
    a part of an ordered corpus represents all of it. In a weighted blend every member gives its share. Empty
    packs, which have no loss, fill up the last step, so that all data-parallel ranks have the same number of
    micro-batches.
    """

    def __init__(
        self,
        dataset: PackedDataset | BlendedDataset,
        *,
        eval_iters: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        **layout: Any,  # of BatchLayout
    ):
        self._layout = BatchLayout(**layout)
        self._dataset, self._num_workers, self._pin_memory = dataset, num_workers, pin_memory
        self.num_samples = min(len(dataset), eval_iters * self._layout.global_batch_size)
        self.num_steps = -(-self.num_samples // self._layout.global_batch_size)

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        """Yield the steps, each a list of this rank's micro-batches.

        Raises DataError for data that cannot be read.
        """
        samples = np.full(self.num_steps * self._layout.global_batch_size, EMPTY)
        samples[: self.num_samples] = self._dataset.evenly_spaced(self.num_samples)
        steps = samples.reshape(self.num_steps, self._layout.global_batch_size)
        microbatches = [dealt for step in steps for dealt in self._layout.deal(step, self._dataset)]
        make = MicroBatches(self._dataset, self._layout)
        batches = read_ahead(make, microbatches, self._num_workers, self._pin_memory)
        for _ in range(self.num_steps):
            yield list(islice(batches, self._layout.num_microbatches))


@dataclass(frozen=True)
class _TrainSamples:
    """The packs of each micro-batch of a rank, without end."""

    order: SampleOrder
    dataset: PackedDataset | BlendedDataset
    layout: BatchLayout
    consumed_samples: int

    def __iter__(self) -> Iterator[Dealt]:
        first = self.consumed_samples
        while True:
            samples = self.order(first, self.layout.global_batch_size)
            yield from self.layout.deal(samples, self.dataset)
            first += self.layout.global_batch_size


@dataclass(frozen=True)
class MicroBatches:
    """Makes this rank's part of the micro-batch of a list of samples. Picklable, for workers."""

    dataset: PackedDataset | BlendedDataset
    layout: BatchLayout

    def __call__(self, dealt: Dealt) -> PackedBatch:
        """Return the micro-batch. Raises DataError for data that cannot be read."""
        dataset, layout, shard = self.dataset, self.layout, self.layout.shard
        samples, needed = dealt
        packs = [dataset.empty_pack() if i == EMPTY else dataset[i] for i in samples]
        whole = collate(packs).with_host_rows(layout.host_rows)
        part = replace(whole.shard(shard), needed_teachers=needed)
        if dataset.images is not None:
            part = replace(part, images=images_of_row(packs, whole, dataset.images, layout.images, shard))
        for number, own in enumerate(dataset.teacher_images):
            if own is not None:
                teacher_packs: list[Any] = [pack.teacher_inputs[number] for pack in packs]
                teacher_whole: Any = whole.teacher_inputs[number]
                row = images_of_row(teacher_packs, teacher_whole, own, layout.images, shard)
                part = part.with_teacher_images(number, row)
        return part


def read_ahead(
    make: Callable[[Any], Batch],
    samples: Iterable[Any],  # what `make` takes, for each micro-batch
    num_workers: int,
    pin_memory: bool,
    ahead: int = 0,  # micro-batches that are ready or being made; at least two for each worker
) -> Iterator[Batch]:
    """Yield `make(samples)` of each micro-batch, in order, made in `num_workers` processes (0: this one).

    Workers start when the first one is asked for. Raises the errors of `make`, and MkdError if a worker dies.
    """
    loader = DataLoader(
        _Made(make),
        sampler=samples,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=max(2, -(-ahead // num_workers)) if num_workers else None,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # private, because the loader would draw from the global generator
        worker_init_fn=outlive_signals,
    )
    with iterating(loader) as batches, worker_deaths_explained():
        try:
            for batch in batches:
                if isinstance(batch, MkdError):
                    raise batch
                yield batch
        except ConnectionError as error:  # it ended while it handed over a tensor
            raise worker_ended(error) from error


@dataclass(frozen=True)
class _Made(Dataset):
    """Micro-batches by their samples. An error is returned, because the loader would rewrite a raised one."""

    make: Callable[[Any], Any]

    def __getitem__(self, samples: Any) -> Any:
        try:
            return self.make(samples)
        except MkdError as error:
            return error
