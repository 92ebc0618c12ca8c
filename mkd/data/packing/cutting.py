"""Documents cut into pieces that fit into a pack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that fit into a pack. All arrays are int64 [pieces].

    Position i of a piece has a label for i < num_labels: the next token of the document. A document of n
    tokens that is split keeps its n-1 labels: the last token of a piece still predicts the first one of the
    next.
    """

    document: np.ndarray
    offset: np.ndarray  # first token in the document
    length: np.ndarray  # tokens
    num_labels: np.ndarray  # length, or length - 1 where the document ends or is cut off

    def __len__(self) -> int:
        return len(self.document)

    def select(self, which: np.ndarray) -> Pieces:
        return Pieces(self.document[which], self.offset[which], self.length[which], self.num_labels[which])


def padded_lengths(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Return the tokens that documents occupy in a pack. No other code decides it.

    Context parallelism needs multiples.
    """
    return -(-lengths // multiple) * multiple


def whole_records(lengths: np.ndarray, together: int, multiple: int, seq_length: int) -> np.ndarray:
    """Return the lengths, 0 for documents whose record of `together` documents does not fit a pack."""
    of_record = padded_lengths(lengths, multiple).reshape(-1, together).sum(axis=1)
    return np.where(np.repeat(of_record <= seq_length, together), lengths, 0)


def cut_documents(
    lengths: np.ndarray, first_document: int, seq_length: int, starts: np.ndarray | None = None
) -> Pieces:
    """Cut the documents first_document, first_document + 1, ... into pieces of at most `seq_length` tokens.

    `lengths` int64 [documents] are counted from the tokens `starts` (default: the first ones), see
    `DocumentKeeper`. Pieces without any label (a single token at the end of a document) are skipped.
    """
    documents = np.arange(first_document, first_document + len(lengths))
    starts = np.zeros_like(lengths) if starts is None else starts
    per_document = -(-lengths // seq_length)
    rank = np.arange(per_document.sum()) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    left = np.repeat(lengths, per_document) - rank * seq_length
    length = np.minimum(left, seq_length)
    num_labels = np.minimum(length, left - 1)
    offset = np.repeat(starts, per_document) + rank * seq_length
    pieces = Pieces(np.repeat(documents, per_document), offset, length, num_labels)
    return pieces.select(num_labels > 0)
