"""What a run was trained on, in a few bytes each, saved with its checkpoints and compared when it goes on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mkd.errors import CheckpointError

END_BYTES = 1 << 20  # read at the beginning and at the end of a large file
HEADER_LENGTH = struct.Struct("<Q")  # of a safetensors file
MAX_HEADER_BYTES = 100 << 20


def ends_fingerprint(files: Iterable[Path]) -> str:
    """`ends-sha256:...` over name, size, safetensors header, first and last MiB of each file.

    Cheap, and so named: a change in the middle of a file that leaves its size is not seen.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with open(path, "rb") as file:
            first = END_BYTES
            if path.suffix == ".safetensors" and size >= HEADER_LENGTH.size:
                (length,) = HEADER_LENGTH.unpack(file.read(HEADER_LENGTH.size))
                first = max(first, HEADER_LENGTH.size + min(length, MAX_HEADER_BYTES))
            file.seek(0)
            digest.update(file.read(first))
            file.seek(max(first, size - END_BYTES))
            digest.update(file.read(END_BYTES))
    return f"ends-sha256:{digest.hexdigest()}"


def require_same(folder: Path, saved: Mapping[str, object], current: Mapping[str, object], accepted: Sequence[str]) -> None:
    """Raise CheckpointError, with every difference by name, unless all of them are accepted.

    Names have parts (`data.seq_length`); accepting `data` accepts all of its parts. A checkpoint without fingerprints, of
    an older version, is taken as it is.
    """
    if not saved:
        return
    changed = [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]
    refused = [name for name in changed if not any(name == one or name.startswith(one + ".") for one in accepted)]
    if refused:
        raise CheckpointError(
            f"{folder} was saved by a run with other " + ", ".join(_difference(name, saved, current) for name in refused),
            "going on would silently mix two different trainings",
            f"restore it, start anew with --student-load {folder}, or go on with --accept-change {' '.join(refused)}",
        )


def _difference(name: str, saved: Mapping[str, object], current: Mapping[str, object]) -> str:
    return f"{name} ({_short(saved.get(name))} then, {_short(current.get(name))} now)"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    kind, colon, digest = text.rpartition(":")
    return kind + colon + digest[:12] if len(digest) == 64 else text
