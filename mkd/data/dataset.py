"""Packed corpora with random access to their packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mkd.data.aligned.context_summary import summarise_context
from mkd.data.aligned.teacher_side import SharedSide, StudentPack, TeacherSide, summarise_teacher
from mkd.data.batch import PAIR_NUMBER, RECORD, Pack, empty_pack
from mkd.data.corpus.store import TokenStore, first_out_of_range
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_table import PackImages
from mkd.data.order import STORED_PACKS, BlendOrder, EpochOrder, SampleOrder, evenly_spaced
from mkd.data.packing.cutting import Pieces, padded_lengths
from mkd.data.packing.kept_documents import Dropped
from mkd.data.packing.pack_index import PackIndex, pack_in_memory
from mkd.data.packing.pack_settings import WINDOW_PIECES, PackSettings
from mkd.data.quarantine import skipped
from mkd.data.tags import UNTAGGED, CorpusTags
from mkd.errors import DataError
from mkd.human import counted

SUMMARISED_PACKS = 64  # enough for proportions; a pack takes milliseconds


class PackedDataset:
    """The packs of (a range of) the documents of a corpus; pack i is always the same.

    Picklable, for workers.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        vocab_size: int,  # token ids that the model knows
        pad_id: int,
        index: PackIndex | None = None,  # default: the documents are packed now
        images: ConversationImages | None = None,  # reads the images; None: the models read none
        tags: CorpusTags | None = None,  # None: records have no tags, or none that matter
        **settings: Any,  # of PackSettings
    ):
        """Pack the documents, unless `index` has their packs. Raises DataError if none of them has loss."""
        packing = PackSettings(**settings)
        assert packing.seq_length % packing.document_multiple == 0
        self.store, self.index = store, index or pack_in_memory(store, packing)
        self.teachers: tuple[TeacherSide | SharedSide, ...] = ()  # one for every teacher
        self.tag_names = () if tags is None else tags.names  # of all tags of the run
        self.taught: Sequence[frozenset[int] | None] = ()  # tags of each of `teachers`; None: all
        self._tags: np.ndarray | None = None  # number of each pack's tag, int64 [packs]; None: without tags
        if tags is not None:
            self._tags = tags.of_documents(store, self.index.first_documents())
        self._vocab_size, self._pad_id, self.images = vocab_size, pad_id, images
        self.seq_length, self._multiple = packing.seq_length, packing.document_multiple
        self.overlong_conversations = packing.overlong_conversations
        self._has_own_rule = packing.overlong_conversations not in (None, packing.overlong)
        self.first_document, last = packing.document_range(store)
        self.num_documents, self._num_left_out = last - self.first_document, len(packing.left_out)
        self.num_tokens, self.num_loss_tokens = self.index.num_tokens, self.index.num_loss_tokens

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Pack:
        """Return pack `index` in [0, len). Raises DataError for a token id that the model does not know."""
        first_piece, last = self.index.piece_range(index)
        pieces = self.index.pieces(first_piece, last)
        spans = padded_lengths(pieces.length, self._multiple)
        spans[-1] += self.seq_length - spans.sum()  # the tail of the pack is padding of its last document
        pack = empty_pack(self.seq_length, self._pad_id)
        starts = np.cumsum(spans) - spans
        self._copy_pieces(pieces, pack, starts)
        images = self.store.images
        columns = (pieces.document, pieces.offset, pieces.length, starts)
        parts = zip(*(column.tolist() for column in columns), strict=True)
        student = StudentPack(first_piece, pieces, starts, pack.labels, pack.loss_mask)
        row_values = {
            RECORD + key: _spread(values[pieces.document], starts, pieces.length, self.seq_length)
            for key, values in self.store.numbers.items()
        }
        num_pairs = 0
        if self.store.documents_per_record > 1:
            num_pairs = len(starts) // 2
            pairs = np.arange(2 * num_pairs) // 2 + 1
            pairs[1::2] *= -1  # of a rejected document
            row_values[PAIR_NUMBER] = _spread(pairs, starts, pieces.length, self.seq_length)
        return replace(
            pack,
            row_values=row_values,
            num_pairs=num_pairs,
            lengths=pieces.length,
            spans=spans,
            sample_id=index,
            tag=UNTAGGED if self._tags is None else int(self._tags[index]),
            teacher_inputs=tuple(
                side.pack(student) if self._is_taught(index, number) else side.empty_pack()
                for number, side in enumerate(self.teachers)
            ),
            images=None if images is None else PackImages.of_parts(images, parts),
        )

    def _is_taught(self, pack: int, teacher: int) -> bool:
        """Return True if the teacher has text of the pack."""
        own = self.taught[teacher] if self.taught else None
        return own is None or self._tags is None or int(self._tags[pack]) in own

    def lacks_context(self, teacher: int) -> bool | None:
        """Return True if a teacher has a context, and no document has one; None if it judges none of them."""
        side, own = self.teachers[teacher], self.taught[teacher] if self.taught else None
        if not isinstance(side, TeacherSide) or side.text.context is None:
            return None
        if own is not None and self._tags is not None and own.isdisjoint(self._tags.tolist()):
            return None
        starts, first = side.store.tokens.starts, self.first_document
        return bool(starts(first + self.num_documents) == starts(first))

    def tags_of(self, packs: np.ndarray) -> np.ndarray:
        """Return the numbers of the tags of packs, int64; UNTAGGED for a number below 0."""
        if self._tags is None:
            return np.full(packs.shape, UNTAGGED)
        return np.where(packs < 0, UNTAGGED, self._tags[packs])

    @property
    def rule_of_conversations(self) -> str | None:
        """Rule that long conversations followed; None without any, or if all documents follow it."""
        found = self.index.dropped or Dropped()
        is_used = found.conversations + found.cut_conversations > 0
        return self.overlong_conversations if is_used and self._has_own_rule else None

    def documents_of(self, index: int) -> dict[str, list[int]]:
        """Return {prefix of the corpus: numbers of its documents that have a part in pack `index`}."""
        return {self.store.prefix: np.unique(self.index.pieces_of(index).document).tolist()}

    def empty_pack(self) -> Pack:
        inputs = tuple(side.empty_pack() for side in self.teachers)
        return replace(empty_pack(self.seq_length, self._pad_id), teacher_inputs=inputs)

    @property
    def teacher_seq_lengths(self) -> tuple[int, ...]:
        """Length of every teacher's packs, in the tokens that it reads."""
        return tuple(side.seq_length for side in self.teachers)

    @property
    def teacher_images(self) -> tuple[ConversationImages | None, ...]:
        """Reader of every teacher's images; None for a teacher that shares the student's or reads none."""
        return tuple(side.text.images if isinstance(side, TeacherSide) else None for side in self.teachers)

    def sample_order(self, seed: int, shuffle: bool) -> EpochOrder:
        return EpochOrder(len(self), seed, shuffle)

    def evenly_spaced(self, count: int) -> np.ndarray:
        """Return `count` packs that represent all of them, int64."""
        return evenly_spaced([len(self)], None, count)

    def longest_piece(self) -> int:
        """Return the tokens of the longest document or piece of one in a pack."""
        return self.index.longest_piece()

    def describe(self, quarantine: str = "") -> list[str]:
        """Return a line with the sizes, and one for each teacher with a row of its own.

        `fill` is the proportion of positions that are not padding. `quarantine` is the file that lists
        bad records.
        """
        fill = self.num_tokens / (len(self) * self.seq_length)
        return [
            f"{self.store.prefix}: {counted(len(self), 'pack')} of {self.seq_length} tokens, "
            f"{self.num_tokens} tokens, {self.num_loss_tokens} loss tokens, "
            f"fill {fill:.3f}{self._describe_missing(quarantine)}",
            *self._describe_teachers(),
        ]

    def _describe_missing(self, quarantine: str) -> str:
        """Count bad records, documents that a teacher refuses, those without room, and conversations cut."""
        bad = self.store.meta.get("bad_records", 0) + self._num_left_out
        dropped = "dropped documents not counted, by an earlier version"
        dropped = dropped if self.index.dropped is None else str(self.index.dropped)
        counts = [skipped(bad, quarantine), dropped]
        return "".join(f", {count}" for count in (*counts, *self._describe_conversations()) if count)

    def _describe_conversations(self) -> Iterator[str]:
        """Yield what became of conversations that are longer than a pack."""
        found, rule = self.index.dropped or Dropped(), self.overlong_conversations
        flag, long = "--overlong-conversations", "conversations longer than --seq-length"
        if found.conversations:
            lost = found.conversation_loss_tokens
            share = lost / (lost + self.num_loss_tokens)
            yield f"{found.conversations} {long} left out with {share:.3f} of the loss tokens ({flag} {rule})"
        if found.cut_conversations:
            how = {"truncate": "cut at the end", "truncate-left": "cut at the beginning"}.get(
                rule or "", rule
            )
            yield f"{found.cut_conversations} {long} {how} ({flag} {rule})"

    def _describe_teachers(self) -> list[str]:
        """Summarise evenly spaced packs, or all packs if there are few."""
        cross_tokenizer = {
            number: side for number, side in enumerate(self.teachers) if isinstance(side, TeacherSide)
        }
        if not cross_tokenizer:
            return []
        sample = np.unique(np.linspace(0, len(self) - 1, SUMMARISED_PACKS).astype(np.int64)).tolist()
        packs, ranges = [self[index] for index in sample], [self.index.piece_range(index) for index in sample]
        return [
            (summarise_context if side.text.context and not side.text.aligns else summarise_teacher)(
                side,
                packs,
                [pack.teacher_inputs[number] for pack in packs],
                sum(side.needed(*pieces) for pieces in ranges),
                len(self),
            )
            for number, side in cross_tokenizer.items()
        ]

    def _copy_pieces(self, pieces: Pieces, pack: Pack, starts: np.ndarray) -> None:
        """Copy tokens, labels and mask of pieces into the arrays of the pack, from the positions `starts`."""
        begins = self.store.starts(pieces.document) + pieces.offset
        needed = np.maximum(pieces.length, pieces.num_labels + 1)
        assert (begins + needed <= self.store.starts(pieces.document + 1)).all(), "pieces end in documents"
        columns = (pieces.document, begins, needed, starts, pieces.length, pieces.num_labels)
        for document, begin, count, start, length, num_labels in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            ids, loss = self.store.read_tokens(begin, count)
            wrong = first_out_of_range(ids, self._vocab_size)
            if wrong is not None:
                raise self.store.out_of_range(document, int(ids[wrong]), self._vocab_size)
            pack.tokens[start : start + length] = ids[:length]
            pack.labels[start : start + num_labels] = ids[1 : num_labels + 1]
            pack.loss_mask[start : start + num_labels] = loss[1 : num_labels + 1]


def _spread(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """Return each document's value at its positions [start, start + length), and 0 elsewhere."""
    found = np.zeros(seq_length, dtype=values.dtype)
    for value, start, length in zip(values, starts.tolist(), lengths.tolist(), strict=True):
        found[start : start + length] = value
    return found


def require_contexts(members: Sequence[PackedDataset]) -> None:
    """Raise DataError if no document of a data set has a context for a teacher that judges it."""
    for number, side in enumerate(members[0].teachers if members else ()):
        lacking = [found for member in members if (found := member.lacks_context(number)) is not None]
        if lacking and all(lacking) and isinstance(side, TeacherSide):
            files = ", ".join(dict.fromkeys(member.store.name for member in members))
            problem = DataError(
                f"no record of {files} has a context for the teacher {side.text.name}",
                "it leaves all of them out (missing: skip), so its loss there would be a mean of nothing",
                "add to the records what its context reads, or give other files: held-out ones with "
                "--valid-data-path",
                code="record-value-not-valid",
            )
            problem.on_all_ranks = True
            raise problem


def later_orders(dataset: BlendedDataset) -> dict[str, str]:
    """Return name -> value of what decides the packs and their order, for a data set's fingerprint.

    It is empty for data sets that all versions of this program pack and order alike.
    """
    epochs = [len(dataset)] if dataset.weights is None else [len(member) for member in dataset.members]
    found = {}
    if any(member.index.num_windows > 1 for member in dataset.members):
        found["packing"] = f"windows of {WINDOW_PIECES} pieces"
    if max(epochs) > STORED_PACKS:
        found["permutation"] = "computed"
    for rule in (member.rule_of_conversations for member in dataset.members):
        if rule is not None:
            found["overlong_conversations"] = rule
    return found


class BlendedDataset:
    """Several packed corpora, concatenated.

    Pack i of member m has the number (packs of the members before m) + i. With `weights`, training and
    evaluation draw from the members in that proportion, and each member has separate epochs. Without weights,
    all packs form one epoch.
    """

    def __init__(self, members: Sequence[PackedDataset], weights: Sequence[float] | None = None):
        assert members and (weights is None or len(weights) == len(members))
        self.members, self.weights = list(members), weights
        self.num_documents = sum(member.num_documents for member in members)
        self._offsets = np.concatenate([[0], np.cumsum([len(member) for member in members])])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, index: int) -> Pack:
        """Return pack `index` in [0, len); see PackedDataset."""
        member, number = self._place(index)
        return replace(member[number], sample_id=index)

    def documents_of(self, index: int) -> dict[str, list[int]]:
        """Return {prefix of the corpus: numbers of its documents in pack `index`}; see PackedDataset."""
        member, number = self._place(index)
        return member.documents_of(number)

    def _place(self, index: int) -> tuple[PackedDataset, int]:
        """Return the member that has pack `index`, and the pack's number there."""
        member = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return self.members[member], index - int(self._offsets[member])

    def empty_pack(self) -> Pack:
        return self.members[0].empty_pack()

    @property
    def tag_names(self) -> tuple[str, ...]:
        """All tags of the run; () without tags."""
        return self.members[0].tag_names

    def tags_of(self, packs: np.ndarray) -> np.ndarray:
        """Return the numbers of the tags of packs, int64; UNTAGGED for a number below 0."""
        places = np.searchsorted(self._offsets, packs, side="right") - 1
        found = np.full(packs.shape, UNTAGGED)
        for number, member in enumerate(self.members):
            inside = (places == number) & (packs >= 0)
            found[inside] = member.tags_of(packs[inside] - self._offsets[number])
        return found

    @property
    def images(self) -> ConversationImages | None:
        """Reader of the images; None if the models read none."""
        return self.members[0].images

    @property
    def teacher_seq_lengths(self) -> tuple[int, ...]:
        """See PackedDataset."""
        return self.members[0].teacher_seq_lengths

    @property
    def teacher_images(self) -> tuple[ConversationImages | None, ...]:
        """See PackedDataset."""
        return self.members[0].teacher_images

    def sample_order(self, seed: int, shuffle: bool) -> SampleOrder:
        if self.weights is None:
            return EpochOrder(len(self), seed, shuffle)
        return BlendOrder([len(member) for member in self.members], self.weights, seed, shuffle)

    def evenly_spaced(self, count: int) -> np.ndarray:
        """Return `count` packs that represent all of them, int64.

        With weights, each member gives its share.
        """
        return evenly_spaced([len(member) for member in self.members], self.weights, count)

    def describe(self, quarantine: str = "") -> list[str]:
        """Return the lines of the members."""
        return [line for member in self.members for line in member.describe(quarantine)]
