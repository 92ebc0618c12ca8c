"""What decides the training of a run besides its weights, by name: saved with every checkpoint, compared at --load."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mkd.config.options import settings
from mkd.config.schema import Config
from mkd.data.sources import parse_blend
from mkd.data.store import StoreFiles, TokenStore
from mkd.errors import CheckpointError
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.train.model_source import ModelSource
from mkd.train.plan import Plan

END_BYTES = 1 << 20  # read at the beginning and at the end of a large file
HEADER_LENGTH = struct.Struct("<Q")  # of a safetensors file
MAX_HEADER_BYTES = 100 << 20
NOT_LOSS = frozenset({"kd_fused_head", "kd_fp32_logits"})  # how it is computed
NOT_OF_TEACHER = frozenset({"hf", "load", "topk", "pipeline_layout", "residency"})  # where it lies and runs


def fingerprints(plan: Plan, tokenizer: Tokenizer, train_set) -> dict[str, object]:
    """Name -> value (JSON), of teachers, tokenizer, data and loss. Reads a few MiB of every weight file.

    A stored teacher's rows are compared with the data pack by pack, which says more than the sizes of its files.
    """
    stores = [] if plan.stored_teacher else [member.store for member in train_set.members]
    found = {f"teacher.{name}": _weights(source) for name, source in zip(plan.teacher_names, plan.teachers, strict=False)}
    if plan.stored_teacher is not None:
        found |= {f"teacher.{name}": plan.stored_teacher.meta.weights_fingerprint for name in plan.teacher_names}
    found["tokenizer"] = tokenizer.fingerprint
    found["data.files"] = _sha256([_corpus(store) for store in stores])
    return json.loads(json.dumps(found | dict(_data(plan.config)) | dict(_loss(plan.config))))  # as it comes back


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


def _weights(source: ModelSource) -> str:
    if source.hf is None:
        files = sorted(path for path in source.load.iterdir() if path.is_file())
    else:
        files = [source.hf.directory / name for name in sorted({header.file for header in source.hf.headers.values()})]
    return ends_fingerprint([source.assets / "config.json", *files])


def _corpus(store: TokenStore) -> dict:
    """Sizes of the files, and what its description says of the contents; where it came from may change."""
    files = StoreFiles(store.prefix)
    sizes = [path.stat().st_size for path in (files.bin, files.idx, files.loss_mask) if path.exists()]
    return {"sizes": sizes, "meta": {name: value for name, value in store.meta.items() if name != "sources"}}


def _data(config: Config) -> Iterator[tuple[str, object]]:
    """The settings that decide the order of samples."""
    values = {"seq_length": config.training.seq_length, "seed": config.training.seed}
    values["weights"] = parse_blend(config.data.data_path).weights
    values |= {name: getattr(config.data, name) for name in ("split", "pack", "overlong", "append_eod", "shuffle")}
    for name, value in values.items():
        yield f"data.{name}", value


def _loss(config: Config) -> Iterator[tuple[str, object]]:
    for option, value in settings(config):
        if option.path.startswith("kd.") and option.field not in NOT_LOSS:
            yield f"loss.{option.field}", value
        elif option.path.startswith("teachers[") and option.field not in NOT_OF_TEACHER:
            yield f"loss.{option.path}", value


def _sha256(content: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _difference(name: str, saved: Mapping[str, object], current: Mapping[str, object]) -> str:
    return f"{name} ({_short(saved.get(name))} then, {_short(current.get(name))} now)"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    kind, colon, digest = text.rpartition(":")
    return kind + colon + digest[:12] if len(digest) == 64 else text
