"""Contents that are lists of text and image parts, and the images that they show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mkd.data.records.loss_flags import refuse_part_flags
from mkd.data.records.values import check_string, json_name
from mkd.errors import DataError

IMAGE_PARTS = {"image": ("image", "path", "url"), "image_url": ("image_url",)}
"""Type of an image part -> the keys that may hold the image."""
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # of a URL; "data:" is the only one that is read


class ImageQueue:
    """The images of a record in the order of their places in its messages."""

    def __init__(self, column: Any = None):
        """Start with the record's `images`, from which parts without an image take theirs."""
        self._waiting = _column(column)
        self._listed = len(self._waiting)
        self.found: list[str | Mapping[str, Any]] = []

    def read(self, content: list[Any], name: str) -> str | list[dict[str, str]]:
        """Return a content without its images: a text if it has none, else parts. Raises DataError."""
        parts = [
            _part(part, f"{name}, part {place}", self._waiting, self.found)
            for place, part in enumerate(content, 1)
        ]
        return "".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts

    def close(self) -> None:
        """Raise DataError if images are left."""
        if self._waiting:
            raise _count_differs(self._listed, self._listed - len(self._waiting))


def _part(part: Any, name: str, queue: list[Any], found: list[str | Mapping[str, Any]]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict):
        refuse_part_flags(part, name)
    if kind == "text":
        check_string(part.get("text"), f"{name}: text")
        return {"type": "text", "text": part["text"]}
    if kind not in IMAGE_PARTS:
        raise DataError(
            f"{name} is {'of type ' + repr(kind) if isinstance(part, dict) else 'a ' + json_name(part)}",
            "parts of a message are texts and images",
            'use {"type": "text", "text": "..."} and {"type": "image", "image": "PATH"}',
            code="record-images-not-valid",
        )
    image = next((part[key] for key in IMAGE_PARTS[kind] if part.get(key) is not None), None)
    if kind == "image_url" and isinstance(image, dict):
        image = image.get("url")
    if image is None and queue:
        place, image = queue.pop(0)
        if part.get("index") not in (None, place):
            raise _out_of_order(name, part["index"], place)
    if image is None:
        raise DataError(
            f"{name} is an image without content",
            "neither the part nor the record's `images` has one for it",
            "add a path, a data URI or {bytes, path} as `image`, or to the list `images`",
            code="record-images-not-valid",
        )
    found.append(_checked(image, name))
    return {"type": "image"}


def _checked(image: Any, name: str) -> str | Mapping[str, Any]:
    """Return the image if its form is known. Whether it can be read is found out when it is."""
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
        return image
    path: Any = image.get("path") if isinstance(image, Mapping) else image
    check_string(path, f"{name}: image")
    if SCHEME.match(path) and not path[:5].lower() == "data:":
        raise DataError(
            f"{name} is the URL {path[:80]}",
            "mkd never fetches images over the network",
            "download the image, and name its path below --image-root",
            code="image-unreadable",
        )
    return path


def _column(column: Any) -> list[Any]:
    if column is None:
        return []
    if not isinstance(column, list):
        raise DataError(
            f"images is a {json_name(column)}",
            "it is the list of a record's images, in the order of the image parts",
            "write a list, also for a single image",
            code="record-images-not-valid",
        )
    return list(enumerate(column))


def _out_of_order(name: str, index: Any, place: int) -> DataError:
    return DataError(
        f"{name} has the index {index}, and the next of the record's images is number {place}",
        "images are taken in the order of their places in the conversation",
        "sort the list `images`, or put the images into the parts",
        code="record-images-not-valid",
    )


def _count_differs(listed: int, used: int) -> DataError:
    return DataError(
        f"images lists {listed} images, and the messages have places for {used}",
        "each image needs its place in the conversation",
        'add a part {"type": "image"} to a message for each, or remove the others',
        code="record-images-not-valid",
    )
