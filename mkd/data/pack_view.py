"""Packs as text for people: documents with borders and loss marked, and a summary of a data set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mkd.data.batch import Pack
from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.images.image_table import patches_of
from mkd.data.images.pack_images import PackImages
from mkd.data.records.file_notes import note_lines
from mkd.human import counted
from mkd.tokenizers.tokenizer import Tokenizer

WITH_LOSS, WITHOUT_LOSS, RESET = "\033[32m", "\033[90m", "\033[0m"
LENGTH_BINS = 50


def view_pack(pack: Pack, tokenizer: Tokenizer, *, colour: bool) -> str:
    """Return a line about the pack, then one for each document (or piece of one).

    Its tokens stand between bars. With `colour`, tokens with loss are green and all others grey; without,
    tokens without loss are in parentheses. The first token of a piece never has loss, because nothing in the
    pack predicts it.
    """
    used, loss_tokens = int(pack.lengths.sum()), int(np.count_nonzero(pack.loss_mask))
    lines = [
        f"pack {pack.sample_id}: {counted(len(pack.lengths), 'document')}, "
        f"{used} of {len(pack.tokens)} tokens, {loss_tokens} with loss, {len(pack.tokens) - used} padding"
    ]
    if pack.images is not None:
        lines += _image_lines(pack.images)
    starts = np.cumsum(pack.spans) - pack.spans
    for start, length in zip(starts.tolist(), pack.lengths.tolist(), strict=True):
        ids = pack.tokens[start : start + length].tolist()
        counts = pack.loss_mask[start : start + length - 1] > 0
        shown = [
            _token(tokenizer, i, bool(has_loss), colour)
            for i, has_loss in zip(ids, [False, *counts], strict=True)
        ]
        lines.append(f"  [{start}, {start + length}) |{'|'.join(shown)}|")
    return "\n".join(lines)


def summarise(dataset: BlendedDataset) -> Iterator[str]:
    """Yield lines: sizes of every corpus, what is ignored of it, proportions, document lengths.

    Proportions are those of loss tokens and of used positions.
    """
    yield from dataset.describe()
    yield from dict.fromkeys(line for member in dataset.members for line in note_lines(member.store.meta))
    lengths = document_lengths(dataset)
    tokens = sum(member.num_tokens for member in dataset.members)
    loss_tokens = sum(member.num_loss_tokens for member in dataset.members)
    places = sum(len(member) * member.seq_length for member in dataset.members)
    percentiles = np.percentile(lengths, [0, 50, 90, 99, 100]).astype(int).tolist()
    yield f"share of loss tokens {loss_tokens / tokens:.3f} ({loss_tokens} of {tokens} tokens)"
    yield f"packing efficiency {tokens / places:.3f} ({tokens} tokens in {places} places)"
    yield "document lengths: least {}, median {}, 90 % up to {}, 99 % up to {}, most {} tokens".format(
        *percentiles
    )


def document_lengths(dataset: BlendedDataset) -> np.ndarray:
    """Return the tokens of every document before it is cut, int64 [documents].

    Documents without loss are included.
    """
    return np.concatenate([_lengths(member) for member in dataset.members])


def _lengths(member: PackedDataset) -> np.ndarray:
    return member.store.lengths_between(member.first_document, member.first_document + member.num_documents)


def draw_lengths(lengths: np.ndarray, seq_length: int, figure) -> None:
    """Draw a histogram of document lengths, with a line at the length of a pack, on a matplotlib `figure`."""
    axes = figure.subplots()
    edges = np.unique(np.geomspace(1, max(int(lengths.max()), seq_length) + 1, LENGTH_BINS).astype(np.int64))
    axes.hist(np.maximum(lengths, 1), bins=edges)
    axes.axvline(seq_length, color="red", label=f"--seq-length {seq_length}")
    axes.set(xscale="log", xlabel="tokens of a document", ylabel="documents")
    axes.legend()


def _image_lines(images: PackImages) -> list[str]:
    """Return a line for each image: its tokens in the pack, its size and its patches."""
    sizes = (f"{width} x {height}" for height, width in images.records["size"].tolist())
    columns = images.starts.tolist(), images.records["tokens"].tolist(), sizes, patches_of(images.records)
    return [
        f"  image [{start}, {start + count}): {size} pixels, {patches} patches"
        for start, count, size, patches in zip(*columns, strict=True)
    ]


def _token(tokenizer: Tokenizer, token: int, has_loss: bool, colour: bool) -> str:
    text = repr(tokenizer.decode([token]))[1:-1]
    if colour:
        return f"{WITH_LOSS if has_loss else WITHOUT_LOSS}{text}{RESET}"
    return text if has_loss else f"({text})"
