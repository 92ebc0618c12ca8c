"""Sample completions with the training model: sequences in slots, token by token, over the pipeline.

A group of slots runs through the pipeline as one row: the prompts that have just come, and one new token of
every other sequence. The last stage samples, and all stages get the ids. There are as many groups as pipeline
stages, so that each stage works on another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mkd.kinds.sampled.sampler.cached_layers import cached_layers
from mkd.kinds.sampled.sampler.fixed_rows import FixedRows, run_as_graphs
from mkd.kinds.sampled.sampler.kv_cache import KVCache, PromptRow, TokenRow
from mkd.kinds.sampled.sampler.lockstep import Lockstep
from mkd.kinds.sampled.sampler.pipeline_forward import PipelineForward
from mkd.kinds.sampled.sampler.rollouts import LENGTH, STOP, Request, Rollout, Sampling
from mkd.kinds.sampled.sampler.sampling import barred_columns, sample_tokens, uniforms
from mkd.losses.lm_head import head_logits
from mkd.losses.softmax import compute_dtype
from mkd.models.language_model import LanguageModel
from mkd.models.packed import PackedDocuments, packed_documents
from mkd.models.whole_rows import whole_rows
from mkd.parallel.context import ParallelContext


@dataclass(eq=False)
class _Sequence:
    """A completion that is being sampled."""

    place: int  # of its request in the list that was asked for
    request: Request
    slot: int
    tokens: list[tuple[float, float, float]] = field(default_factory=list)  # (id, ln p, entropy)

    @property
    def length(self) -> int:
        """Tokens of the prompt and the completion so far."""
        return len(self.request.ids) + len(self.tokens)

    def finish(self, sampling: Sampling) -> Rollout | None:
        """Return the rollout if it is complete."""
        is_stopped = int(self.tokens[-1][0]) in sampling.stop_ids
        is_full = sampling.context_length is not None and self.length >= sampling.context_length
        if not (is_stopped or is_full) and len(self.tokens) < sampling.max_new_tokens:
            return None
        ids, logp, entropy = np.array(self.tokens).T
        logp, entropy = logp.astype(np.float32), entropy.astype(np.float32)
        return Rollout(self.request, ids.astype(np.int64), logp, entropy, STOP if is_stopped else LENGTH)


@dataclass(eq=False)
class _Group:
    """Slots whose sequences run through the pipeline together."""

    slots: range
    active: list[_Sequence] = field(default_factory=list)  # sequence i has slot slots[i], unless it is new
    newcomers: list[_Sequence] = field(default_factory=list)  # their prompts have not run
    waiting: list[_Sequence] = field(default_factory=list)  # whose next token is being sampled, in order
    values: Tensor | None = None  # [3, n] fp64: ids, ln p and entropies for `waiting`; None: not here yet
    arrival: dist.Work | None = None  # of `values`


@dataclass(frozen=True)
class SampledRow:
    """New tokens of the sequences of a group, and all completions that have ended so far."""

    tokens: Sequence[tuple[int, int]]  # (place of the request, id)
    done: dict[int, Rollout]  # by place of the request; the reader may take completions out


def sample_completions(
    parts: Sequence[LanguageModel],  # the student on this rank, by virtual stage
    context: ParallelContext,
    requests: Sequence[Request],  # of this replica, equal on its tensor and pipeline ranks
    sampling: Sampling,
    iteration: int,
    progress: Callable[[int], None] = lambda done: (
        None
    ),  # called for every row of tokens, with the finished completions
    fixed_rows: str = "auto",  # "graphs", "plain" or "off" (see fixed_rows.py); auto: graphs on one GPU
) -> list[Rollout]:
    """Return a completion for every request, equal on all ranks of the replica, as `stream_completions`."""
    done: Mapping[int, Rollout] = {}
    for row in stream_completions(parts, context, requests, sampling, iteration, fixed_rows):
        done = row.done
        progress(len(done))
    return [done[place] for place in range(len(requests))]


@torch.no_grad()
def stream_completions(
    parts: Sequence[LanguageModel],  # the model on this rank, by virtual stage
    context: ParallelContext,
    requests: Sequence[Request],  # of this replica, equal on its tensor and pipeline ranks
    sampling: Sampling,
    iteration: int,
    fixed_rows: str = "auto",  # as in `sample_completions`
) -> Iterator[SampledRow]:
    """Complete every request. Yield the tokens of each row as they arrive, equal on all ranks of the replica.

    A context-parallel rank is a replica here: it has the keys and values of its sequences alone.

    Slots of finished completions take the next request. The cache exists until the end, or until the iterator
    is closed. Communication inside the replica: see `sample_tokens` for tensor parallelism; over the
    pipeline, a hidden state from stage to stage, and a broadcast of [3, n] fp64 from the last one, for every
    row.
    """
    lockstep = Lockstep(context)
    if not requests and lockstep.is_alone:
        return
    longest = max((len(one.ids) for one in requests), default=0) + sampling.max_new_tokens
    longest = min(longest, sampling.context_length or longest)
    slots = min(sampling.slots, max(len(requests), 1))
    decoder = _Decoder(PipelineForward(parts, context), KVCache(slots, longest), sampling, iteration)
    decoder.queue.extend(enumerate(requests))
    is_auto = fixed_rows == "auto"
    if is_auto:
        fixed_rows = "graphs" if run_as_graphs(parts, context) else "off"
    if fixed_rows != "off":
        captures = fixed_rows == "graphs"
        decoder.fixed = FixedRows(decoder.forward, decoder.cache, sampling, captures, is_auto)
    num_groups = context.pp_size if len(parts) == 1 else 1
    if lockstep.is_alone:
        num_groups = min(slots, num_groups)
    groups = [_Group(part) for part in _shares(slots, num_groups)]
    with whole_rows(parts), cached_layers(parts, decoder.cache):
        while lockstep.any(decoder.queue or any(group.active or group.waiting for group in groups)):
            tokens: list[tuple[int, int]] = []
            for group in groups:
                tokens += decoder.receive(group)
                decoder.admit(group)
                decoder.send(group, lockstep)
            yield SampledRow(tokens, decoder.done)
        decoder.forward.finish()


def _shares(slots: int, groups: int) -> Iterator[range]:
    """Yield the slots of each group."""
    borders = [slots * index // groups for index in range(groups + 1)]
    yield from (range(*pair) for pair in zip(borders, borders[1:], strict=False))


@dataclass
class _Decoder:
    """The state of one call of `sample_completions`."""

    forward: PipelineForward
    cache: KVCache
    sampling: Sampling
    iteration: int
    queue: deque[tuple[int, Request]] = field(default_factory=deque)
    done: dict[int, Rollout] = field(default_factory=dict)  # by place of the request
    fixed: FixedRows | None = None  # None: a row has one place for every active sequence

    def receive(self, group: _Group) -> list[tuple[int, int]]:
        """Add the sampled tokens to the sequences of `group`, and free the slots of those that end.

        Return them as (place of the request, id).
        """
        if not group.waiting:
            return []
        if group.values is None:
            size = 3, len(group.waiting)
            group.values = torch.empty(size, dtype=torch.float64, device=self.forward.context.device)
            dist.broadcast(group.values, self.forward.last_rank, group=self.forward.context.pp_group)
        elif group.arrival is not None:
            group.arrival.wait()
        arrived = []
        for one, values in zip(group.waiting, group.values.t().tolist(), strict=True):
            one.tokens.append(tuple(values))
            arrived.append((one.place, int(values[0])))
            rollout = one.finish(self.sampling)
            if rollout is not None:
                self.done[one.place] = rollout
                group.active.remove(one)
        group.waiting, group.values, group.arrival = [], None, None
        return arrived

    def admit(self, group: _Group) -> None:
        """Give free slots to the next requests; then close gaps, so that the cache is read in one piece."""
        free = sorted(set(group.slots) - {one.slot for one in group.active})
        while free and self.queue:
            place, request = self.queue.popleft()
            group.newcomers.append(_Sequence(place, request, free.pop(0)))
        begin, count = group.slots.start, len(group.active) + len(group.newcomers)
        for one in group.active:
            if one.slot >= begin + count:
                slot = free.pop(0)
                self.cache.copy(one.slot, slot, one.length - 1)
                one.slot = slot
        group.active.sort(key=lambda one: one.slot)

    def send(self, group: _Group, lockstep: Lockstep) -> None:
        """Run the next tokens of `group` through the model, and sample on the last stage."""
        active, newcomers = group.active, group.newcomers
        prompt_rows = list(self._bundles(newcomers))
        padding = lockstep.missing(bool(active) + len(prompt_rows))  # before the first row waits for others
        early = [self._fixed_row(active)] if active and self.fixed else []
        hidden = [self.forward.run(*self._token_row(active))] if active and not self.fixed else []
        hidden += [self.forward.run(*self._prompt_row(prompts)) for prompts in prompt_rows]
        for _ in range(padding):
            self.forward.run(*self._idle_row())
        group.waiting = active + newcomers
        group.active, group.newcomers = list(group.waiting), []
        if not group.waiting or (hidden and hidden[0] is None):
            return
        if hidden:
            early.append(self._sample(torch.cat(hidden), newcomers if early else group.waiting))
        group.values = torch.cat(early, dim=1)
        if self.forward.context.pp_size > 1:
            group.arrival = dist.broadcast(
                group.values, self.forward.last_rank, group=self.forward.context.pp_group, async_op=True
            )

    def _bundles(self, newcomers: Sequence[_Sequence]) -> Iterator[list[_Sequence]]:
        """Yield the sequences in rows of at most `prefill_tokens`, or of one longer prompt."""
        row: list[_Sequence] = []
        for one in newcomers:
            if row and sum(len(each.request.ids) for each in (*row, one)) > self.sampling.prefill_tokens:
                yield row
                row = []
            row.append(one)
        if row:
            yield row

    def _prompt_row(self, sequences: Sequence[_Sequence]) -> tuple[Tensor, PackedDocuments, list[int]]:
        """Return (tokens [t], their description, the rows of the last tokens) of whole prompts."""
        lengths = [len(one.request.ids) for one in sequences]
        spans = [*lengths[:-1], lengths[-1] + self.forward.missing(sum(lengths))]
        self.cache.row = PromptRow([one.slot for one in sequences], lengths, spans)
        tokens = np.concatenate([one.request.ids for one in sequences])
        tokens = np.pad(tokens, (0, spans[-1] - lengths[-1]))
        real = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=self.forward.context.device)
        padded = torch.tensor(np.cumsum([0, *spans]), dtype=torch.int32, device=self.forward.context.device)
        packed = packed_documents(real, padded, max(spans), self.forward.context.platform.transformer_engine)
        return self.forward.on_device(tokens), packed, (np.cumsum(lengths) - 1).tolist()

    def _token_row(self, sequences: Sequence[_Sequence]) -> tuple[Tensor, PackedDocuments, list[int]]:
        """Return `_prompt_row`'s values for the last token of each sequence: one document, with positions."""
        slots = [one.slot for one in sequences]
        positions = [one.length - 1 for one in sequences]
        n, missing = len(slots), self.forward.missing(len(slots))
        first = slots[0] if slots == list(range(slots[0], slots[0] + n)) else None
        places = self.forward.on_device(np.array(positions + missing * [0]))
        self.cache.row = TokenRow(
            self.forward.on_device(np.array(slots)), places[:n], max(positions) + 1, first
        )
        border = self.forward.token_border(n + missing)
        packed = packed_documents(border, border, n + missing)
        packed.token_positions = places
        tokens = np.array([int(one.tokens[-1][0]) for one in sequences] + missing * [0])
        return self.forward.on_device(tokens), packed, list(range(n))

    def _idle_row(self) -> tuple[Tensor, PackedDocuments, list[int]]:
        """Return a row of padding, for experts that wait for the rows of all replicas."""
        count = 1 + self.forward.missing(1)
        none = self.forward.on_device(np.zeros(0, dtype=np.int64))
        self.cache.row = TokenRow(none, none, 0, None)
        border = self.forward.token_border(count)
        packed = packed_documents(border, border, count)
        packed.token_positions = self.forward.on_device(np.zeros(count, dtype=np.int64))
        return packed.token_positions, packed, []

    @cached_property
    def _barred(self) -> Tensor | None:
        """Columns that are never sampled, of a rank with the head."""
        forward = self.forward
        width, unused = forward.parts[-1].head_weight().shape[0], self.sampling.unused_ids
        return barred_columns(unused, width, forward.context.tp_group, forward.context.device)

    def _sample(self, hidden: Tensor, sequences: Sequence[_Sequence]) -> Tensor:
        """Return ids, ln p and entropies, fp64 [3, n], of the next tokens, from hidden states [n, h]."""
        model = self.forward.parts[-1]
        logits = head_logits(hidden, model.head_weight(), compute_dtype(hidden), model.shape.logits_cap)
        sampled = sample_tokens(
            logits,
            self.forward.on_device(self._numbers(sequences)),
            temperature=self.sampling.temperature,
            vocab_size=self.sampling.vocab_size,
            barred=self._barred,
            top_p=self.sampling.top_p,
            tp_group=self.forward.context.tp_group,
        )
        return torch.stack([sampled.ids.double(), sampled.logp, sampled.entropy])

    def _numbers(self, sequences: Sequence[_Sequence]) -> np.ndarray:
        """Return the uniform number that decides the next token of each, fp64 [n]."""
        prompts = np.array([one.request.prompt for one in sequences])
        samples = np.array([one.request.sample for one in sequences])
        positions = np.array([len(one.tokens) for one in sequences])
        return uniforms(self.sampling.seed, self.iteration, prompts, samples, positions)

    def _fixed_row(self, sequences: Sequence[_Sequence]) -> Tensor:
        """Return `_sample`'s values for the next token of each sequence, from a row of a fixed shape."""
        assert self.fixed is not None
        slots = [one.slot for one in sequences]
        tokens = [int(one.tokens[-1][0]) for one in sequences]
        return self.fixed.run(slots, tokens, [one.length - 1 for one in sequences], self._numbers(sequences))
