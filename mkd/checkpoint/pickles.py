"""Check the pickles in a `torch_dist` checkpoint before Megatron loads them: none may run code.

torch unpickles `.metadata`, a plain pickle, and the byte entries of the shards, `torch.save` files, without
limits. This check first reads both with an allow-list and refuses everything else by name.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from mkd.checkpoint.folders import COMMON_FILE, MEGATRON_FILE
from mkd.checkpoint.shards import METADATA_FILE
from mkd.errors import CheckpointError, first_line

ANOTHER = "choose another checkpoint with --ckpt-step N"
DISTRUST = "do not use this checkpoint unless you know who made it"
_DCP = "torch.distributed.checkpoint"
ALLOWED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        f"{_DCP}.metadata": frozenset(
            {
                *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
                *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            }
        ),
        f"{_DCP}.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
        f"{_DCP}.planner": frozenset({"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"}),
        "torch": frozenset(
            {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
        ),
        "torch.serialization": frozenset({"_get_layout"}),
        "collections": frozenset({"OrderedDict"}),
        "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath"}),
    }
)
"""Module -> names that `.metadata` may contain: data classes, and functions that only look something up."""


class _Refused(Exception):
    """A pickle asked for a name that is not allowed."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # members of an Enum, from Python before 3.11.4
            return _member
        if name not in ALLOWED.get(module, frozenset()):
            raise _Refused(f"{module}.{name}")
        return getattr(importlib.import_module(module), name)

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused(f"persistent object {pid!r}")


def _member(of: Any, name: str) -> Enum:
    """Return a member of an Enum, which is the only attribute that a pickle may ask for."""
    if not (isinstance(of, type) and issubclass(of, Enum) and name in of.__members__):
        raise _Refused("builtins.getattr")
    return of[name]


def refuse_code(folder: Path) -> None:
    """Raise CheckpointError if a pickle is damaged or holds more than plain data. Runs no code."""
    register_safe_globals()
    if not (folder / MEGATRON_FILE).is_file():
        what, why = f"{folder / MEGATRON_FILE} is missing", "it says what kind of checkpoint this is"
        raise CheckpointError(what, why, ANOTHER, code="checkpoint-damaged")
    metadata = read_metadata(folder)
    _check_torch_file(folder / COMMON_FILE, None)
    entries = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    if not (isinstance(metadata, Metadata) and isinstance(entries, dict) and isinstance(places, dict)):
        what, why = f"{folder / METADATA_FILE} is damaged", "it does not describe a checkpoint"
        raise CheckpointError(what, why, ANOTHER, code="checkpoint-damaged")
    for index, place in places.items():
        if isinstance(entries.get(index.fqn), BytesStorageMetadata):
            if Path(place.relative_path).name != place.relative_path:
                what = f"{folder / METADATA_FILE} sends {index.fqn} to {place.relative_path!r}"
                why = "it must be the plain name of a file in the same folder"
                raise CheckpointError(what, why, DISTRUST, code="untrusted-files")
            _check_torch_file(folder / place.relative_path, (place.offset, place.length))


def read_metadata(folder: Path) -> Metadata:
    """Return `.metadata` of a checkpoint, unpickled with the allow-list."""
    path = folder / METADATA_FILE
    try:
        with open(path, "rb") as file:
            return _MetadataUnpickler(file).load()
    except _Refused as refused:
        raise _refusal(path, str(refused)) from None
    except Exception as error:  # the type depends on where the pickle is damaged
        raise _damage(path, error) from error


def _check_torch_file(path: Path, part: tuple[int, int] | None) -> None:
    """Read a `torch.save` file, or (offset, length) of one, with torch's own allow-list of harmless types."""
    try:
        with open(path, "rb") as file:
            file.seek(part[0] if part else 0)
            content = io.BytesIO(file.read(part[1] if part else -1))
        torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        text = str(error)
        marks = ("Unsupported global: GLOBAL ", "unsupported GLOBAL ", "Unsupported class ", "callable ")
        name = next((text.split(mark, 1)[1].split()[0] for mark in marks if mark in text), None)
        raise (_refusal(path, name) if name else _damage(path, error)) from None
    except Exception as error:
        raise _damage(path, error) from error


def _refusal(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds {name}, which is not data of a checkpoint",
        "loading it could run code that is hidden in the file; nothing of it was run",
        DISTRUST,
        code="untrusted-files",
    )


def _damage(path: Path, error: Exception) -> CheckpointError:
    what, why = f"{path} cannot be read: {first_line(error)}", "the file is missing or damaged"
    return CheckpointError(what, why, ANOTHER, code="checkpoint-damaged")
