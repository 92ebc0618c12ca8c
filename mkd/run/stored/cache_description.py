"""The description of a cache of a teacher's outputs, and whether another cache is in the way."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mkd.config.models import EXPORTED
from mkd.config.schema import Config
from mkd.data.images.conversation import ConversationImages
from mkd.data.stored.cache_meta import (
    CHAT_DATE,
    META_FILE,
    UNKNOWN_PRECISION,
    CacheMeta,
    HiddenMeta,
    read_description,
)
from mkd.data.stored.teacher_hidden import HEAD_FILE
from mkd.errors import DataError
from mkd.human import counted
from mkd.kinds.placed.known_places import PRECISIONS
from mkd.kinds.stored.cache_setup import IMAGE_PROCESSOR, data_settings, weights_fingerprint
from mkd.resolve.preflight import Tokenizers, require_same_tokenizer
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.run.one_model import ModelPlan
from mkd.tokenizers.tokenizer import Tokenizer

SHARD = re.compile(r"(train|valid)-\d{5,}\.parquet")
NOT_COMPARED = ("teacher", "head_sha256", "export_id")  # a text for people, and what the export writes
KEYS_OF_ALL_VERSIONS = {"format_version", "weights_fingerprint", "vocabulary_fingerprint", "parts"}


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export besides those of the run."""

    out: Path
    samples_per_shard: int
    overwrite: bool = False  # another cache in `out` may be replaced


@dataclass(frozen=True)
class ExportPlan:
    """A teacher that runs alone, with the tokenizers of the run and its reader of images."""

    teacher: ModelPlan
    tokenizers: Tokenizers
    beside: tuple[TeacherSetup, ...] = ()  # teachers of the run that may refuse documents

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the student."""
        return self.tokenizers.student

    @property
    def images(self) -> ConversationImages | None:
        """Reader of the images of conversations; None if the models read none."""
        return self.tokenizers.images

    @property
    def config(self) -> Config:
        """Settings of the run."""
        return self.teacher.config


def common_description(plan: ExportPlan, settings: ExportSettings, parts: dict[str, int]) -> dict[str, Any]:
    """Return the fields of a description that all kinds of caches have, without the vocabulary."""
    source, tokenizer = plan.teacher.source, plan.tokenizer
    data = data_settings(plan.config)
    data.pop(CHAT_DATE, None)
    if tokenizer.chat_date is not None:
        data[CHAT_DATE] = tokenizer.chat_date
    if plan.images is not None:
        data[IMAGE_PROCESSOR] = plan.images.processor.fingerprint
    return dict(
        teacher=str(source.load or source.assets),
        weights_fingerprint=weights_fingerprint(source),
        vocabulary_fingerprint=tokenizer.vocabulary_fingerprint,
        data=data,
        parts=parts,
        samples_per_shard=settings.samples_per_shard,
        precision=PRECISIONS.of(plan.config.teachers[EXPORTED]).label(plan.config.training.bf16),
    )


def write_description(plan: ExportPlan, settings: ExportSettings, meta: CacheMeta) -> CacheMeta:
    """Write `meta` and return the description of the cache. With --overwrite, remove another cache first.

    Raises DataError if the folder holds another one without --overwrite, or files that are not a cache.
    """
    require_same_tokenizer(plan.tokenizer, plan.teacher.source)
    out = settings.out
    try:
        if (out / META_FILE).exists():
            meta = _as_found(out, meta)
        else:
            _require_no_shards(out)
            meta = replace(meta, export_id=_export_id(meta))
    except DataError:
        if not (settings.overwrite and _holds_cache(out)):
            raise
        for path in (*_shards(out), out / HEAD_FILE):
            path.unlink(missing_ok=True)
        meta = replace(meta, export_id=_export_id(meta))
    meta.write(out)
    return meta


def require_room(settings: ExportSettings, describe: Callable[[dict[str, int]], CacheMeta]) -> bool:
    """Return True if --overwrite will replace the cache in the folder, before the data are read.

    Only then may a cache of other data be found. `describe` makes the description for a number of packs of
    each data set. Raises DataError as `write_description`.
    """
    out = settings.out
    try:
        if (out / META_FILE).exists():
            _as_found(out, describe(_found(out).parts))
        else:
            _require_no_shards(out)
    except DataError as error:
        if settings.overwrite and _holds_cache(out):
            return True
        error.on_all_ranks = True
        raise
    return False


def _export_id(meta: CacheMeta) -> str:
    """Return a hash of everything that decides what the shards hold."""
    compared = {name: value for name, value in asdict(meta).items() if name not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


def _shards(out: Path) -> list[Path]:
    return [path for path in out.glob("*.parquet") if SHARD.fullmatch(path.name)]


def _holds_cache(out: Path) -> bool:
    """Return True if `out` has the description of a cache, of any version. Nothing else may be replaced."""
    try:
        found = json.loads((out / META_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.keys() >= KEYS_OF_ALL_VERSIONS


def _require_no_shards(out: Path) -> None:
    """Raise DataError if a folder without a description holds files with the names of shards."""
    if shards := _shards(out):
        what = f"{out} holds {counted(len(shards), 'file')} such as {min(shards).name}, and no {META_FILE}"
        why = f"an export writes files of these names, and only {META_FILE} tells that they are a cache"
        do = "choose another --out, or remove these files if nobody needs them"
        raise DataError(what, why, do, code="teacher-cache-in-the-way")


def _found(out: Path) -> CacheMeta:
    """Return the description of the cache in `out`. Raises DataError if it cannot be read."""
    try:
        return read_description(out)
    except DataError as error:
        what = f"{out / META_FILE} cannot be read as the description of a teacher cache"
        do = "choose another --out, or remove the files in it yourself if nobody needs them"
        if _holds_cache(out):
            do = "choose another --out, or give --overwrite to replace the cache"
        raise DataError(what, error.why, do, code="teacher-cache-in-the-way") from error


def _as_found(out: Path, meta: CacheMeta) -> CacheMeta:
    """Return `meta` with what the cache in `out` has. Raises DataError if that is another cache."""
    found = _found(out)
    meta = replace(meta, export_id=found.export_id)
    if found.precision == UNKNOWN_PRECISION and not meta.is_rounded:
        meta = replace(meta, precision=UNKNOWN_PRECISION)  # of the shards that are there
    compared = (field.name for field in fields(meta) if field.name not in NOT_COMPARED)
    differing = [name for name in compared if getattr(found, name, None) != getattr(meta, name)]
    if type(found) is not type(meta):
        differing = [f"it holds {found.contents}; its settings"]
    if differing:
        what = f"{out} holds another teacher cache: {', '.join(differing)} differ"
        why = "an export resumes only with the same teacher, data and settings"
        do = "choose another --out, or give --overwrite to replace the cache"
        raise DataError(what, why, do, code="teacher-cache-in-the-way")
    if isinstance(meta, HiddenMeta) and isinstance(found, HiddenMeta):
        meta = replace(meta, head_sha256=found.head_sha256)
    return meta
