"""The batches of a run that trains on fresh completions of the student, with or without stored packs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist

from mkd.data.batch import Pack, PackedBatch, collate
from mkd.data.dataset import BlendedDataset
from mkd.data.loader import EMPTY, BatchLayout, Dealt
from mkd.data.order import EpochOrder
from mkd.data.prompts import PromptSet
from mkd.data.tags import UNTAGGED, TeacherRoutes
from mkd.kinds.sampled.made_contexts import MadeContexts
from mkd.kinds.sampled.records.record_rewards import RecordRewards
from mkd.kinds.sampled.reward.rewards import Rewards
from mkd.kinds.sampled.rollout_batch import RolloutBatch
from mkd.kinds.sampled.rollout_figures import (
    FlatRewardWatch,
    TruncationWatch,
    figures,
    figures_by_tag,
    warn_if_empty,
)
from mkd.kinds.sampled.rollout_packs import RolloutPacks, RolloutRows
from mkd.kinds.sampled.rollout_teachers import RolloutTeacher
from mkd.kinds.sampled.sampler.decoding import sample_completions
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout, RolloutSource, Sampling
from mkd.models.language_model import LanguageModel
from mkd.parallel.context import ParallelContext

LOG = logging.getLogger("mkd")
LINE_S = 30.0  # between lines about a long phase


@dataclass(frozen=True)
class InProcessSource:
    """Samples with the training weights of the student, exactly the policy that the step trains."""

    parts: Sequence[LanguageModel]  # of this rank, by virtual stage
    context: ParallelContext
    sampling: Sampling
    parameters_gathered: Callable[[], AbstractContextManager[None]]  # all weights are here inside of it

    def sample(
        self,
        requests: Sequence[Request],
        iteration: int,
        progress: Callable[[int], None],
        following: Sequence[Request] = (),
    ) -> list[Rollout]:
        """Return all completions, equal on all ranks. Collective.

        Data-parallel and context-parallel ranks hold the same weights, so they share the work.
        """
        context = self.context.with_whole_rows()
        size, rank, group = context.dp_size, context.dp_rank, context.dp_group
        with self.parameters_gathered():
            mine = sample_completions(
                self.parts, context, requests[rank::size], self.sampling, iteration, progress
            )
        shares: list[list[Rollout]] = [[] for _ in range(size)]
        dist.all_gather_object(shares, mine, group=group)
        return [shares[place % size][place // size] for place in range(len(requests))]


@dataclass
class RolloutStream:
    """The micro-batches of one data-parallel rank, step after step, without end.

    The position is `consumed_prompts` and, in the stored packs, `consumed_samples`. A stream that starts at a
    position draws the same prompts and packs from there, at every data-parallel size. The number of
    micro-batches varies with the length of the completions; empty packs fill up the last ones.
    """

    source: RolloutSource
    context: ParallelContext
    prompts: PromptSet
    dataset: BlendedDataset | None  # stored packs; None: a step has none
    batch: RolloutBatch
    micro_batch_size: int
    seq_length: int
    pad_id: int
    teachers: Sequence[RolloutTeacher]
    seed: int
    shuffle: bool
    drops_truncated: bool
    iteration: int  # steps so far
    last_iteration: int  # of the run: no completions are sampled for a step after it
    consumed_prompts: int
    consumed_samples: int
    announce: Callable[[int], None] = lambda iteration: None  # called for every token that is sampled
    rewards: Rewards | RecordRewards | None = None  # judge the completions; None: only teachers do
    contexts: MadeContexts | None = None  # make teachers' prompts of rewards; None: no teacher has such
    tag_names: Sequence[str] = ()  # of all tags of the run; (): tags do not matter
    routes: TeacherRoutes | None = None  # which teachers a micro-batch needs; None: all
    host_rows: tuple[int, ...] = ()  # teachers whose rows other processes run
    rows: list[RolloutRows] = field(default_factory=list)  # of the last step's micro-batches
    figures: dict[str, float] = field(default_factory=dict)  # metrics of the last step
    step_packs: int = 0  # packs of the last step on all ranks, empty ones included
    _packs: RolloutPacks | None = None  # of the last step
    _stored: list[int] = field(default_factory=list)  # stored packs of the last step
    _truncation: TruncationWatch = field(default_factory=TruncationWatch)
    _flat_rewards: FlatRewardWatch = field(default_factory=FlatRewardWatch)

    def __post_init__(self) -> None:
        self._order = EpochOrder(len(self.prompts), self.seed, self.shuffle)
        stored = self.dataset
        self._stored_order = None if stored is None else stored.sample_order(self.seed, self.shuffle)

    def next_step(self) -> list[PackedBatch]:
        """Sample completions, and return this rank's micro-batches of the next optimizer step. Collective.

        Raises DataError for stored data that cannot be read, and ServerLost if the source is gone.
        """
        self.iteration += 1  # first: it seeds the sampling of this step
        start = time.perf_counter()
        requests = self._requests(self.consumed_prompts)
        # Moved on before the next requests are drawn: a server may sample them while this step trains.
        self.consumed_prompts += self.batch.prompts
        is_last = self.iteration >= self.last_iteration
        following = () if is_last else self._requests(self.consumed_prompts)
        rollouts = self.source.sample(requests, self.iteration, self._progress(start), following)
        # Of all completions: below, those without a reward and, on request, those cut off are left out.
        self.figures = figures(rollouts, 1000 * (time.perf_counter() - start))
        if self.tag_names:
            self.figures |= figures_by_tag(rollouts, [self._tag(one) for one in rollouts])
        self.figures["consumed_prompts"] = self.consumed_prompts
        self._judge_truncated(self.figures["rollout/truncated"])
        sampled = len(rollouts)
        if self.rewards is not None:
            # Before any is left out: the completions of a prompt are compared with each other.
            # Those of records take records alone, which the source gives.
            rollouts, judged = self.rewards(rollouts, self.iteration)  # type: ignore[arg-type,assignment]
            self.figures |= judged
            flat, mean = judged.get("reward/std0_groups"), judged.get("reward/mean")
            self._flat_rewards.judge(self.iteration, flat, mean)
            if self.contexts is not None:
                rollouts = self.contexts(rollouts)
        kept = [one for one in rollouts if not (self.drops_truncated and one.is_truncated)]
        self._stored = self._next_stored()
        if not self._stored:
            warn_if_empty(self.iteration, sampled, len(rollouts), len(kept))
        tags = self._tags(kept)
        taught = () if self.routes is None else self.routes.tags
        self._packs = RolloutPacks.fill(
            kept, self.seq_length, self.pad_id, self.teachers, tags, taught, self.context.document_multiple
        )
        # After `_stored` and `_packs`: `_mine` deals the samples of both to the ranks.
        batches, self.rows = [], []
        for dealt in self._mine():
            packs, rows = zip(*map(self._build, dealt.samples), strict=True)
            whole, shard = collate(packs).with_host_rows(self.host_rows), self.context.row_shard
            batches.append(replace(whole.shard(shard), needed_teachers=dealt.needed_teachers))
            self.rows.append(RolloutRows.joined(rows).held(whole, shard))
        return batches

    def following_step(self) -> list[PackedBatch]:
        """Return nothing: the next completions depend on the update of this step."""
        return []

    def _judge_truncated(self, truncated: float) -> None:
        self._truncation.judge(self.iteration, truncated, self.source.sampling.max_new_tokens)

    def _progress(self, start: float) -> Callable[[int], None]:
        """Return what the sampler calls for every token: it announces, and logs a line now and then."""
        shown = [start]

        def progress(done: int) -> None:
            self.announce(self.iteration)
            now = time.perf_counter()
            if now - shown[0] > LINE_S:
                shown[0], what = now, "rollouts of iteration %d: %d completions of this replica after %.0f s"
                LOG.info(what, self.iteration, done, now - start)

        return progress

    def last_samples(self) -> list[int]:
        """Return the sample numbers of the last step, of all ranks."""
        return [*self._stored, *range(self._first, self._first + len(self._packs or ()))]

    def documents_of(self, sample: int) -> dict[str, list[int]]:
        """Return {prefix of a corpus, or file of prompts: numbers of the documents or lines in a pack}.

        Packs of completions are known until the next step.
        """
        if sample < 0:
            return {}
        if sample < self._first:
            assert self.dataset is not None
            return self.dataset.documents_of(sample)
        found: dict[str, list[int]] = {}
        for one in self._packs.packs[sample - self._first] if self._packs else ():
            prompt = self.prompts.prompts[one.request.prompt]
            found.setdefault(prompt.path, []).append(prompt.line)
        return found

    @property
    def _first(self) -> int:
        """Sample number of the first pack of completions."""
        return 0 if self.dataset is None else len(self.dataset)

    def _requests(self, consumed: int) -> list[Request]:
        """Return the requests of the step that begins after `consumed` prompts."""
        chosen = self._order(consumed, self.batch.prompts).tolist()
        requests, asked = [], Counter[int]()  # a prompt comes twice where epochs meet, or if there are few
        for prompt in chosen:
            for _ in range(self.batch.samples_per_prompt):
                requests.append(Request(prompt, asked[prompt], self.prompts.prompts[prompt].ids))
                asked[prompt] += 1
        return requests

    def _next_stored(self) -> list[int]:
        count = self.batch.stored_packs
        if self._stored_order is None or not count:
            return []
        chosen = self._stored_order(self.consumed_samples, count).tolist()
        self.consumed_samples += count
        return chosen

    def _tag(self, rollout: Rollout) -> str:
        """Return the tag of a completion, "" without one."""
        return self.prompts.prompts[rollout.request.prompt].tag

    def _tags(self, rollouts: Sequence[Rollout]) -> np.ndarray | None:
        """Return the number of the tag of each completion, int64; None if tags do not matter."""
        if not self.tag_names:
            return None
        return np.array([self.tag_names.index(self._tag(one)) for one in rollouts], dtype=np.int64)

    def tags_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the numbers of the tags of samples of the last step, int64; UNTAGGED for empty ones."""
        found = np.full(samples.shape, UNTAGGED)
        is_own = samples >= self._first
        if self.dataset is not None:
            found[~is_own] = self.dataset.tags_of(samples[~is_own])
        if self._packs is not None and self._packs.tags is not None:
            found[is_own] = self._packs.tags[samples[is_own] - self._first]
        return found

    def _mine(self) -> Iterator[Dealt]:
        """Yield the samples of this rank's micro-batches; EMPTY ones fill up the others."""
        context, samples = self.context, self.last_samples()
        unit = self.micro_batch_size * context.dp_size * context.microbatch_unit
        self.step_packs = max(1, -(-len(samples) // unit)) * unit
        sizes = self.micro_batch_size, self.step_packs, context.dp_rank, context.dp_size
        layout = BatchLayout(*sizes, routes=self.routes)
        filled = np.full(self.step_packs, EMPTY)
        filled[: len(samples)] = samples
        yield from layout.deal(filled, self)

    def _build(self, sample: int) -> tuple[Pack, RolloutRows]:
        assert self._packs is not None
        if sample == EMPTY:
            return self._packs.empty(), RolloutRows.stored(0)
        if sample >= self._first:
            return self._packs.build(sample - self._first, sample)
        assert self.dataset is not None
        pack = self.dataset[sample]
        return pack, RolloutRows.stored(int(np.count_nonzero(pack.loss_mask)))
