"""Conversations with images to ids, loss mask and places of the images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mkd.data.images.image_decoding import decode_image
from mkd.data.images.image_files import ImageBytes, ImageSource
from mkd.data.images.image_table import EncodedImage
from mkd.data.images.processors import PREPROCESSOR_FILE, PROCESSOR_FILE, ImageProcessor, load_image_processor
from mkd.data.records.messages import joined_texts, texts_of
from mkd.errors import DataError, UsageError
from mkd.families.vision import TEXT_ALONE
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReadImage:
    """The file of an image that was decoded once."""

    source: ImageBytes
    size: tuple[int, int]  # height and width in pixels, upright


@dataclass(frozen=True)
class PlacedImages:
    """A conversation's tokens with the images expanded."""

    ids: np.ndarray  # [n] int32
    repeats: np.ndarray  # int64, one for each token before: the tokens that it became
    images: tuple[EncodedImage, ...]

    def moved(self, borders: np.ndarray) -> np.ndarray:
        """Return where token borders of the text before stand now, of the same shape."""
        return np.concatenate([[0], np.cumsum(self.repeats)])[borders]


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
        self,
        conversation: Conversation,
        images: Sequence[str | Mapping[str, Any]],
        read: Sequence[ReadImage] | None = None,  # result of `read(images)`; None: they are read now
    ) -> tuple[np.ndarray, np.ndarray, tuple[EncodedImage, ...]]:
        """Return (ids int32, loss uint8, images) of a conversation; both [n] with the images expanded.

        Messages and `images` as `messages.read_messages` returns them. Every image is decoded once, so that
        a bad one is found here and not in training. Image and structure tokens have no loss. Raises DataError
        for an image that cannot be read, and for a text that spells a control token of images.
        """
        ids, loss = self.processor.tokenizer.apply_chat_template(conversation)
        found = self.read(images) if read is None else read
        placed = self.place(conversation.messages, np.asarray(ids, np.int32), found)
        new_loss = np.repeat(np.asarray(loss, np.uint8), placed.repeats)
        for image in placed.images:
            new_loss[image.first : image.first + image.tokens] = 0
        new_loss[np.isin(placed.ids, self.processor.silent_ids)] = 0
        return placed.ids, new_loss, placed.images

    def read(self, images: Sequence[str | Mapping[str, Any]]) -> list[ReadImage]:
        """Return the files of images with their sizes. Raises DataError for an image that cannot be read."""
        return [self._read(number, image) for number, image in enumerate(images, 1)]

    def place(
        self,
        messages: Sequence[Mapping[str, Any]],
        ids: np.ndarray,  # [n] int32, of the rendered conversation
        images: Sequence[ReadImage],
    ) -> PlacedImages:
        """Return the conversation's tokens with the images expanded. Raises DataError as `encode`."""
        self._check_texts(messages)
        places = np.flatnonzero(ids == self.processor.image_token_id)
        if len(places) != len(images):
            raise DataError(
                f"the chat template writes {len(places)} image placeholders for {len(images)} images",
                "image and place would not match",
                "use a template that writes one for each image part, in every role that has images",
                code="image-placeholders-differ",
            )
        shapes = [self.processor.shape(*image.size) for image in images]
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[places] = [len(shape.ids) for shape in shapes]
        new_ids = np.repeat(ids, repeats)
        firsts = (np.cumsum(repeats) - repeats)[places].tolist()
        found = []
        for first, shape, image in zip(firsts, shapes, images, strict=True):
            new_ids[first : first + len(shape.ids)] = shape.ids
            digest = hashlib.sha256(image.source.content).digest()
            found.append(EncodedImage(first, len(shape.ids), shape.grid, image.size, image.source, digest))
        return PlacedImages(new_ids, repeats, tuple(found))

    def _read(self, number: int, image: str | Mapping[str, Any]) -> ReadImage:
        try:
            source = self.source.read(image)
            height, width, _ = decode_image(source.content, self.source.max_pixels).shape
            return ReadImage(source, (height, width))
        except DataError as error:
            name = image if isinstance(image, str) else image.get("path")
            is_told = not name or name in error.what or name[:5].lower() == "data:"
            raise error.located(f"image {number}" if is_told else f"image {number} ({name})") from error

    def _check_texts(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError for texts that spell a control token of images, each alone or joined."""
        texts = [(f"message {n}", text) for n, one in enumerate(messages, 1) for text in texts_of(one)]
        texts += [("the conversation, where texts meet,", text) for text in joined_texts(messages)]
        for place, text in texts:
            spelled = [string for string in self.processor.reserved if string in text]
            if spelled:
                raise DataError(
                    f"{place} spells {spelled[0]}, a control token of images",
                    "the model would take it for an image that is not there",
                    "remove it, or write an image part",
                    code="image-placeholders-differ",
                )


def image_reader(
    folder: str | Path, tokenizer: Tokenizer, root: str | None, max_pixels: int, max_side: int | None = None
) -> ConversationImages | None:
    """Return the reader of the vision-language model in `folder`; None for a model that reads no images.

    For the other arguments see the flags --image-root, --max-image-pixels and --max-image-side. Raises
    UsageError for a processor that cannot be used, and for a root that is not a folder.
    """
    processor = load_image_processor(folder, tokenizer, max_side)
    if processor is None and root is None:
        return None
    if processor is None:
        raise UsageError(
            f"--image-root is given, and the model {folder} reads no images",
            f"it has neither {PREPROCESSOR_FILE} nor {PROCESSOR_FILE}, or no vision part in config.json; of "
            f"{', '.join(TEXT_ALONE)} mkd runs the text model alone",
            "leave the flag out, or use a vision-language model",
            code="remove-flag",
        )
    if root is not None and not Path(root).is_dir():
        raise UsageError(
            f"--image-root {root} is not a folder",
            "records name their images by paths below it",
            "check the path",
            code="path-not-found",
        )
    return ConversationImages(processor, ImageSource(root and str(Path(root).resolve()), max_pixels))
