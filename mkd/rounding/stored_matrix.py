"""Rounded matrices as the library compressed-tensors stores them, for writing and for reading.

| format | tensors of a matrix [o, i] with groups of g |
|---|---|
| int4 | weight_packed int32 [o, i/8], weight_scale bf16 [o, i/g], weight_shape int64 [2] |
| int8 | weight_packed int32 [o, i/4], weight_scale bf16 [o, 1], weight_shape int64 [2] |
| int8, rounded inputs | weight int8, weight_scale bf16 [o, 1] |
| fp8 | weight e4m3, weight_scale bf16 [o, 1]; fp8-block: [o/128, i/128] |
| mxfp4 | weight_packed uint8 [o, i/2], weight_scale uint8 [o, i/32], the exponent + 127 |
| nvfp4 | weight_packed uint8 [o, i/2], weight_scale e4m3 [o, i/16], weight_global_scale fp32 [1] |

With rounded inputs, NVFP4 also has input_global_scale fp32 [1]. Packed integers have half their range added,
and the first of a word is in the lowest bits. FP4 has the sign in bit 3, and the first of two elements is in
the lower half of a byte. A file's `weight_global_scale` is a divisor: an element is code x scale / global
scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mkd.config.rounding_formats import ROW, Rounding
from mkd.rounding.number_grids import e2m1_codes, e2m1_numbers
from mkd.rounding.rounded_matrix import encode, tensor_scale

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
GLOBAL = "_global_scale"
INPUT_GLOBAL = "input_global_scale"
WORD = 32  # bits of packed integers
PACKED_INTEGERS = "pack-quantized"
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "int4": (PACKED_INTEGERS,),
    "int8": (PACKED_INTEGERS, "int-quantized"),  # the latter with rounded inputs
    "fp8": ("float-quantized",),
    "fp8-block": ("float-quantized",),
    "mxfp4": ("mxfp4-pack-quantized",),
    "nvfp4": ("nvfp4-pack-quantized",),
}
"""Our format -> the names of compressed-tensors for how its tensors are stored."""

Stored = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def layout_of(rounding: Rounding) -> str:
    """Return compressed-tensors' name for how a format is stored."""
    return LAYOUTS[rounding.format][-1 if rounding.inputs else 0]


def elements_of_code(rounding: Rounding) -> int:
    """Return how many elements of a row one stored number holds."""
    if layout_of(rounding) == PACKED_INTEGERS:
        return WORD // rounding.kind.bits
    return 2 if rounding.kind.bits == 4 else 1


def stored_headers(name: str, full: tuple[int, int], rounding: Rounding) -> dict[str, Stored]:
    """Return name -> (shape, dtype) of the tensors that hold the matrix `name`, which ends in `.weight`."""
    rows, columns = full
    groups = 1 if rounding.group == ROW else columns // rounding.group
    scales = rows // rounding.kind.block_rows, groups
    packed = rows, columns // elements_of_code(rounding)
    if layout_of(rounding) == PACKED_INTEGERS:
        return {
            f"{name}{PACKED}": (packed, torch.int32),
            f"{name}{SCALE}": (scales, torch.bfloat16),
            f"{name}{SHAPE}": ((2,), torch.int64),
        }
    match rounding.format:
        case "int8":
            return {name: (full, torch.int8), f"{name}{SCALE}": (scales, torch.bfloat16)}
        case "fp8" | "fp8-block":
            return {name: (full, torch.float8_e4m3fn), f"{name}{SCALE}": (scales, torch.bfloat16)}
        case "mxfp4":
            return {f"{name}{PACKED}": (packed, torch.uint8), f"{name}{SCALE}": (scales, torch.uint8)}
    found: dict[str, Stored] = {
        f"{name}{PACKED}": (packed, torch.uint8),
        f"{name}{SCALE}": (scales, torch.float8_e4m3fn),
        f"{name}{GLOBAL}": ((1,), torch.float32),
    }
    if rounding.inputs:
        found[f"{name.removesuffix('weight')}{INPUT_GLOBAL}"] = ((1,), torch.float32)
    return found


def stored_tensors(
    matrix: Tensor,  # [out, in], exact
    rounding: Rounding,
    peak: Tensor | None,  # of the matrix that training rounds, which may be more than this one
    input_peak: float = 0.0,  # largest magnitude of its inputs, with NVFP4 and rounded inputs
) -> list[Tensor]:
    """Return the tensors of a matrix, in the order of `stored_headers`."""
    coded = encode(matrix, rounding, peak)
    if layout_of(rounding) == PACKED_INTEGERS:
        return [_pack_integers(coded.codes, rounding.kind.bits), coded.scales, torch.tensor(matrix.shape)]
    match rounding.format:
        case "int8":
            return [coded.codes.to(torch.int8), coded.scales]
        case "fp8" | "fp8-block":
            return [coded.codes.to(torch.float8_e4m3fn), coded.scales]
        case "mxfp4":
            return [_pack_e2m1(coded.codes), (coded.scales + 127).to(torch.uint8)]
    assert peak is not None, "NVFP4 has a scale of the matrix"
    found = [_pack_e2m1(coded.codes), coded.scales, tensor_scale(peak)]
    return found + ([tensor_scale(torch.tensor([input_peak]))] if rounding.inputs else [])


def _pack_integers(codes: Tensor, bits: int) -> Tensor:
    parts = (codes.to(torch.int64) + 2 ** (bits - 1)).unflatten(-1, (-1, WORD // bits))
    words = (parts << (bits * torch.arange(WORD // bits))).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _pack_e2m1(numbers: Tensor) -> Tensor:
    pairs = e2m1_codes(numbers).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def numbers_of(codes: Tensor, rounding: Rounding) -> Tensor:
    """Return the numbers of stored codes [rows, n] in fp32, `elements_of_code` times as many in a row."""
    bits = rounding.kind.bits
    if layout_of(rounding) == PACKED_INTEGERS:
        shifts = bits * torch.arange(WORD // bits, dtype=torch.int32)
        parts = (codes[..., None] >> shifts) & (2**bits - 1)
        return (parts - 2 ** (bits - 1)).flatten(-2).float()
    return unpack_e2m1(codes) if bits == 4 else codes.float()


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [.., n] -> fp32 [.., 2 n], numbers of E2M1."""
    return e2m1_numbers(torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2))


def quantisation_config(rounding: Rounding, ignored: list[str]) -> dict[str, Any]:
    """Return the entry `quantization_config` of config.json. `ignored` modules are not quantised."""
    group: dict[str, Any] = {"targets": ["Linear"], "weights": _weights(rounding)}
    group |= {"input_activations": _inputs(rounding), "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout_of(rounding),
        "quantization_status": "compressed",
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
    }


def _arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    given = dict(num_bits=bits, type=kind, symmetric=True, strategy=strategy, dynamic=False)
    return given | more


def _weights(rounding: Rounding) -> dict[str, Any]:
    match rounding.format:
        case "int4":
            return _arguments(4, "int", "group", group_size=rounding.group)
        case "int8":
            return _arguments(8, "int", "channel")
        case "fp8":
            return _arguments(8, "float", "channel")
        case "fp8-block":
            return _arguments(8, "float", "block", block_structure=[rounding.kind.block_rows, rounding.group])
        case "mxfp4":
            return _fp4(rounding, "group", "torch.uint8")
    return _fp4(rounding, "tensor_group", "torch.float8_e4m3fn")


def _fp4(rounding: Rounding, strategy: str, scales: str, **more: Any) -> dict[str, Any]:
    sizes = dict(group_size=rounding.group, scale_dtype=scales, zp_dtype=scales)
    return _arguments(4, "float", strategy, **sizes, **more)


def _inputs(rounding: Rounding) -> dict[str, Any] | None:
    if not rounding.inputs:
        return None
    if rounding.format == "nvfp4":
        return _fp4(rounding, "tensor_group", "torch.float8_e4m3fn", dynamic="local")
    kind = {"int8": "int", "fp8": "float"}[rounding.format]
    return _arguments(8, kind, "token", dynamic=True)
