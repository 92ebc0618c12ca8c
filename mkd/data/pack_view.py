"""Packs for people: as text, as one picture, and the summary of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mkd.data.batch import Pack
from mkd.data.chat_roles import role_parts
from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_table import PackImages, patches_of
from mkd.data.records.file_notes import note_lines
from mkd.human import counted
from mkd.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:  # an optional package
    from PIL.Image import Image as Picture

GREEN, GREY, BOLD, RESET = "\033[32m", "\033[90m", "\033[1m", "\033[0m"
LENGTH_BINS = 50
# Of the picture.
WIDTH, MARGIN, GAP = 1100, 16, 4  # pixels
TEXT_SIZE = 13
LONGEST_SIDE = 240  # of an image, pixels
LEAST_CELL = 4  # pixels of a token's side below which an image has no grid
WITH_LOSS, WITHOUT_LOSS = ("#c9ecc9", "#0b5d0b"), ("#ececec", "#6b6b6b")  # box, text
LINE, TITLE, GRID = "#bdbdbd", "#202020", "#ff3030"


def view_pack(
    pack: Pack, tokenizer: Tokenizer, *, colour: bool, headers: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return a line about the pack, then one for each document (or piece of one).

    With the `headers` of roles (`role_headers`), a conversation has a line for each of its messages.

    Tokens stand between bars. With `colour`, tokens with loss are green and all others grey; without,
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
        marks = [False, *(bool(one) for one in counts)]
        texts = [tokenizer.decode([i]) for i in ids]
        shown = [_token(text, has_loss, colour) for text, has_loss in zip(texts, marks, strict=True)]
        parts = [*role_parts(texts, headers)] if headers else []
        if not any(role for role, _, _ in parts):
            lines.append(f"  [{start}, {start + length}) |{'|'.join(shown)}|")
            continue
        lines.append(f"  [{start}, {start + length}) {sum(marks)} of {counted(length, 'token')} with loss")
        for role, first, end in parts:
            label = f"{BOLD}{role:9}{RESET}" if colour else f"{role:9}"
            lines.append(f"    {label} |{'|'.join(shown[first:end])}|")
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


def _token(text: str, has_loss: bool, colour: bool) -> str:
    text = repr(text)[1:-1]
    if colour:
        return f"{GREEN if has_loss else GREY}{text}{RESET}"
    return text if has_loss else f"({text})"


@dataclass(frozen=True)
class _Item:
    """One thing on a line: its size in pixels, and the function that draws it: (canvas, pen, x, y)."""

    width: int
    height: int
    draw: Callable[[Picture, Any, int, int], None]
    starts_line: bool = False


class PackPicture:
    """Draws packs, one below the other."""

    def __init__(self, tokenizer: Tokenizer, images: ConversationImages | None):
        """Keep the tokenizer, and the reader of the images; None if the packs have none."""
        from PIL import Image, ImageDraw, ImageFont

        self._tokenizer, self._images = tokenizer, images
        self._image, self._drawing = Image, ImageDraw
        self._font = ImageFont.load_default(TEXT_SIZE)

    def draw(self, packs: Iterable[Pack]) -> Picture:
        """Return the picture of the packs, RGB. Raises DataError for an image that cannot be read."""
        lines = list(_lines(item for pack in packs for item in self._items(pack)))
        height = sum(max(item.height for item in line) + GAP for line in lines) + 2 * MARGIN
        canvas = self._image.new("RGB", (WIDTH, height), "white")
        pen, y = self._drawing.Draw(canvas), MARGIN
        for line in lines:
            x = MARGIN
            for item in line:
                item.draw(canvas, pen, x, y)
                x += item.width + GAP
            y += max(item.height for item in line) + GAP
        return canvas

    def _items(self, pack: Pack) -> Iterator[_Item]:
        """Yield the titles, tokens and images of a pack."""
        loss = np.append(0, pack.loss_mask[:-1]) * (np.arange(len(pack.tokens)) > 0)
        yield self._title(f"pack {pack.sample_id}: {int(pack.lengths.sum())} of {len(pack.tokens)} tokens")
        image_starts = [] if pack.images is None else pack.images.starts.tolist()
        at = {start: number for number, start in enumerate(image_starts)}
        starts = np.cumsum(pack.spans) - pack.spans
        for start, length in zip(starts.tolist(), pack.lengths.tolist(), strict=True):
            loss_tokens = int(np.count_nonzero(pack.loss_mask[start : start + length]))
            yield self._title(f"[{start}, {start + length}): {length} tokens, {loss_tokens} with loss")
            place = start
            while place < start + length:
                if place in at:
                    yield self._picture(pack, at[place])
                    place += int(pack.images.records["tokens"][at[place]])  # type: ignore[union-attr]
                    continue
                has_loss = bool(loss[place]) and place > start
                yield self._token(int(pack.tokens[place]), has_loss)
                place += 1

    def _title(self, text: str) -> _Item:
        def draw(canvas: Picture, pen: Any, x: int, y: int) -> None:
            pen.text((x, y + 4), text, fill=TITLE, font=self._font)

        return _Item(WIDTH - 2 * MARGIN, TEXT_SIZE + 10, draw, starts_line=True)

    def _token(self, token: int, has_loss: bool) -> _Item:
        text = ascii(self._tokenizer.decode([token]))[1:-1]
        box, ink = WITH_LOSS if has_loss else WITHOUT_LOSS
        width, height = int(self._font.getlength(text)) + 6, TEXT_SIZE + 8

        def draw(canvas: Picture, pen: Any, x: int, y: int) -> None:
            pen.rectangle((x, y, x + width, y + height - 2), fill=box, outline=LINE)
            pen.text((x + 3, y + 2), text, fill=ink, font=self._font)

        return _Item(width, height, draw)

    def _picture(self, pack: Pack, number: int) -> _Item:
        """Return the image with that number, with a line that describes it below."""
        assert pack.images is not None and self._images is not None, "images have a reader"
        record, first = pack.images.records[number], int(pack.images.starts[number])
        processor = self._images.processor
        pixels = processor.pixels(pack.images.table.decode(record, self._images.source))
        height, width = record["size"].tolist()
        seen = processor.seen(pixels, (height, width))
        scale = LONGEST_SIDE / max(seen.shape[:2])
        size = tuple(max(round(side * scale), 1) for side in seen.shape[1::-1])
        shown = self._image.fromarray(seen).resize(
            size, self._image.Resampling.NEAREST if scale > 1 else None
        )
        tokens, cell = int(record["tokens"]), processor.token_side * scale
        label = f"[{first}, {first + tokens}): {width} x {height} pixels, {tokens} tokens"
        item_width = max(size[0], int(self._font.getlength(label)))

        def draw(canvas: Picture, pen: Any, x: int, y: int) -> None:
            canvas.paste(shown, (x, y))
            if cell >= LEAST_CELL:
                for column in np.arange(0, size[0] + 1, cell).round().astype(int).tolist():
                    pen.line((x + column, y, x + column, y + size[1]), fill=GRID)
                for row in np.arange(0, size[1] + 1, cell).round().astype(int).tolist():
                    pen.line((x, y + row, x + size[0], y + row), fill=GRID)
            pen.text((x, y + size[1] + 4), label, fill=TITLE, font=self._font)

        return _Item(item_width, size[1] + TEXT_SIZE + 12, draw)


def _lines(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Yield the items line by line."""
    line: list[_Item] = []
    used = 0
    for item in items:
        if line and (item.starts_line or used + item.width > WIDTH - 2 * MARGIN):
            yield line
            line, used = [], 0
        line.append(item)
        used += item.width + GAP
    if line:
        yield line
