"""Packed corpora with random access to their packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mkd.data.aligned.teacher_side import SharedSide, StudentPack, TeacherSide, summarise_teacher
from mkd.data.batch import Pack, empty_pack
from mkd.data.order import BlendOrder, EpochOrder, SampleOrder, evenly_spaced
from mkd.data.packing import cut_documents, pack_pieces, padded_lengths
from mkd.data.store import TokenStore, first_out_of_range
from mkd.errors import DataError

SUMMARISED_PACKS = 64  # enough for proportions; a pack takes milliseconds


class PackedDataset:
    """The packs of (a range of) the documents of a corpus; pack i is always the same.

    Picklable, for workers.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_length: int,
        vocab_size: int,  # token ids that the model knows
        pad_id: int,
        pack: str = "bfd",
        overlong: str = "split",
        documents: tuple[int, int] | None = None,  # [first, last) of the corpus; None: all
        document_multiple: int = 1,  # documents are padded to a multiple of it
        left_out: Sequence[int] = (),  # documents to skip
    ):
        """Cut the documents and pack the pieces. Raises DataError if no token of the documents has loss."""
        assert seq_length % document_multiple == 0
        first, last = documents or (0, len(store))
        lengths = store.lengths[first:last].copy()
        here = [document - first for document in left_out if first <= document < last]
        lengths[here] = 0
        pieces = cut_documents(lengths, first, seq_length, overlong)
        loss_tokens = store.count_loss(store.offsets[pieces.document] + pieces.offset + 1, pieces.num_labels)
        # Skip pieces without loss: they would cost a forward and a backward pass for nothing.
        pieces, loss_tokens = pieces.select(loss_tokens > 0), loss_tokens[loss_tokens > 0]
        if len(pieces) == 0:
            raise _no_loss_tokens(store, last - first, seq_length, overlong)
        self.store, self.pieces = store, pieces
        self._spans = padded_lengths(pieces.length, document_multiple)
        self.packs = pack_pieces(self._spans, seq_length, pack)
        self.teachers: tuple[TeacherSide | SharedSide, ...] = ()  # one for every teacher
        self._vocab_size, self._pad_id = vocab_size, pad_id
        self.seq_length = seq_length
        self.first_document, self.num_documents, self._num_left_out = first, last - first, len(here)
        self.num_tokens = int(pieces.length.sum())
        self.num_loss_tokens = int(loss_tokens.sum())

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Pack:
        """Return pack `index` in [0, len). Raises DataError for a token id that the model does not know."""
        piece_ids = self.packs.pieces_of(index)
        spans = self._spans[piece_ids].copy()
        spans[-1] += self.seq_length - spans.sum()  # the tail of the pack is padding of its last document
        pack = empty_pack(self.seq_length, self._pad_id)
        starts = np.cumsum(spans) - spans
        for start, piece in zip(starts, piece_ids, strict=True):
            self._copy_piece(int(piece), pack, int(start))
        student = StudentPack(piece_ids, starts, pack.labels, pack.loss_mask)
        return replace(
            pack,
            lengths=self.pieces.length[piece_ids],
            spans=spans,
            sample_id=index,
            teacher_inputs=tuple(side.pack(student) for side in self.teachers),
        )

    def documents_of(self, index: int) -> dict[str, list[int]]:
        """Return {prefix of the corpus: numbers of its documents that have a part in pack `index`}."""
        return {self.store.prefix: np.unique(self.pieces.document[self.packs.pieces_of(index)]).tolist()}

    def empty_pack(self) -> Pack:
        inputs = tuple(side.empty_pack() for side in self.teachers)
        return replace(empty_pack(self.seq_length, self._pad_id), teacher_inputs=inputs)

    @property
    def teacher_seq_lengths(self) -> tuple[int, ...]:
        """Length of every teacher's packs, in the tokens that it reads."""
        return tuple(side.seq_length for side in self.teachers)

    def sample_order(self, seed: int, shuffle: bool) -> EpochOrder:
        return EpochOrder(len(self), seed, shuffle)

    def evenly_spaced(self, count: int) -> np.ndarray:
        """Return `count` packs that represent all of them, int64."""
        return evenly_spaced([len(self)], None, count)

    def describe(self) -> list[str]:
        """Return a line with the sizes, and one for each cross-tokenizer teacher.

        `fill` is the proportion of positions that are not padding.
        """
        fill = self.num_tokens / (len(self) * self.seq_length)
        return [
            f"{self.store.prefix}: {len(self)} packs of {self.seq_length} tokens, {self.num_tokens} tokens,"
            f" {self.num_loss_tokens} loss tokens, fill {fill:.3f}{self._describe_bad_records()}",
            *self._describe_teachers(),
        ]

    def _describe_bad_records(self) -> str:
        """Count the corpus's bad records and the documents of this data set that a teacher refuses."""
        bad = self.store.meta.get("bad_records", 0) + self._num_left_out
        return f", {bad} bad records skipped" if bad else ""

    def _describe_teachers(self) -> list[str]:
        """Summarise evenly spaced packs, or all packs if there are few."""
        cross_tokenizer = {
            number: side for number, side in enumerate(self.teachers) if isinstance(side, TeacherSide)
        }
        if not cross_tokenizer:
            return []
        sample = np.unique(np.linspace(0, len(self) - 1, SUMMARISED_PACKS).astype(np.int64)).tolist()
        packs, pieces = (
            [self[index] for index in sample],
            np.concatenate([self.packs.pieces_of(index) for index in sample]),
        )
        return [
            summarise_teacher(
                side, packs, [pack.teacher_inputs[number] for pack in packs], side.needed(pieces), len(self)
            )
            for number, side in cross_tokenizer.items()
        ]

    def _copy_piece(self, piece: int, pack: Pack, start: int) -> None:
        """Copy tokens, labels and mask of a piece into the arrays of the pack, from position `start`."""
        pieces = self.pieces
        document, length = int(pieces.document[piece]), int(pieces.length[piece])
        num_labels = int(pieces.num_labels[piece])
        ids, loss = self.store.read(document, int(pieces.offset[piece]), max(length, num_labels + 1))
        wrong = first_out_of_range(ids, self._vocab_size)
        if wrong is not None:
            raise self.store.out_of_range(document, int(ids[wrong]), self._vocab_size)
        pack.tokens[start : start + length] = ids[:length]
        pack.labels[start : start + num_labels] = ids[1 : num_labels + 1]
        pack.loss_mask[start : start + num_labels] = loss[1 : num_labels + 1]


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
        """Return the same as PackedDataset."""
        member, number = self._place(index)
        return member.documents_of(number)

    def _place(self, index: int) -> tuple[PackedDataset, int]:
        """Return the member that has pack `index`, and the pack's number there."""
        member = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return self.members[member], index - int(self._offsets[member])

    def empty_pack(self) -> Pack:
        return self.members[0].empty_pack()

    @property
    def teacher_seq_lengths(self) -> tuple[int, ...]:
        """See PackedDataset."""
        return self.members[0].teacher_seq_lengths

    def sample_order(self, seed: int, shuffle: bool) -> SampleOrder:
        if self.weights is None:
            return EpochOrder(len(self), seed, shuffle)
        return BlendOrder([len(member) for member in self.members], self.weights, seed, shuffle)

    def evenly_spaced(self, count: int) -> np.ndarray:
        """Return `count` packs that represent all of them, int64.

        With weights, each member gives its share.
        """
        return evenly_spaced([len(member) for member in self.members], self.weights, count)

    def describe(self) -> list[str]:
        """Return the lines of the members."""
        return [line for member in self.members for line in member.describe()]


def _no_loss_tokens(store: TokenStore, num_documents: int, seq_length: int, overlong: str) -> DataError:
    why = f"all tokens of its {num_documents} documents that could be labels are masked"
    if overlong == "drop":
        why += f", or the documents are longer than --seq-length {seq_length} and dropped"
    return DataError(
        f"{store.prefix}: no loss tokens",
        why,
        "check that conversations have assistant turns, completions are not empty, "
        "and texts are longer than one token",
        code="corpus-without-loss-tokens",
    )
