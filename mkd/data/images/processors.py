"""A model's image processor: tokens and patches of a size, the pixels of an image, its text in a prompt."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from mkd.errors import UsageError
from mkd.families.vision import TEXT_ALONE
from mkd.parallel.image_row import Grid, num_patches
from mkd.tokenizers.tokenizer import Tokenizer, sha256_of

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # of transformers 5; it counts before the other
IDEFICS_TYPES = ("idefics3", "smolvlm")
TILE_NAME = re.compile(r"<row_\d+_col_\d+>")
QWEN_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@dataclass(frozen=True)
class ImageShape:
    """The size of one image for a model."""

    grid: Grid
    ids: np.ndarray  # int32 [n], the tokens that replace the placeholder, structure tokens included


class ImageProcessor(ABC):
    """The image processor of one family, on Pillow alone. Picklable, for workers."""

    merge: int  # patches side by side that make one token: merge * merge patches are a token
    placeholder: str  # the one token of an image in a rendered conversation, and of its features
    structure: tuple[str, ...] = ()  # other tokens that belong to images; they never have loss
    has_mrope: bool = False  # True if positions are (time, height, width)
    width: tuple[int, ...]  # shape of one row of the pixels

    def __init__(self, backend: Any, tokenizer: Tokenizer, placeholder: str):
        self.backend, self.tokenizer, self.placeholder = backend, tokenizer, placeholder
        if placeholder not in tokenizer.vocabulary:
            raise UsageError(
                f"the tokenizer has no token {placeholder}",
                "it is the place of an image in this family's conversations",
                "use the tokenizer of the vision-language model itself",
                code="tokenizer-of-another-model",
            )
        self.image_token_id = tokenizer.vocabulary[placeholder]
        self._reserve(s for s in self.structure if s in tokenizer.special_tokens)

    def _reserve(self, strings: Iterable[str]) -> None:
        """Let no text of a conversation spell the placeholder or one of these strings."""
        self.reserved = tuple(dict.fromkeys((self.placeholder, *strings)))
        ids = self.tokenizer.vocabulary
        self.silent_ids = np.array([ids[s] for s in self.reserved if s in ids], dtype=np.int64)

    @abstractmethod
    def shape(self, height: int, width: int) -> ImageShape:
        """Return grid and tokens of an image of this size."""

    @abstractmethod
    def _pixels(self, image: np.ndarray) -> np.ndarray:
        """Return the pixels of an image, neither rescaled nor normalised."""

    def pixels(self, image: np.ndarray) -> np.ndarray:
        """Return the pixels of an RGB image, uint8 [height, width, 3], resized and cut for the tower.

        uint8 [patches, `width`] or [tiles, *`width`]; see `ImageRow`.
        """
        found = self._pixels(image)
        assert found.shape[1:] == self.width, (found.shape, self.width)
        return found.astype(np.uint8)

    @abstractmethod
    def seen(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return `pixels` of an image of this size as one picture for people, uint8 [height, width, 3]."""

    @property
    @abstractmethod
    def token_side(self) -> int:
        """Pixels of the side of the square that becomes one token."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides tokens and pixels."""
        settings = {key: value for key, value in self.backend.to_dict().items() if "processor" not in key}
        written = json.dumps(settings, sort_keys=True, default=dict)
        return sha256_of([type(self).__name__, written, self.merge, self.placeholder, *self._of_model])

    @property
    def _of_model(self) -> list[object]:
        """Values of config.json that decide tokens, besides `merge`."""
        return []

    @cached_property
    def scale(self) -> Tensor:
        """Factor of a byte in the pixels that the tower takes, fp32; see `ImageRow`."""
        return self._of_channels(self._rescale / self._std)

    @cached_property
    def shift(self) -> Tensor:
        """Summand after `scale`, fp32."""
        return self._of_channels(-self._mean / self._std)

    def save(self, folder: str | Path) -> None:
        """Write the settings of the processor, `--max-image-side` included, as transformers reads them."""
        self.backend.save_pretrained(folder)
        settings = _own_settings(Path(folder))
        if settings is not None:
            settings["image_processor"] = json.loads((Path(folder) / PREPROCESSOR_FILE).read_text("utf-8"))
            text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            (Path(folder) / PROCESSOR_FILE).write_text(text, encoding="utf-8")

    @property
    def _rescale(self) -> float:
        return float(self.backend.rescale_factor) if self.backend.do_rescale else 1.0

    @property
    def _mean(self) -> np.ndarray:
        return np.array(self.backend.image_mean if self.backend.do_normalize else [0.0] * 3)

    @property
    def _std(self) -> np.ndarray:
        return np.array(self.backend.image_std if self.backend.do_normalize else [1.0] * 3)

    def _of_channels(self, values: np.ndarray) -> Tensor:
        """Return one value for each channel, spread over `width`."""
        columns = values.reshape(3, *(1 for _ in self.width[1:]))
        each = self.width[0] // 3 if len(self.width) == 1 else 1
        return torch.from_numpy(np.repeat(columns, each, axis=0)[None].astype(np.float32))


class QwenImages(ImageProcessor):
    """Qwen2-VL to Qwen3.5: one grid of patches for an image."""

    structure = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    has_mrope = True

    def __init__(self, backend: Any, tokenizer: Tokenizer, max_side: int | None):
        super().__init__(backend, tokenizer, "<|image_pad|>")
        if max_side is not None:
            longest = min(backend.size["longest_edge"], max_side**2)  # the name stands for pixels here
            backend.size = {
                "shortest_edge": min(backend.size["shortest_edge"], longest),
                "longest_edge": longest,
            }
        self.merge = backend.merge_size
        self.width = (3 * backend.temporal_patch_size * backend.patch_size**2,)

    def shape(self, height: int, width: int) -> ImageShape:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        backend = self.backend
        least, most = backend.size["shortest_edge"], backend.size["longest_edge"]
        resized = smart_resize(
            height, width, backend.patch_size * self.merge, min_pixels=least, max_pixels=most
        )
        grid = (1, resized[0] // backend.patch_size, resized[1] // backend.patch_size)
        return ImageShape(grid, np.full(num_patches(grid) // self.merge**2, self.image_token_id, np.int32))

    def _pixels(self, image: np.ndarray) -> np.ndarray:
        return _processed(self.backend, image)

    @property
    def token_side(self) -> int:
        return int(self.backend.patch_size) * self.merge

    def seen(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        _, rows, columns = self.shape(*size).grid
        merge, side = self.merge, self.backend.patch_size
        blocks = pixels.reshape(rows // merge, columns // merge, merge, merge, 3, -1, side, side)
        picture = blocks[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)  # the first of equal frames
        return np.ascontiguousarray(picture).reshape(rows * side, columns * side, 3)


class IdeficsImages(ImageProcessor):
    """Idefics3 and SmolVLM: an image is cut into square tiles, and a small copy of it is one more."""

    structure = ("<fake_token_around_image>", "<global-img>")

    def __init__(self, backend: Any, tokenizer: Tokenizer, max_side: int | None, patch: int, merge: int):
        super().__init__(backend, tokenizer, "<image>")
        tile, longest = backend.max_image_size["longest_edge"], backend.size["longest_edge"]
        if max_side is not None:
            longest = min(longest, max(max_side // tile, 1) * tile)
            backend.size = {"longest_edge": longest}
        if longest % tile:
            raise UsageError(
                f"the image processor enlarges images to {longest} pixels, and a tile has {tile}",
                "the number of tiles of an image would not follow from its size",
                f"set size.longest_edge in {PREPROCESSOR_FILE} to a multiple of {tile}",
                code="image-processor-not-valid",
            )
        rows = range(1, longest // tile + 1)
        tiles = [f"<row_{row}_col_{column}>" for row in rows for column in rows]
        unused = [string for string in tokenizer.special_tokens if TILE_NAME.fullmatch(string)]
        # Some tokenizers have no token for them; the processor writes the same strings, in several tokens.
        self._reserve((*self.structure, *tiles, *sorted(unused)))
        self.merge, self.width = merge, (3, tile, tile)
        self._side, self._num_tokens = tile // patch, (tile // patch // merge) ** 2

    def shape(self, height: int, width: int) -> ImageShape:
        tiles, rows, columns = self.backend.get_number_of_image_patches(height, width, {})
        return ImageShape((max(tiles, 1), self._side, self._side), self._ids(rows, columns))

    def _pixels(self, image: np.ndarray) -> np.ndarray:
        return _processed(self.backend, image)[0]

    @property
    def token_side(self) -> int:
        return self.width[1] // self._side * self.merge

    @property
    def _of_model(self) -> list[object]:
        return [self.width, self._side]

    def seen(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return the tiles in their places, and the small copy of the whole image below the first."""
        _, rows, columns = self.backend.get_number_of_image_patches(*size, {})
        side, tiles = self.width[1], pixels.transpose(0, 2, 3, 1)
        picture = np.full(((rows + 1) * side, max(columns, 1) * side, 3), 255, np.uint8)
        picture[-side:, :side] = tiles[-1]
        for number, tile in enumerate(tiles[:-1]):
            y, x = divmod(number, columns)
            picture[y * side : (y + 1) * side, x * side : (x + 1) * side] = tile
        return picture

    def _ids(self, rows: int, columns: int) -> np.ndarray:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        fake, small = self.structure
        text = get_image_prompt_string(rows, columns, self._num_tokens, fake, self.placeholder, small)
        return np.array(self.tokenizer.encode_with_control_tokens(text), dtype=np.int32)


def has_vision_part(folder: str | Path) -> bool:
    """Return True for the folder of a model that reads images in mkd, with or without its image processor."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config.get("vision_config") is not None and config.get("model_type") not in TEXT_ALONE


def load_image_processor(
    folder: str | Path, tokenizer: Tokenizer, max_side: int | None = None
) -> ImageProcessor | None:
    """Load the image processor in a model's folder; None if the model reads no images.

    `max_side`: --max-image-side. Raises UsageError for one that is not supported.
    """
    folder = Path(folder)
    has_processor = (folder / PREPROCESSOR_FILE).is_file() or _own_settings(folder) is not None
    if not has_processor or not (folder / "config.json").is_file():
        return None
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    kind, vision = config.model_type, getattr(config, "vision_config", None)
    if vision is None or kind in TEXT_ALONE:
        return None
    if kind not in (*IDEFICS_TYPES, *QWEN_TYPES):
        raise UsageError(
            f"{folder}: images of {kind} models are not supported",
            "each family has its own way to write an image into a conversation",
            f"use a model of {', '.join((*IDEFICS_TYPES, *QWEN_TYPES))}",
            code="model-type-not-supported",
        )
    backend = _load_backend(folder)
    if kind in QWEN_TYPES:
        return QwenImages(backend, tokenizer, max_side)
    return IdeficsImages(backend, tokenizer, max_side, vision.patch_size, config.scale_factor)


def _own_settings(folder: Path) -> dict[str, Any] | None:
    """Return the content of `PROCESSOR_FILE` if it has an image processor."""
    try:
        found = json.loads((folder / PROCESSOR_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "image_processor" in found else None


def _load_backend(folder: Path) -> Any:
    try:
        import PIL  # noqa: F401
        from transformers import AutoImageProcessor

        # Backends differ in pixels, and torchvision's often fails to load beside CPU torch: pin Pillow's.
        return AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises errors of many types
        raise UsageError(
            f"{folder}: the image processor cannot be loaded",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "pip install 'megatron-kd[images]', or repair preprocessor_config.json",
            code="image-processor-not-valid",
        ) from error


def _processed(backend: Any, image: np.ndarray) -> np.ndarray:
    """Return `pixel_values` of one image, resized and cut, in bytes."""
    found = backend(
        image, return_tensors="np", input_data_format="channels_last", do_rescale=False, do_normalize=False
    )
    return found["pixel_values"]
