"""Image bytes checked, turned upright and decoded to RGB. No other code opens an image."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from mkd.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
SHOWN_BYTES = 12  # of a file that is not an image
MAX_ASPECT = 200  # of the longer to the shorter side; image processors refuse more
WITHOUT_RGB = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # modes that would be clipped to white


def decode_image(content: bytes, max_pixels: int) -> np.ndarray:
    """Return the image in `content` as RGB, uint8 [height, width, 3], turned as its EXIF orientation says.

    Size and format come from the header; nothing is decoded before they are checked. Raises DataError for an
    image that is damaged, of another format, too large or too narrow.
    """
    if not content:
        what, why = "the image is empty", "its file has no bytes"
        raise DataError(what, why, "write it again, or remove it", code="image-not-valid")
    image_module, transpose = _pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # our own limit replaces the warning of Pillow's
        try:
            with image_module.open(io.BytesIO(content), formats=FORMATS) as image:
                width, height = image.size
                _check_size(width, height, max_pixels)
                _check_mode(image.mode)
                image.load()
                return np.asarray(_opaque(transpose(image)).convert("RGB"))
        except DataError:
            raise
        except image_module.DecompressionBombError as error:
            raise _too_large(str(error)) from error
        except image_module.UnidentifiedImageError as error:
            raise DataError(
                f"the image is of an unknown format: it begins with {content[:SHOWN_BYTES]!r}",
                f"it is none of {', '.join(FORMATS)}, or its first bytes are damaged",
                "convert or remove it",
                code="image-not-valid",
            ) from error
        except Exception as error:  # Pillow's decoders raise errors of many types for damaged files
            raise DataError(
                f"the image is damaged: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
                "its pixels cannot be read",
                "repair or remove it",
                code="image-not-valid",
            ) from error


def _opaque(image: Any) -> Any:
    """Return the image on white, as transformers shows transparent ones (its `convert_to_rgb`)."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image
    image = image.convert("RGBA")
    white = image.copy()
    white.paste((255, 255, 255, 255), (0, 0, *image.size))
    white.alpha_composite(image)
    return white


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(
            "images need Pillow, which is not installed",
            str(error),
            "pip install 'megatron-kd[images]'",
            code="data-package-missing",
        ) from error
    return Image, ImageOps.exif_transpose


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise _too_large(f"{width} x {height} pixels are more than --max-image-pixels {max_pixels}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise DataError(
            f"the image is too narrow: {width} x {height}",
            f"image processors refuse one side of more than {MAX_ASPECT} times the other",
            "crop or remove it",
            code="image-not-valid",
        )


def _check_mode(mode: str) -> None:
    if mode in WITHOUT_RGB:
        raise DataError(
            f"the image has pixels of the mode {mode}",
            "a conversion to 8 bits would clip them to white",
            "convert it to 8 bits for each colour",
            code="image-not-valid",
        )


def _too_large(why: str) -> DataError:
    return DataError(
        f"the image is too large: {why}",
        "decoding it could fill the memory",
        "make it smaller, or raise --max-image-pixels",
        code="image-too-large",
    )
