"""The descriptions of caches of a teacher's outputs: `meta.json` of a folder. Needs no torch.

A cache is a folder: `meta.json`, and for each data set (`train`, `valid`) shards `train-00000.parquet`, ...
of `samples_per_shard` packs. `mkd topk` writes predictions, `mkd hidden` hidden states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mkd.errors import DataError
from mkd.plan.models.model_shape import ModelShape

FORMAT_VERSION = 2  # pages with checksums
META_FILE = "meta.json"
# Size of the packs that are read together: small, because shuffled packs are read one by one.
GROUP_BYTES = 1 << 20
CHAT_DATE = "chat_date"  # in `CacheMeta.data`; absent if no template wrote it, and in earlier exports
UNKNOWN_PRECISION = "fp32 or bf16"  # of a cache of version 0.1.0, which does not say
KIND = "kind"  # key of the description; absent: top-k predictions
M = TypeVar("M", bound="CacheMeta")
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # of a number


@dataclass(frozen=True, kw_only=True)
class CacheMeta:
    """The description of a cache: its contents, and the settings that a run must share to train from it."""

    vocab_size: int  # number of ids that the teacher's probabilities are over
    teacher: str  # place of its weights, for people
    weights_fingerprint: str  # SHA-256 over config and weights
    vocabulary_fingerprint: str  # `Tokenizer.vocabulary_fingerprint`
    data: dict[str, Any]  # the settings that decide which tokens make a pack
    parts: dict[str, int]  # data set -> packs
    samples_per_shard: int
    format_version: int = field(default=FORMAT_VERSION)
    precision: str = UNKNOWN_PRECISION  # of the teacher's products: fp32, bf16, or fp8 and its recipe
    export_id: str = ""  # every shard repeats it; empty in exports of version 0.1.0

    command: ClassVar[str]  # that writes such a cache
    flag: ClassVar[str]  # that trains from it
    contents: ClassVar[str]  # of it, for people

    @property
    def row_bytes(self) -> int:
        """Size of what is stored of a loss position."""
        raise NotImplementedError

    @property
    def least_bytes(self) -> int:
        """Size of a loss position on the disk, at least; 0 if it depends on the numbers."""
        return 0

    @property
    def is_rounded(self) -> bool:
        """True if the teacher's layers multiplied in a lower precision than its weights have."""
        return self.precision not in ("fp32", "bf16", UNKNOWN_PRECISION)

    @property
    def chat_date(self) -> str | None:
        """Date that the chat template wrote; None if it wrote none, or the export does not say."""
        date = self.data.get(CHAT_DATE)
        return date if isinstance(date, str) else None

    @classmethod
    def read(cls: type[M], folder: Path) -> M:
        """Return the description in `folder`. Raises DataError if there is no readable cache of this kind."""
        found = read_description(folder)
        if not isinstance(found, cls):
            what = f"{folder} holds {found.contents} of a teacher, not {cls.contents}"
            why = f"it was written by `{found.command}`"
            do = f"train from it with {found.flag}, or name the --out folder of `{cls.command}`"
            raise DataError(what, why, do, code="teacher-cache-not-found")
        return found

    def write(self, folder: Path) -> None:
        """Write the description, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / (META_FILE + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / META_FILE)

    def shard_path(self, folder: Path, part: str, shard: int) -> Path:
        return folder / f"{part}-{shard:05d}.parquet"

    def num_shards(self, part: str) -> int:
        return -(-self.parts[part] // self.samples_per_shard)

    def shard_samples(self, part: str, shard: int) -> range:
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.parts[part]))

    def missing_shards(self, folder: Path, part: str) -> list[int]:
        return [i for i in range(self.num_shards(part)) if not self.shard_path(folder, part, i).is_file()]

    @property
    def samples_per_group(self) -> int:
        """Packs of a row group, from the largest size that a pack can have."""
        return max(1, GROUP_BYTES // (self.row_bytes * self.data["seq_length"]))


@dataclass(frozen=True, kw_only=True)
class TopKMeta(CacheMeta):
    """The description of the most probable ids and their log-probabilities."""

    k: int
    temperature: float
    logprob_dtype: str  # float16 or float32

    command: ClassVar[str] = "mkd topk"
    flag: ClassVar[str] = "--teacher-topk"
    contents: ClassVar[str] = "top-k predictions"

    @property
    def row_bytes(self) -> int:
        return self.k * (4 + BYTES[self.logprob_dtype]) + 12


@dataclass(frozen=True, kw_only=True)
class HiddenMeta(CacheMeta):
    """The description of final hidden states, from which the teacher's head makes its logits."""

    hidden_size: int
    states_dtype: str  # bfloat16 or float32, that of the run that exported
    config: dict[str, Any]  # the teacher's config.json
    head_sha256: str = ""  # of the file of the head; empty until that is written
    kind: str = "hidden"

    command: ClassVar[str] = "mkd hidden"
    flag: ClassVar[str] = "--teacher-hidden"
    contents: ClassVar[str] = "hidden states"

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * BYTES[self.states_dtype]

    @property
    def least_bytes(self) -> int:
        return self.row_bytes

    @cached_property
    def shape(self) -> ModelShape:
        """Shape of the teacher. Raises CheckpointError for one that this program does not know."""
        return ModelShape.from_hf_config(self.config, f"{META_FILE} of the teacher cache")

    def require_shape(self, folder: Path) -> None:
        """Raise DataError if the states are not as wide as the teacher's, CheckpointError as `shape`."""
        if (self.hidden_size, self.vocab_size) != (self.shape.hidden_size, self.shape.vocab_size):
            widths = f"{self.hidden_size} numbers, its teacher's of {self.shape.hidden_size}"
            what = f"{folder / META_FILE} describes states of {widths}"
            why = "the description has been changed"
            raise DataError(what, why, "export the cache again", code="teacher-cache-incomplete")


def read_description(folder: Path) -> CacheMeta:
    """Return the description in `folder`, of any kind. Raises DataError if there is no readable cache."""
    path = folder / META_FILE
    if not path.is_file():
        raise DataError(
            f"{folder} holds no teacher cache",
            f"there is no {META_FILE}",
            "name the --out folder of `mkd topk` or `mkd hidden`",
            code="teacher-cache-not-found",
        )
    try:
        return _described(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} does not describe a teacher cache",
            str(error),
            "export the cache again",
            code="teacher-cache-incomplete",
        ) from error


def _described(meta: Mapping[str, Any]) -> CacheMeta:
    """Return a description. Raises ValueError, KeyError or TypeError for what is none."""
    if meta["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"it has format version {meta['format_version']}, this program reads {FORMAT_VERSION}"
        )
    if not isinstance(meta["data"], dict) or not isinstance(meta["parts"], dict):
        raise ValueError("data and parts are not objects")
    kinds: dict[str | None, type[CacheMeta]] = {None: TopKMeta, "hidden": HiddenMeta}
    if meta.get(KIND) not in kinds:
        raise ValueError(f"this program does not know the kind {meta[KIND]!r}")
    cls = kinds[meta.get(KIND)]
    missing = {one.name for one in fields(cls) if one.name in ("config", "hidden_size")} - meta.keys()
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    return cls(**meta)
