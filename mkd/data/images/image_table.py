"""The images of a tokenised corpus on disk: a table, and the bytes or paths of its images.

Two files beside the tokens: PREFIX.images.bin has a record of `IMAGE` for each image, in the order of the
corpus; PREFIX.image_sources.bin has the paths, and the bytes of images that records held themselves.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkd.data.images.image_decoding import decode_image
from mkd.data.images.image_files import ImageBytes, ImageSource
from mkd.errors import DataError
from mkd.parallel.image_row import Grid

LOG = logging.getLogger("mkd")
REPORT_S = 5.0  # between two lines of progress
IMAGE = np.dtype(
    [
        ("document", np.int64),
        ("first", np.int32),  # first token in the document
        ("tokens", np.int32),  # structure tokens included
        ("grid", np.int32, 3),
        ("size", np.int32, 2),  # height and width, upright
        ("is_path", np.uint8),  # 1: the source is a path below --image-root, 0: the bytes of the image
        ("start", np.int64),  # of the source in the other file
        ("length", np.int64),  # bytes of the source
        ("sha256", np.uint8, 32),  # of the image's file
    ]
)


@dataclass(frozen=True)
class EncodedImage:
    """One image of a document."""

    first: int  # its first token in the document
    tokens: int  # its tokens, structure tokens included
    grid: Grid
    size: tuple[int, int]  # height and width in pixels, upright
    source: ImageBytes
    sha256: bytes  # of the file's content


def image_records(
    images: Iterable[Sequence[EncodedImage]],
    shares_sources: bool = False,  # True: equal sources are kept once
) -> tuple[np.ndarray, bytes]:
    """Return (records of IMAGE, their sources) of consecutive documents, both counted from the first one."""
    records, sources, start = [], [], 0
    kept: dict[bytes, int] = {}  # source -> its place
    for document, of_document in enumerate(images):
        for image in of_document:
            path = image.source.path
            source = image.source.content if path is None else path.encode()
            digest = np.frombuffer(image.sha256, np.uint8)
            place = kept.setdefault(source, start) if shares_sources else start
            row = (
                document,
                image.first,
                image.tokens,
                image.grid,
                image.size,
                path is not None,
                place,
                len(source),
                digest,
            )
            records.append(row)
            if place == start:
                sources.append(source)
                start += len(source)
    return np.array(records, dtype=IMAGE), b"".join(sources)


class ImageTableWriter:
    """Writes both files, with the first image; logs how many images were decoded."""

    def __init__(self, table: Path, sources: Path):
        self._paths = table, sources
        self._name = table.name.partition(".")[0]  # of a corpus that is still a draft too
        self._bytes = 0
        self._start = self._last = time.monotonic()
        self.count = self.patches = 0

    def append(self, records: np.ndarray, sources: bytes, first_document: int) -> None:
        """Add the result of `image_records`, whose documents start at `first_document`."""
        if not len(records):
            return
        records["document"] += first_document
        records["start"] += self._bytes
        for path, content in zip(self._paths, (records.tobytes(), sources), strict=True):
            with path.open("ab") as file:
                file.write(content)
        self._bytes += len(sources)
        self.count += len(records)
        self.patches += int(patches_of(records).sum())
        if time.monotonic() - self._last > REPORT_S:
            self._report()

    def close(self) -> None:
        """Log the total, if there was an image."""
        if self.count:
            self._report()

    def _report(self) -> None:
        self._last = time.monotonic()
        rate = self.count / max(self._last - self._start, 1e-9)
        LOG.info(f"tokenising {self._name}: {self.count} images decoded, {rate:.1f} images/s")


class ImageTable:
    """The images of a corpus, memory-mapped."""

    def __init__(self, table: Path, sources: Path):
        """Map both files. Raises DataError if one is missing or has the wrong size."""
        try:
            rest = table.stat().st_size % IMAGE.itemsize
            self._records = np.memmap(table, np.uint8, mode="r")[: -rest or None].view(IMAGE).view(np.ndarray)
            last = self._records[-1:]
            expected = int((last["start"] + last["length"]).sum())
            if rest or sources.stat().st_size < expected:
                raise ValueError(f"{sources} has not the {expected} bytes that the table describes")
        except (OSError, ValueError) as error:
            raise DataError(
                f"{table} is damaged or incomplete",
                str(error),
                "tokenise the corpus again: `mkd preprocess`",
                code="corpus-damaged",
            ) from error
        self._sources = sources

    def __len__(self) -> int:
        return len(self._records)

    def between(self, first: int, last: int) -> np.ndarray:
        """Return the records of the documents [first, last)."""
        begin, end = np.searchsorted(self._records["document"], [first, last])
        return self._records[begin:end]

    def decode(self, record: np.ndarray, source: ImageSource) -> np.ndarray:
        """Return the pixels of an image, uint8 [height, width, 3].

        Raises DataError if it cannot be read, or is another one than was tokenised.
        """
        held = self._held(int(record["start"]), int(record["length"]))
        content = source.read_path(held.decode()) if record["is_path"] else held
        name = held.decode() if record["is_path"] else f"an image of document {int(record['document'])}"
        if hashlib.sha256(content).digest() != record["sha256"].tobytes():
            raise DataError(
                f"{name} has changed since it was tokenised",
                "its tokens belong to the earlier content, which had perhaps another size",
                "restore it, or tokenise the corpus again: remove its files from the cache",
                code="image-changed",
            )
        return decode_image(content, source.max_pixels)

    def _held(self, start: int, length: int) -> bytes:
        with self._sources.open("rb") as file:
            file.seek(start)
            return file.read(length)


class ImagesInMemory(ImageTable):
    """The images of documents that are on no disk: those of questions with images."""

    def __init__(self, images: Iterable[Sequence[EncodedImage]]):
        """Take the images of each document."""
        self._records, self._content = image_records(images, shares_sources=True)

    def _held(self, start: int, length: int) -> bytes:
        return self._content[start : start + length]


@dataclass(frozen=True)
class PackImages:
    """The images of a pack, in the order of its tokens."""

    table: ImageTable
    records: np.ndarray  # [images] of IMAGE
    starts: np.ndarray  # [images] int64, first token of each in the pack

    @classmethod
    def of_parts(cls, table: ImageTable, parts: Iterable[tuple[int, int, int, int]]) -> PackImages:
        """Return the images of parts of documents: (document, first token, tokens, start in the pack)."""
        found, places = [np.zeros(0, IMAGE)], [np.zeros(0, dtype=np.int64)]
        for document, first, length, start in parts:
            records = table.between(document, document + 1)
            ends = records["first"] + records["tokens"]
            records = records[(records["first"] >= first) & (ends <= first + length)]
            found.append(records)
            places.append(records["first"].astype(np.int64) - first + start)
        return cls(table, np.concatenate(found), np.concatenate(places))


def with_sources_of(records: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return `records` with the sources of the same images in `others`, which may have more documents."""
    same = others[np.isin(others["document"], records["document"])]
    assert len(same) == len(records), "both tables have all images of a document"
    found = records.copy()
    for field in ("is_path", "start", "length"):
        found[field] = same[field]
    return found


def grids_of(records: np.ndarray) -> list[Grid]:
    """Return the grids of records."""
    return [(frames, rows, columns) for frames, rows, columns in records["grid"].tolist()]


def patches_of(records: np.ndarray) -> np.ndarray:
    """Return the patches of each image, int64 [n]."""
    return records["grid"].astype(np.int64).prod(axis=1)
