"""Safetensors shards of an exported model: planned from shapes, then written one tensor at a time.

The format (https://huggingface.co/docs/safetensors) is a little-endian uint64 header length, a JSON header
with the offsets of every tensor, and the data in that order. Offsets follow from the plan, so that neither a
shard nor the model is ever in memory. Files are created with the user's umask.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.checkpoint.hf.hf_names import hf_tensor_shapes
from mkd.checkpoint.hf.hf_reader import INDEX_FILE, SINGLE_FILE
from mkd.checkpoint.hf.hf_tower import DiskNames
from mkd.errors import UsageError
from mkd.families.weight_rules import KEPT_IN_FP32, SCALARS
from mkd.plan.models.model_shape import ModelShape

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # of trained weights
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Spelling of safetensors -> dtype of a tensor that is copied."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
NO_TOWER: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class CarriedTensor(NamedTuple):
    """A tensor that an export copies from another folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]  # the whole tensor, on the CPU
    copy_of: str = ""  # the trained tensor that is written in its place, in this dtype; "": none


NO_CARRIED: Mapping[str, CarriedTensor] = MappingProxyType({})
Headers = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape and dtype


def _as_it_is(name: str, full: tuple[int, ...]) -> Headers:
    return {}


@dataclass(frozen=True)
class Shard:
    """One file: its name and its tensors (name -> shape) in order."""

    file: str
    tensors: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ExportPlan:
    """The files of an export and their tensors; the same for every parallel layout."""

    dtype: torch.dtype
    shards: tuple[Shard, ...]  # with our names
    on_disk: Callable[[str], str]  # our name of a tensor -> its name in the files
    carried: Mapping[str, CarriedTensor]  # tensors that are copied, behind all others
    sources: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # the model's own: name -> full shape
    encoded: Mapping[str, torch.dtype] = field(default_factory=dict)  # tensors that hold codes or scales

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the files."""
        if name in self.carried:
            return self.carried[name].dtype
        return self.encoded[name] if name in self.encoded else stored_dtype(name, self.dtype)

    def num_bytes(self, name: str, full: tuple[int, ...]) -> int:
        """Return the size of a tensor of this shape in the files."""
        return math.prod(full) * self.dtype_of(name).itemsize

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes(name, full) for name, full in self.tensors())

    @property
    def last_file(self) -> str:
        """The file whose appearance makes the export visible to readers."""
        return SINGLE_FILE if len(self.shards) == 1 else INDEX_FILE

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, full shape) in the order in which `write_shards` wants them."""
        for shard in self.shards:
            yield from shard.tensors.items()

    def index(self) -> str:
        """Return the text of the index file."""
        weight_map = {name: shard.file for shard in self.shards for name in map(self.on_disk, shard.tensors)}
        metadata = {"total_size": self.total_bytes}
        content = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        return json.dumps(content, indent=2) + "\n"


def export_plan(
    shape: ModelShape,
    dtype: torch.dtype,
    max_shard_bytes: int = 5_000_000_000,
    tower: Mapping[str, tuple[int, ...]] = NO_TOWER,  # our name -> shape, behind the text tensors
    carried: Mapping[str, CarriedTensor] = NO_CARRIED,
    headers: Callable[[str, tuple[int, ...]], Headers] = _as_it_is,  # what is stored of a tensor; {}: itself
) -> ExportPlan:
    """Cut the tensors, in order, into files of at most `max_shard_bytes`; a larger one has its own file."""
    if dtype not in DTYPE_NAMES:
        do = f"use one of {', '.join(str(known).removeprefix('torch.') for known in DTYPE_NAMES)}"
        why = "Hugging Face weights are floating point"
        raise UsageError(f"cannot export {dtype}", why, do, code="value-unknown")
    sources = hf_tensor_shapes(shape) | dict(tower)
    tensors: dict[str, tuple[int, ...]] = {}
    encoded: dict[str, torch.dtype] = {}
    for source, full in sources.items():
        stored = headers(source, full)
        tensors |= {name: sizes for name, (sizes, _) in stored.items()} or {source: full}
        encoded |= {name: own for name, (_, own) in stored.items()}
    tensors |= {name: one.shape for name, one in carried.items()}
    plan = ExportPlan(dtype, (), DiskNames.of_shape(shape).on_disk, carried, sources, encoded)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, full in tensors.items():
        size = plan.num_bytes(name, full)
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = full
        filled += size
    if len(groups) == 1:
        return replace(plan, shards=(Shard(SINGLE_FILE, groups[0]),))
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    shards = tuple(Shard(name, group) for name, group in zip(names, groups, strict=True))
    return replace(plan, shards=shards)


def write_shards(plan: ExportPlan, tensors: Iterable[Tensor], folder: Path) -> None:
    """Write all shards; `tensors` are on the CPU, in the plan's order and dtype."""
    stream = iter(tensors)
    for shard in plan.shards:
        with open(folder / shard.file, "wb") as file:
            file.write(_header(shard, plan))
            for name, full in shard.tensors.items():
                tensor = next(stream)
                assert tuple(tensor.shape) == full and tensor.dtype == plan.dtype_of(name), name
                file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())


def _header(shard: Shard, plan: ExportPlan) -> bytes:
    """Return header length and header, padded with spaces so that the data is aligned to 8 bytes."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, full in shard.tensors.items():
        end = offset + plan.num_bytes(name, full)
        stored = NAMES[plan.dtype_of(name)]
        sizes = [] if name.endswith(SCALARS) else list(full)
        header[plan.on_disk(name)] = {"dtype": stored, "shape": sizes, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype on disk of a tensor of a model in `dtype`; biases of expert choice stay in fp32."""
    return torch.float32 if name.endswith(KEPT_IN_FP32) else dtype
