"""Make packs of synthetic documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.data.batch import Pack, PackedBatch, collate
from mkd.data.packing.best_fit import pack_pieces
from mkd.data.teacher_input import SharedTokens

CHAT_SIGMA = 0.9  # standard deviation of the logarithm of a document's length


@dataclass(frozen=True)
class ChatLengths:
    """Lengths of conversations: lognormal around `median` tokens, cut at `longest`."""

    median: int
    longest: int
    spread: float = CHAT_SIGMA  # of the logarithm; 0: all are equally long

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        """Draw `count` lengths, int64, at least 2: a shorter document has nothing to predict."""
        lengths = random.lognormal(math.log(self.median), self.spread, size=count)
        return (lengths + 1e-6).astype(np.int64).clip(2, self.longest)


def random_documents(lengths: np.ndarray, vocab: int, random: np.random.Generator) -> list[np.ndarray]:
    """Return random token ids, one array per document."""
    return [random.integers(vocab, size=length) for length in lengths.tolist()]


def lay_out(documents: Sequence[np.ndarray], spans: Sequence[int]) -> Pack:
    """Lay documents out in one row: document i takes `spans[i]` positions, padded.

    Each token predicts the next.
    """
    tokens, labels, mask = (np.zeros(sum(spans), dtype=dtype) for dtype in (np.int64, np.int64, np.float32))
    start = 0
    for document, span in zip(documents, spans, strict=True):
        end = start + len(document)
        tokens[start:end] = document
        labels[start : end - 1] = document[1:]
        mask[start : end - 1] = 1.0
        start += span
    return Pack(tokens, labels, mask, np.array([len(d) for d in documents]), np.array(spans), sample_id=0)


def packed_batches(documents: Sequence[np.ndarray], seq_length: int) -> list[PackedBatch]:
    """Pack documents best-fit decreasing into micro-batches of one pack."""
    packs = pack_pieces(np.array([len(document) for document in documents]), seq_length, "bfd")
    batches = []
    for first, last in zip(packs.offsets[:-1], packs.offsets[1:], strict=True):
        members = [documents[i] for i in packs.piece_ids[first:last]]
        spans = [len(document) for document in members]
        spans[-1] += seq_length - sum(spans)
        batches.append(collate([lay_out(members, spans)]))
    return batches


def for_teachers(batches: Sequence[PackedBatch], num_teachers: int) -> list[PackedBatch]:
    """Return the batches for teachers that read the student's tokens."""
    return [replace(batch, teacher_inputs=(SharedTokens(),) * num_teachers) for batch in batches]


def full_pack(seq_length: int, vocab: int, lengths: ChatLengths, random: np.random.Generator) -> PackedBatch:
    """Fill a pack with conversations, without padding; the last one is cut."""
    chosen: list[int] = []
    while (room := seq_length - sum(chosen)) > 0:
        length = min(int(lengths.draw(1, random)[0]), room)
        chosen.append(room if room - length < 2 else length)
    return collate([lay_out(random_documents(np.array(chosen), vocab, random), chosen)])


def document_lengths(batches: Sequence[PackedBatch]) -> list[int]:
    """Return the tokens of every document."""
    return [length for batch in batches for length in batch.cu_seqlens.diff().tolist()]
