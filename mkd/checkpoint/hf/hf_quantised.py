"""Quantised tensors of Hugging Face checkpoints, dequantised slice by slice while they are read.

Read are FP8 blocks as DeepSeek-V3 stores them, MXFP4 as GPT-OSS stores its experts, and the formats of
compressed-tensors that mkd writes (`hf_compressed.py`). All appear to the rest of mkd as ordinary tensors
under the names that an unquantised checkpoint has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.hf.hf_compressed import METHOD, CompressedMatrix, ReadStored, find_compressed
from mkd.checkpoint.hf.hf_names import Cut
from mkd.errors import CheckpointError, MkdError

SCALE_SUFFIX = "_scale_inv"  # of FP8 weights
BLOCKS, SCALES = "_blocks", "_scales"  # of MXFP4 weights
MXFP4_BLOCK = 32  # elements that share a scale
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
DAMAGED = "download the model again"


@dataclass(frozen=True)
class TensorHeader:
    """A tensor as the header of its file describes it, or as it is after dequantising."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' spelling: F32, BF16, ...


@dataclass(frozen=True)
class FP8Blocks:
    """A matrix of e4m3 values, stored beside one scale for each block of rows and columns.

    Source: DeepSeek-V3 technical report, section 3.3. An element is its value times its block's scale.
    """

    stored: tuple[str, str]  # names on disk of values and scales
    header: TensorHeader  # the tensor after dequantising
    block: tuple[int, int]  # rows, columns

    def read(self, read_stored: ReadStored, cut: Cut) -> Tensor:
        """Return the part `cut`, fp32 [rows, columns]."""
        ranges = [range(*part.indices(size)) for part, size in zip(cut, self.header.shape, strict=True)]
        part = read_stored(self.stored[0], cut).float()
        blocks = [_blocks(one, size) for one, size in zip(ranges, self.block, strict=True)]
        scales = read_stored(self.stored[1], (blocks[0], blocks[1])).float()
        rows, columns = ranges
        of_column = torch.tensor([column // self.block[1] - blocks[1].start for column in columns]).long()
        for index, block in enumerate(range(blocks[0].start, blocks[0].stop)):
            first = max(block * self.block[0], rows.start) - rows.start
            last = min((block + 1) * self.block[0], rows.stop) - rows.start
            part[first:last] *= scales[index][of_column]
        return part

    def read_codes(self, read_stored: ReadStored, cut: Cut) -> tuple[Tensor, Tensor]:
        """Return codes, uint8 [rows, columns], and scales, fp32, of the part `cut`, which is whole blocks."""
        ranges = (range(*part.indices(size)) for part, size in zip(cut, self.header.shape, strict=True))
        blocks = tuple(_blocks(one, size) for one, size in zip(ranges, self.block, strict=True))
        codes = read_stored(self.stored[0], cut).view(torch.uint8)
        return codes, read_stored(self.stored[1], blocks).float()

    def is_finite(self, codes: Tensor, scales: Tensor) -> bool:
        """Return True if all elements are numbers."""
        return bool(((codes & 127) != 127).all() and scales.isfinite().all())


@dataclass(frozen=True)
class MXFP4:
    """The weights of all experts, [experts, in, out], in blocks of 32 that share a power of two.

    On disk the matrices are transposed: blocks uint8 [experts, out, in / 32, 16], scales uint8 without the
    last dimension. A byte holds two elements, the first in its lower half. Source: OCP Microscaling Formats
    (MX) specification 1.0, section 5. Every element is exact in bf16.
    """

    stored: tuple[str, str]  # names on disk of blocks and scales
    header: TensorHeader  # the tensor after dequantising

    def read(self, read_stored: ReadStored, cut: Cut) -> Tensor:
        """Return the part `cut`, bf16 [experts, in, out]."""
        experts, inputs, outputs = cut
        first, last, _ = inputs.indices(self.header.shape[1])
        groups = _blocks(range(first, last), MXFP4_BLOCK)
        blocks = read_stored(self.stored[0], (experts, outputs, groups, slice(0, MXFP4_BLOCK // 2)))
        scales = read_stored(self.stored[1], (experts, outputs, groups))
        values, powers = _mxfp4_tables()
        elements = values[blocks.int()].flatten(-2) * powers[scales.int()][..., None]
        skipped = first - groups.start * MXFP4_BLOCK
        return elements.flatten(-2)[..., skipped : skipped + last - first].transpose(1, 2).contiguous()

    def read_codes(self, read_stored: ReadStored, cut: Cut) -> tuple[Tensor, Tensor]:
        """Return codes, uint8 [out, in / 2], and scales, uint8 [out, in / 32], of one expert, `cut[0]`."""
        blocks, scales = (read_stored(name, cut[:1]) for name in self.stored)
        return blocks[0].flatten(1), scales[0]

    def is_finite(self, codes: Tensor, scales: Tensor) -> bool:
        """Return True if all elements are numbers: the largest scale stands for none."""
        return bool((scales != 255).all())


@dataclass(frozen=True)
class Compressed:
    """A matrix that compressed-tensors stores."""

    header: TensorHeader  # the tensor after dequantising
    matrix: CompressedMatrix

    @property
    def stored(self) -> tuple[str, ...]:
        """Names on disk."""
        return self.matrix.stored

    def read(self, read_stored: ReadStored, cut: Cut) -> Tensor:
        """Return the part `cut`, fp32 [rows, columns]."""
        return self.matrix.read(read_stored, cut)


Quantised = FP8Blocks | MXFP4 | Compressed


@cache
def _mxfp4_tables() -> tuple[Tensor, Tensor]:
    """Return the two values of each byte, bf16 [256, 2], and each scale's factor, bf16 [256]."""
    values = [(FP4_VALUES[byte & 15], FP4_VALUES[byte >> 4]) for byte in range(256)]
    powers = [2.0 ** (scale - 127) for scale in range(256)]
    return torch.tensor(values, dtype=torch.bfloat16), torch.tensor(powers, dtype=torch.bfloat16)


def _blocks(part: range, size: int) -> slice:
    """Return which blocks of `size` elements the elements of `part` lie in."""
    return slice(part.start // size, -(-part.stop // size))


def find_quantised(directory: Path, headers: Mapping[str, TensorHeader]) -> dict[str, Quantised]:
    """Return name -> quantised tensor for a folder whose config.json names a format that mkd reads.

    Raises `CheckpointError` for another format, and for values without scales of the right shape. Without a
    `quantization_config` nothing is quantised.
    """
    config = _quantisation(directory)
    method, block = config.get("quant_method"), _block(config.get("weight_block_size"))
    if not config:
        return {}
    if method == METHOD:
        shapes = {name: header.shape for name, header in headers.items()}
        return {
            name: Compressed(TensorHeader(headers[one.stored[0]].file, one.shape, "BF16"), one)
            for name, one in find_compressed(directory, config, shapes).items()
        }
    if method == "fp8" and block is not None:
        names = [name for name in headers if name + SCALE_SUFFIX in headers]
        return {name: _fp8(directory, headers, name, block) for name in names}
    if method == "mxfp4":
        names = [name.removesuffix(BLOCKS) for name in headers if name.endswith(BLOCKS)]
        return {name: _mxfp4(directory, headers, name) for name in names}
    what = f"{directory / 'config.json'}: the weights are quantised by {method!r}"
    why = (
        "mkd reads FP8 with a scale for each block (weight_block_size), MXFP4, the formats of its own "
        "rounded students (compressed-tensors), and unquantised weights"
    )
    do = "use the original checkpoint of this model"
    raise CheckpointError(what, why, do, code="hf-quantisation-not-supported")


def _quantisation(directory: Path) -> Mapping[str, Any]:
    """Return `quantization_config` of config.json; {} if there is none, or no readable config.json."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported where the model's shape is read
        return {}
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _block(sizes: Any) -> tuple[int, int] | None:
    """Return rows and columns of a block; None if `sizes` are not two whole numbers above 0."""
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    return tuple(sizes) if is_pair and all(type(one) is int and one > 0 for one in sizes) else None


def _fp8(
    directory: Path, headers: Mapping[str, TensorHeader], name: str, block: tuple[int, int]
) -> FP8Blocks:
    values, scales = headers[name], headers[name + SCALE_SUFFIX]
    expected = tuple(-(-size // part) for size, part in zip(values.shape, block, strict=False))
    is_right = values.dtype == "F8_E4M3" and len(values.shape) == 2 and scales.shape == expected
    if not is_right or scales.dtype not in ("F32", "BF16", "F16"):
        raise _not_valid(directory, name, values, scales, f"float scales of shape {list(expected)}")
    return FP8Blocks((name, name + SCALE_SUFFIX), TensorHeader(values.file, values.shape, "BF16"), block)


def _mxfp4(directory: Path, headers: Mapping[str, TensorHeader], name: str) -> MXFP4:
    values, scales = headers[name + BLOCKS], headers.get(name + SCALES)
    is_packed = len(values.shape) == 4 and values.shape[-1] == MXFP4_BLOCK // 2 and values.dtype == "U8"
    if scales is None or not is_packed or (scales.shape, scales.dtype) != (values.shape[:-1], "U8"):
        raise _not_valid(
            directory, name, values, scales, "blocks [experts, out, in / 32, 16] and their scales"
        )
    experts, rows, groups, _ = values.shape
    header = TensorHeader(values.file, (experts, groups * MXFP4_BLOCK, rows), "BF16")
    return MXFP4((name + BLOCKS, name + SCALES), header)


def _not_valid(
    directory: Path, name: str, values: TensorHeader, scales: TensorHeader | None, expected: str
) -> MkdError:
    found = "no scales" if scales is None else f"{scales.dtype} scales of shape {list(scales.shape)}"
    what = f"{directory}: {name} is stored as {values.dtype} of shape {list(values.shape)} with {found}"
    return CheckpointError(what, f"it needs {expected}", DAMAGED, code="hf-files-damaged")


def logical_headers(
    headers: Mapping[str, TensorHeader], quantised: Mapping[str, Quantised]
) -> dict[str, TensorHeader]:
    """Return the headers that an unquantised checkpoint would have, in the order on disk."""
    hidden = {stored for one in quantised.values() for stored in one.stored}
    by_values = {one.stored[0]: name for name, one in quantised.items()}
    found = {}
    for name, header in headers.items():
        if name in by_values:
            found[by_values[name]] = quantised[by_values[name]].header
        elif name not in hidden:
            found[name] = header
    return found
