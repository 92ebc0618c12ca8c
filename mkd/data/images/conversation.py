"""Conversations with images to ids, loss mask and places of the images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mkd.data.images.decoding import decode_image
from mkd.data.images.processors import PREPROCESSOR_FILE, ImageProcessor, ImageShape, load_image_processor
from mkd.data.images.sources import ImageBytes, ImageSource
from mkd.errors import DataError, UsageError
from mkd.parallel.image_row import Grid
from mkd.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedImage:
    """One image of a document."""

    first: int  # its first token in the document
    tokens: int  # its tokens, structure tokens included
    grid: Grid
    size: tuple[int, int]  # height and width in pixels, upright
    source: ImageBytes
    sha256: bytes  # of the file's content


@dataclass(frozen=True)
class ConversationImages:
    """Reads the images of conversations, and expands their placeholders. Picklable, for workers."""

    processor: ImageProcessor
    source: ImageSource

    @property
    def settings(self) -> list[object]:
        """All that decides the tokens of a record's images, for the key of a cache."""
        root = self.source.root
        return [self.processor.fingerprint, root, self.source.max_pixels]

    def encode(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[str | Mapping[str, Any]]
    ) -> tuple[np.ndarray, np.ndarray, tuple[EncodedImage, ...]]:
        """Return (ids int32, loss uint8, images) of a conversation; both [n] with the images expanded.

        `messages` and `images` as `messages.split_images` returns them. Every image is decoded once, so that
        a bad one is found here and not in training. Image and structure tokens have no loss. Raises DataError
        for an image that cannot be read, and for a text that spells a control token of images.
        """
        self._check_texts(messages)
        ids, loss = self.processor.tokenizer.apply_chat_template(messages)
        places = np.flatnonzero(np.asarray(ids) == self.processor.image_token_id)
        if len(places) != len(images):
            raise DataError(
                f"the chat template writes {len(places)} image placeholders for {len(images)} images",
                "image and place would not match",
                "use a template that writes one for each image part, in every role that has images",
                code="image-placeholders-differ",
            )
        read = [self._read(number, image) for number, image in enumerate(images, 1)]
        shapes = [self.processor.shape(height, width) for (height, width), _ in read]
        new_ids, new_loss, firsts = expand(
            np.asarray(ids, np.int32), np.asarray(loss, np.uint8), places, shapes
        )
        new_loss[np.isin(new_ids, self.processor.silent_ids)] = 0
        found = tuple(
            EncodedImage(first, len(shape.ids), shape.grid, size, source, _digest(source.content))
            for first, shape, (size, source) in zip(firsts.tolist(), shapes, read, strict=True)
        )
        return new_ids, new_loss, found

    def _read(self, number: int, image: str | Mapping[str, Any]) -> tuple[tuple[int, int], ImageBytes]:
        try:
            source = self.source.read(image)
            return decode_image(source.content, self.source.max_pixels).shape[:2], source
        except DataError as error:
            raise error.located(f"image {number}") from error

    def _check_texts(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for number, message in enumerate(messages, 1):
            for value in message.values():
                texts = [part.get("text", "") for part in value] if isinstance(value, list) else [value]
                spelled = [
                    s for text in texts if isinstance(text, str) for s in self.processor.reserved if s in text
                ]
                if spelled:
                    raise DataError(
                        f"message {number} spells {spelled[0]}, a control token of images",
                        "the model would take it for an image that is not there",
                        "remove it, or write an image part",
                        code="image-placeholder-in-text",
                    )


def image_reader(
    folder: str | Path, tokenizer: Tokenizer, root: str | None, max_pixels: int, max_side: int | None = None
) -> ConversationImages | None:
    """Return the reader of the vision-language model in `folder`; None for a model that reads no images.

    For the other arguments see the flags --image-root, --max-image-pixels and --max-image-side. Raises
    UsageError for a processor that cannot be used, and for a root that is no folder.
    """
    processor = load_image_processor(folder, tokenizer, max_side)
    if processor is None and root is None:
        return None
    if processor is None:
        raise UsageError(
            f"--image-root is given, and the model {folder} reads no images",
            f"it has no {PREPROCESSOR_FILE} beside its config.json, or no vision part",
            "leave the flag out, or use a vision-language model",
            code="image-root-of-text-model",
        )
    if root is not None and not Path(root).is_dir():
        raise UsageError(
            f"--image-root {root} is no folder",
            "records name their images by paths below it",
            "check the path",
            code="image-root-not-found",
        )
    return ConversationImages(processor, ImageSource(root and str(Path(root).resolve()), max_pixels))


def expand(
    ids: np.ndarray,  # [n] int32
    loss: np.ndarray,  # [n] uint8
    places: np.ndarray,  # ascending places of the placeholders
    shapes: Sequence[ImageShape],  # of the images, in order
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids, loss, first token of each image) with each placeholder replaced by its image's tokens."""
    lengths = np.array([len(shape.ids) for shape in shapes], dtype=np.int64)
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = lengths
    new_ids, new_loss = np.repeat(ids, repeats), np.repeat(loss, repeats)
    firsts = shifted(np.arange(len(ids)), places, lengths)[places]
    for first, shape in zip(firsts.tolist(), shapes, strict=True):
        new_ids[first : first + len(shape.ids)] = shape.ids
        new_loss[first : first + len(shape.ids)] = 0
    return new_ids, new_loss, firsts


def shifted(borders: np.ndarray, places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return token borders of a document after its placeholders at `places` became `lengths` tokens each."""
    grown = np.concatenate([[0], np.cumsum(lengths - 1)])
    return borders + grown[np.searchsorted(places, borders, side="left")]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
