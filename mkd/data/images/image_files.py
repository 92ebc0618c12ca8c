"""The bytes of an image: a path below --image-root, a data URI, or a struct {bytes, path}."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.errors import DataError

DATA_URI = re.compile(r"data:[^,]{0,200}?(;base64)?,", re.IGNORECASE)
BYTES_PER_PIXEL = 8  # an image file with more is not read
HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class ImageBytes:
    """The file of an image, and where it came from."""

    content: bytes
    path: str | None  # relative to --image-root; None: the record holds the bytes


@dataclass(frozen=True)
class ImageSource:
    """Reads the images of records. Picklable, for workers."""

    root: str | None  # folder below which paths lie; None: records hold all images
    max_pixels: int  # bounds the size of a file too

    def read(self, image: str | Mapping[str, Any]) -> ImageBytes:
        """Return the bytes of an image of a record. Raises DataError if they cannot be read."""
        if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
            return ImageBytes(image["bytes"], None)
        name: str = image if isinstance(image, str) else image["path"]
        if name[:5].lower() == "data:":
            return ImageBytes(_from_data_uri(name), None)
        return ImageBytes(self.read_path(name), name)

    def read_path(self, name: str) -> bytes:
        """Return the content of the file `name` below the root, after all links are followed."""
        if self.root is None:
            raise DataError(
                f"the image {name} is a path, and there is no folder of images",
                "paths are read only below a folder that the run names",
                "name it with --image-root",
                code="image-outside-root",
            )
        if not name:
            why, do = "its path is empty", "name a file below --image-root"
            raise DataError("the image has no name", why, do, code="image-unreadable")
        root = Path(self.root).resolve()
        try:
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise DataError(
                    f"the image {name} lies outside of --image-root {self.root}",
                    f"it is {path}, and a record must not choose files elsewhere",
                    "copy the image below the folder; links must stay inside too",
                    code="image-outside-root",
                )
            most = HEADER_BYTES + BYTES_PER_PIXEL * self.max_pixels
            if not path.is_file():
                raise FileNotFoundError(_what_is_there(path))
            os.stat(os.path.join(root, name))  # an error for FILE/, which `resolve` takes for FILE
            with path.open("rb") as file:
                # Python reserves memory for all bytes that it is asked for. Some file systems report 0 bytes.
                size = os.fstat(file.fileno()).st_size or most
                content = file.read(min(size, most) + 1)
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links is a RuntimeError before 3.13
            raise DataError(
                f"the image {name} cannot be read: {getattr(error, 'strerror', None) or error}",
                f"it was looked for below --image-root {self.root}",
                "check the path and its permissions",
                code="image-unreadable",
            ) from error
        if len(content) > most:
            raise DataError(
                f"the image {name} has more than {most} bytes",
                f"no image of --max-image-pixels {self.max_pixels} needs so many",
                "make it smaller, or raise --max-image-pixels",
                code="image-too-large",
            )
        return content


def _what_is_there(path: Path) -> str:
    """Return what is at a path that is not a file."""
    kinds = {
        "a folder": path.is_dir(),
        "a named pipe (FIFO)": path.is_fifo(),
        "a socket": path.is_socket(),
        "a device": path.is_char_device() or path.is_block_device(),
    }
    found = [kind for kind, is_it in kinds.items() if is_it]
    return f"it is {found[0]}, not a file" if found else "there is no such file"


def _from_data_uri(uri: str) -> bytes:
    found = DATA_URI.match(uri)
    try:
        if found is None or not found[1]:
            raise ValueError("it does not start with data:TYPE;base64,")
        return base64.b64decode(uri[found.end() :], validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(
            f"the data URI {uri[:40]}... cannot be read",
            str(error),
            "write data:image/png;base64, and the bytes in base64",
            code="image-unreadable",
        ) from error
