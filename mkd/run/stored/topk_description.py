"""The description of a cache of a teacher's predictions, and whether another cache is in the way."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from mkd.config.models import EXPORTED
from mkd.config.schema import Config
from mkd.data.images.conversation import ConversationImages
from mkd.data.stored.teacher_topk import CHAT_DATE, META_FILE, UNKNOWN_PRECISION, TopKMeta
from mkd.errors import DataError
from mkd.human import counted
from mkd.kinds.placed.known_places import PRECISIONS
from mkd.kinds.stored.stored_setup import IMAGE_PROCESSOR, data_settings, temperature_of, weights_fingerprint
from mkd.resolve.preflight import require_same_tokenizer
from mkd.run.one_model import ModelPlan
from mkd.tokenizers.tokenizer import Tokenizer

SHARD = re.compile(r"(train|valid)-\d{5,}\.parquet")
KEYS_OF_ALL_VERSIONS = {"format_version", "weights_fingerprint", "vocabulary_fingerprint", "parts"}


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export besides those of the run."""

    out: Path
    k: int
    logprob_dtype: str  # float16 or float32
    samples_per_shard: int
    overwrite: bool = False  # another cache in `out` may be replaced


@dataclass(frozen=True)
class ExportPlan:
    """A teacher that runs alone, with the tokenizer of the run and its reader of images."""

    teacher: ModelPlan
    tokenizer: Tokenizer
    images: ConversationImages | None = None  # reads the images of conversations; None: the models read none

    @property
    def config(self) -> Config:
        """Settings of the run."""
        return self.teacher.config


def _description(
    plan: ExportPlan, settings: ExportSettings, vocab_size: int, parts: dict[str, int]
) -> TopKMeta:
    source, tokenizer = plan.teacher.source, plan.tokenizer
    data = data_settings(plan.config)
    data.pop(CHAT_DATE, None)
    if tokenizer.chat_date is not None:
        data[CHAT_DATE] = tokenizer.chat_date
    if plan.images is not None:
        data[IMAGE_PROCESSOR] = plan.images.processor.fingerprint
    return TopKMeta(
        k=settings.k,
        temperature=temperature_of(plan.config),
        logprob_dtype=settings.logprob_dtype,
        vocab_size=vocab_size,
        teacher=str(source.load or source.assets),
        weights_fingerprint=weights_fingerprint(source),
        vocabulary_fingerprint=tokenizer.vocabulary_fingerprint,
        data=data,
        parts=parts,
        samples_per_shard=settings.samples_per_shard,
        precision=PRECISIONS.of(plan.config.teachers[EXPORTED]).label(plan.config.training.bf16),
    )


def write_description(
    plan: ExportPlan, settings: ExportSettings, vocab_size: int, parts: dict[str, int]
) -> TopKMeta:
    """Write and return the description of the cache. With --overwrite, remove another cache first.

    Raises DataError if the folder holds another one without --overwrite, or files that are not a cache.
    """
    require_same_tokenizer(plan.tokenizer, plan.teacher.source)
    out, meta = settings.out, _description(plan, settings, vocab_size, parts)
    try:
        if (out / META_FILE).exists():
            meta = _as_found(out, meta)
        else:
            _require_no_shards(out)
    except DataError:
        if not (settings.overwrite and _holds_cache(out)):
            raise
        for path in _shards(out):
            path.unlink()
    meta.write(out)
    return meta


def require_room(plan: ExportPlan, settings: ExportSettings, vocab_size: int) -> bool:
    """Return True if --overwrite will replace the cache in the folder, before the data are read.

    Only then may a cache of other data be found. Raises DataError as `write_description`.
    """
    out = settings.out
    try:
        if (out / META_FILE).exists():
            _as_found(out, _description(plan, settings, vocab_size, _found(out).parts))
        else:
            _require_no_shards(out)
    except DataError as error:
        if settings.overwrite and _holds_cache(out):
            return True
        error.on_all_ranks = True
        raise
    return False


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


def _found(out: Path) -> TopKMeta:
    """Return the description of the cache in `out`. Raises DataError if it cannot be read."""
    try:
        return TopKMeta.read(out)
    except DataError as error:
        what = f"{out / META_FILE} cannot be read as the description of a teacher cache"
        do = "choose another --out, or remove the files in it yourself if nobody needs them"
        if _holds_cache(out):
            do = "choose another --out, or give --overwrite to replace the cache"
        raise DataError(what, error.why, do, code="teacher-cache-in-the-way") from error


def _as_found(out: Path, meta: TopKMeta) -> TopKMeta:
    """Return `meta` with the precision of the cache in `out`. Raises DataError if that is another cache."""
    found = _found(out)
    if found.precision == UNKNOWN_PRECISION and not meta.is_rounded:
        meta = replace(meta, precision=UNKNOWN_PRECISION)  # of the shards that are there
    compared = (name for name in vars(meta) if name != "teacher")
    differing = [name for name in compared if getattr(found, name) != getattr(meta, name)]
    if differing:
        what = f"{out} holds another teacher cache: {', '.join(differing)} differ"
        why = "an export resumes only with the same teacher, data and settings"
        do = "choose another --out, or give --overwrite to replace the cache"
        raise DataError(what, why, do, code="teacher-cache-in-the-way")
    return meta
