"""Find the files of one model, and read its shape and tensor headers without its weights."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mkd.checkpoint.adapters import hf_base_fingerprint, require_whole_model, samples_fingerprint
from mkd.checkpoint.folders import HF_FOLDER, find_weights, require_same_model
from mkd.checkpoint.hf.hf_carried import carried_bytes
from mkd.checkpoint.hf.hf_check import check_hf_checkpoint
from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.rounded_runs import require_exact_model
from mkd.config.schema import StudentConfig, TeacherConfig
from mkd.errors import MkdError
from mkd.plan.models.model_shape import ModelShape

END_BYTES = 1 << 20  # read at the beginning and the end of a large file
HEADER_LENGTH = struct.Struct("<Q")  # of a safetensors file
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class ModelSource:
    """Shape, small files and weights of one model on disk."""

    shape: ModelShape
    assets: Path  # folder with config.json and, usually, tokenizer files
    hf: HFCheckpoint | None  # weights in a Hugging Face folder; None: they are in `load`
    load: Path | None  # Megatron checkpoint folder with the weights; None: they are in `hf`

    def weight_files(self, pattern: str = "*") -> list[Path]:
        """Return config.json and the files of the weights; in a Megatron folder, those of `pattern`."""
        if self.hf is None:
            assert self.load is not None, "the weights are in one of the two"
            files = sorted(path for path in self.load.glob(pattern) if path.is_file())
        else:
            names = {header.file for header in (*self.hf.headers.values(), *self.hf.tower.values())}
            files = [self.hf.directory / name for name in sorted(names)]
        return [self.assets / "config.json", *files]

    @cached_property
    def carried_bytes(self) -> int:
        """Bytes that an export copies as they are. Raises `CheckpointError`s, see `find_carried`."""
        return carried_bytes(self.shape, self.assets)

    def ends_fingerprint(self) -> str:
        """Return the `ends_fingerprint` of its files."""
        return ends_fingerprint(self.weight_files())

    def base_fingerprint(self) -> str:
        """Return what identifies its weights, for adapters that change them."""
        return samples_fingerprint(self.weight_files()) if self.hf is None else hf_base_fingerprint(self.hf)


def locate_model(
    problems: list[MkdError], role: str, source: StudentConfig | TeacherConfig
) -> ModelSource | None:
    """Return the model of `source`; None if it names none, or after adding an error to `problems`."""
    if not (source.hf or source.load):
        return None
    try:
        if source.load is None:
            assert source.hf is not None, "it names a model"
            folder = resolve_hf(source.hf)
            shape, checkpoint = ModelShape.from_hf_dir(folder), HFCheckpoint(folder)
            check_hf_checkpoint(shape, checkpoint)
            return ModelSource(shape, folder, checkpoint, None)
        folder = find_weights(role, source)
        require_whole_model(folder)
        if isinstance(source, TeacherConfig):
            require_exact_model(folder)
        assets = resolve_hf(source.hf) if source.hf else folder / HF_FOLDER
        shape = ModelShape.from_hf_dir(assets)
        require_same_model(folder, shape)
        return ModelSource(shape, assets, None, folder)
    except MkdError as error:
        problems.append(error)
        return None


def ends_fingerprint(files: Iterable[Path]) -> str:
    """Return `ends-sha256:...` over name, size, safetensors header, first and last MiB of each file.

    This is cheap, but misses a change in the middle of a file that keeps its size.
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
