"""Completions as each teacher reads them: after its own prompt, or in aligned tokens of another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from mkd.data.aligned.aligned_ids import Pair, align_ids, align_sampled
from mkd.data.aligned.chunk_selection import ChunkSelection
from mkd.data.aligned.context_records import completion_chunks
from mkd.data.aligned.teacher_batch import TeacherPack, empty_teacher_pack
from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.batch import Pack
from mkd.data.packing.cutting import padded_lengths
from mkd.data.prompts import PromptSet
from mkd.data.teacher_input import SharedTokens
from mkd.kinds.sampled.sampler.rollouts import Rollout
from mkd.xtoken.align.align_text import AlignedText

NO_CHUNK = np.zeros((0, 4), dtype=np.int64)
NO_ID = np.zeros(0, dtype=np.int64)
NOTHING = AlignedText(NO_ID, NO_ID, NO_CHUNK)
"""A completion as a teacher reads that has nothing to say about it."""


class RolloutTeacher(Protocol):
    """A teacher's side of the completions."""

    @property
    def seq_length(self) -> int:
        """Tokens of its packs."""

    def align(self, rollout: Rollout) -> AlignedText:
        """Return prompt and completion in the tokens of both models, chunks in the completion alone."""

    def pack(self, documents: Sequence[AlignedText], starts: Sequence[int], pack: Pack) -> Any:
        """Return the teacher's `PackPart` of a student's `pack`, whose `documents` begin at `starts`."""


@dataclass(frozen=True)
class SharedRollouts:
    """The side of a teacher that reads the student's tokens: nothing is added."""

    seq_length: int

    def align(self, rollout: Rollout) -> AlignedText:
        return NOTHING

    def pack(self, documents: Sequence[AlignedText], starts: Sequence[int], pack: Pack) -> SharedTokens:
        return SharedTokens()


@dataclass(frozen=True)
class RowRollouts:
    """The side of a teacher whose packs are rows of its own."""

    text: TeacherText
    prompts: PromptSet
    seq_length: int
    multiple: int  # documents are padded to a multiple of it

    def _prompt(self, rollout: Rollout) -> np.ndarray | None:
        """Return the teacher's tokens of the prompt; None if it has none for this completion."""
        made = rollout.of_teachers.get(self.text.name)
        if made is not None or not self.prompts:
            return made
        return self.prompts.prompts[rollout.request.prompt].of_teachers.get(self.text.name)

    def pack(self, documents: Sequence[AlignedText], starts: Sequence[int], pack: Pack) -> TeacherPack:
        """Return the teacher's part.

        A document without room is cut after its last chunk that fits, or left out with its prompt.
        """
        pad_id = self.text.tokenizer.padding_id(self.text.vocab_size)
        part = empty_teacher_pack(self.seq_length, pad_id)
        lengths, chunks, place = [], [NO_CHUNK], 0
        for document, start in zip(documents, starts, strict=True):
            fits = document.chunks[:, 3] <= self.seq_length - place
            found = document.chunks[fits & (document.chunks[:, 2] > 0)]  # a first token has no predictor
            if not len(found):
                continue
            ids = document.teacher_ids[: int(found[-1, 3])]
            part.tokens[place : place + len(ids)] = ids
            part.labels[place : place + len(ids) - 1] = ids[1:]
            chunks.append(found + [start, start, place, place])
            lengths.append(len(ids))
            place = int(padded_lengths(np.int64(place + len(ids)), self.multiple))
        if not lengths:
            return part
        spans = padded_lengths(np.array(lengths), self.multiple)
        spans[-1] += self.seq_length - place
        kept = self._selection(np.concatenate(chunks), pack.labels, pack.loss_mask, part.labels)
        return TeacherPack(part.tokens, part.labels, np.array(lengths), spans, kept)

    @cached_property
    def _selection(self) -> ChunkSelection:
        return self.text.selection()


@dataclass(frozen=True)
class ContextRollouts(RowRollouts):
    """The side of a teacher that reads another prompt. The sampled ids follow it as they are."""

    def align(self, rollout: Rollout) -> AlignedText:
        theirs = self._prompt(rollout)
        if theirs is None:
            return NOTHING
        own, template = rollout.request.ids, self.text.context
        assert template is not None, "the teacher has a context"
        return AlignedText(
            student_ids=np.concatenate([own, rollout.ids]),
            teacher_ids=np.concatenate([theirs, rollout.ids]),
            chunks=completion_chunks(len(own), len(theirs), len(rollout.ids), template),
        )


@dataclass(frozen=True)
class AlignedRollouts(RowRollouts):
    """The side of a cross-tokenizer teacher.

    It reads the prompt in its own chat template, and then the text that was sampled. The student's ids stay
    as they are; only their bytes become the teacher's tokens.
    """

    pair: Pair

    def align(self, rollout: Rollout) -> AlignedText:
        if not self.prompts:
            return self._without_prompt(rollout)
        own, theirs = rollout.request.ids, self._prompt(rollout)
        if theirs is None:
            return NOTHING
        prompt, template = self.prompts.prompts[rollout.request.prompt], self.text.context
        found = align_sampled(
            rollout.ids, self.pair, is_stopped=not rollout.is_truncated, is_chat=prompt.is_chat
        )
        offset = [len(own), len(own), len(theirs), len(theirs)]
        return AlignedText(
            student_ids=np.concatenate([own, found.student_ids]),
            teacher_ids=np.concatenate([theirs, found.teacher_ids]),
            chunks=found.chunks[found.chunks[:, 0] >= (template.skip_first if template else 0)] + offset,
        )

    def _without_prompt(self, rollout: Rollout) -> AlignedText:
        """Align text that came as ids, prompt included, as a tokenised document.

        The last chunk of a text that was cut off is left out: more text might change the teacher's tokens.
        """
        first = len(rollout.request.ids)
        found = align_ids(np.concatenate([rollout.request.ids, rollout.ids]), self.pair, completion=first)
        chunks = found.chunks[:-1] if rollout.is_truncated else found.chunks
        loss = np.ones(len(rollout.ids), bool) if rollout.loss is None else rollout.loss
        without = np.append(0, np.cumsum(np.append(np.zeros(first, bool), loss) == 0))
        is_sampled = without[chunks[:, 1]] == without[chunks[:, 0]]
        return AlignedText(found.student_ids, found.teacher_ids, chunks[is_sampled])
