"""The description of a cache of a teacher's predictions, and whether another cache is in the way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mkd.config.schema import Config
from mkd.data.images.conversation import ConversationImages
from mkd.data.stored.teacher_topk import META_FILE, UNKNOWN_PRECISION, TopKMeta
from mkd.errors import DataError
from mkd.run.one_model import ModelPlan
from mkd.run.preflight import require_same_tokenizer
from mkd.run.stored_teacher import (
    CHAT_DATE,
    IMAGE_PROCESSOR,
    data_settings,
    temperature_of,
    weights_fingerprint,
)
from mkd.tokenizers.tokenizer import Tokenizer

TEACHER = 0  # number of the exported teacher
REPLACED = ("teacher-cache-not-described", "teacher-cache-of-another-run")  # problems that --overwrite solves


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


def _precision(config: Config) -> str:
    teacher = config.teachers[TEACHER]
    if teacher.precision == "fp8":
        return f"fp8 {teacher.fp8_recipe}"
    return "bf16" if config.training.bf16 else "fp32"


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
        precision=_precision(plan.config),
    )


def write_description(
    plan: ExportPlan, settings: ExportSettings, vocab_size: int, parts: dict[str, int]
) -> TopKMeta:
    """Write and return the description of the cache. With --overwrite, remove another cache first.

    Raises DataError if the folder holds another one without --overwrite.
    """
    require_same_tokenizer(plan.tokenizer, plan.teacher.source)
    out, meta = settings.out, _description(plan, settings, vocab_size, parts)
    try:
        if (out / META_FILE).exists():
            meta = _as_found(out, meta)
        else:
            _require_no_shards(out)
    except DataError as error:
        if not settings.overwrite or error.code not in REPLACED:
            raise
        for path in (out / META_FILE, *_shards(out)):
            path.unlink(missing_ok=True)
    meta.write(out)
    return meta


def require_room(plan: ExportPlan, settings: ExportSettings, vocab_size: int) -> None:
    """Raise DataError if the folder holds another cache, before data are read or weights loaded."""
    out = settings.out
    try:
        if (out / META_FILE).exists():
            parts = TopKMeta.read(out).parts
            if not settings.overwrite:
                _as_found(out, _description(plan, settings, vocab_size, parts))
        elif not settings.overwrite:
            _require_no_shards(out)
    except DataError as error:
        error.on_all_ranks = True
        raise


def _shards(out: Path) -> list[Path]:
    return list(out.glob("*-[0-9][0-9][0-9][0-9][0-9].parquet"))


def _require_no_shards(out: Path) -> None:
    """Raise DataError if a folder without a description holds shards."""
    if shards := _shards(out):
        what = f"{out} holds {len(shards)} shards of a teacher cache, and no {META_FILE}"
        do = "choose another --out, or give --overwrite to replace them"
        raise DataError(what, "they would be replaced", do, code="teacher-cache-not-described")


def _as_found(out: Path, meta: TopKMeta) -> TopKMeta:
    """Return `meta` with the precision as the cache in `out` states it. DataError if that is another one."""
    found = TopKMeta.read(out)
    if found.precision == UNKNOWN_PRECISION and not meta.is_fp8:
        meta = replace(meta, precision=UNKNOWN_PRECISION)  # of the shards that are there
    compared = (name for name in vars(meta) if name != "teacher")
    differing = [name for name in compared if getattr(found, name) != getattr(meta, name)]
    if differing:
        what = f"{out} holds another teacher cache: {', '.join(differing)} differ"
        why = "an export resumes only with the same teacher, data and settings"
        do = "choose another --out, or give --overwrite to replace the cache"
        raise DataError(what, why, do, code="teacher-cache-of-another-run")
    return meta
