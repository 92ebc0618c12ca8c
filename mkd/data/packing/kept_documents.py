"""The tokens of documents that packs may hold: what is kept of pairs, images, conversations and long texts.

A conversation is any document that has tokens without loss: its answers need the question before them. Cut
as a text is, its later pieces would train answers without their question, so it has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mkd.data.corpus.store import TokenStore
from mkd.data.images.image_packing import ImageRoom
from mkd.data.packing.cutting import whole_records
from mkd.data.packing.pack_settings import PackSettings

TRUNCATE, DROP, TRUNCATE_LEFT = "truncate", "drop", "truncate-left"
LISTED_DOCUMENTS = 1 << 20  # looked at together


@dataclass(frozen=True)
class Dropped:
    """Numbers of documents that are not whole in the packs, because a pack has no room for them."""

    too_many_patches: int = 0  # for --max-patches-per-pack: nothing of them is kept
    too_long: int = 0  # for --seq-length, conversations not counted: nothing of them is kept
    conversations: int = 0  # for --seq-length: nothing of them is kept
    conversation_loss_tokens: int = 0  # of these
    cut_conversations: int = 0  # longer than --seq-length, and kept in part or in several pieces

    @property
    def has_whole_ones(self) -> bool:
        """True if nothing is kept of some document."""
        return self.too_many_patches + self.too_long + self.conversations > 0

    def __str__(self) -> str:
        numbers = {"--max-patches-per-pack": self.too_many_patches, "--seq-length": self.too_long}
        reasons = ", ".join(f"{number} beyond {flag}" for flag, number in numbers.items() if number)
        return reasons and f"documents dropped: {reasons}"


@dataclass(frozen=True)
class KeptDocuments:
    """Tokens to keep of consecutive documents. Each array has one entry per document."""

    starts: np.ndarray  # int64, first token to keep
    lengths: np.ndarray  # int64, tokens to keep; 0: none
    too_many_patches: np.ndarray  # bool: nothing is kept because of --max-patches-per-pack
    too_long: np.ndarray  # bool: nothing is kept because of --seq-length
    is_conversation: np.ndarray  # bool: a conversation that is longer than a pack
    dropped: Dropped


@dataclass(frozen=True)
class DocumentKeeper:
    """Decides which tokens of the documents of a corpus are kept."""

    store: TokenStore
    settings: PackSettings

    @property
    def room(self) -> ImageRoom:
        settings = self.settings
        return ImageRoom(self.store, settings.seq_length, settings.max_patches, settings.teacher_images)

    def kept(self, first: int, last: int) -> KeptDocuments:
        """Return the tokens to keep of the documents [first, last)."""
        settings, together = self.settings, self.store.documents_per_record
        lengths = self.store.lengths_between(first, last)
        left_out = np.array(settings.left_out, dtype=np.int64)
        lengths[left_out[(left_out >= first) & (left_out < last)] - first] = 0
        whole = lengths
        if together > 1:
            whole = whole_records(lengths, together, settings.document_multiple, settings.seq_length)
        is_conversation = self._conversations(first, whole)
        starts, kept = self._ranges(first, whole, is_conversation, self.room)
        is_dropped = (lengths > 0) & (kept == 0)
        of_patches = np.zeros_like(is_dropped)
        if settings.max_patches is not None and is_dropped.any():
            without_limit = replace(self.room, max_patches=None)
            of_patches = is_dropped & (self._ranges(first, whole, is_conversation, without_limit)[1] > 0)
        too_long = is_dropped & ~of_patches
        gone = np.flatnonzero(too_long & is_conversation)
        dropped = Dropped(
            too_many_patches=int(of_patches.sum()),
            too_long=int(too_long.sum()) - len(gone),
            conversations=len(gone),
            conversation_loss_tokens=self._loss_tokens(first + gone),
            cut_conversations=int((is_conversation & (kept > 0)).sum()),
        )
        return KeptDocuments(starts, kept, of_patches, too_long, is_conversation, dropped)

    def _conversations(self, first: int, lengths: np.ndarray) -> np.ndarray:
        """Return which documents are conversations that are longer than a pack, bool.

        Without a rule for conversations they are documents like all others.
        """
        found = lengths > self.settings.seq_length
        if self.settings.overlong_conversations is None or not self.store.has_loss_mask:
            return np.zeros_like(found)
        documents = np.flatnonzero(found)
        with_loss = self.store.count_loss(self.store.starts(first + documents), lengths[documents])
        found[documents] = (with_loss > 0) & (with_loss < lengths[documents])
        return found

    def _ranges(
        self, first: int, lengths: np.ndarray, is_conversation: np.ndarray, room: ImageRoom
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (first tokens, numbers of tokens) to keep of the documents first, first + 1, ..."""
        settings, most = self.settings, self.settings.seq_length
        of_conversations, of_others = settings.overlong_conversations, settings.overlong
        image_rule = of_conversations or of_others
        kept = room.kept_lengths(first, lengths, DROP if image_rule == TRUNCATE_LEFT else image_rule)
        starts, is_long = np.zeros_like(lengths), kept > most
        kept[is_long & np.where(is_conversation, of_conversations == DROP, of_others == DROP)] = 0
        shortened = is_long & np.where(is_conversation, of_conversations == TRUNCATE, of_others == TRUNCATE)
        kept[shortened] = most
        if of_conversations == TRUNCATE_LEFT:
            for place in np.flatnonzero(is_long & is_conversation).tolist():
                begin = int(lengths[place]) - most
                start = _start_of_end(self.store.read(first + place, begin - 1, most + 1)[1])
                starts[place], kept[place] = (0, 0) if start is None else (begin + start, most - start)
        return starts, kept

    def _loss_tokens(self, documents: np.ndarray) -> int:
        starts, lengths = self.store.starts(documents), self.store.lengths(documents)
        return int(self.store.count_loss(starts + 1, lengths - 1).sum())  # the first token is never a label


def left_out_records(
    store: TokenStore, settings: PackSettings, progress: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, why) of the conversations and pairs that no pack has room for."""
    if not store.has_loss_mask or settings.overlong_conversations is None:
        return
    keeper, (begin, end) = DocumentKeeper(store, settings), settings.document_range(store)
    together = store.documents_per_record
    name = "conversation" if together == 1 else "pair"
    for first in range(begin, end, LISTED_DOCUMENTS):
        last = min(first + LISTED_DOCUMENTS, end)
        kept = keeper.kept(first, last)
        is_long = kept.too_long & (kept.is_conversation | (together > 1))
        places = np.flatnonzero((kept.too_many_patches | is_long)[::together]) * together
        lengths = store.starts(first + places + together) - store.starts(first + places)
        of_patches = kept.too_many_patches[places].tolist()
        for (path, line), length, is_wide in zip(
            store.places(first + places), lengths.tolist(), of_patches, strict=True
        ):
            limit = f"more than --seq-length {settings.seq_length}"
            if is_wide:
                limit = f"and its images more patches than --max-patches-per-pack {settings.max_patches}"
            yield path, line, f"the {name} has {length} tokens, {limit}"
        progress()


def _start_of_end(loss: np.ndarray) -> int | None:
    """Return where the kept end of a conversation starts, None if its last answer does not fit.

    `loss` [m + 1] is that of the last m tokens and of the token before them. As many of the last turns are
    kept as fit whole, or else the end of the last question with its answer.
    """
    edges = np.diff(loss.astype(np.int8))
    answers = np.flatnonzero(edges == 1)  # first tokens; one at 0 would have no question
    if not len(answers) or not answers[-1]:
        return None
    ends = np.flatnonzero(edges == -1)  # first tokens after an answer
    borders = ends[ends < answers[-1]]
    return int(borders[0]) if len(borders) else 0
