"""The set-up of a stored teacher: whether the cache of --teacher-topk fits the run, and its rows.

Teacher, tokenizer, data and temperature must be those of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mkd.config.data_files import all_tokenised
from mkd.config.run_files import DataConfig, rule_for_conversations
from mkd.config.schema import Config
from mkd.data.dataset import BlendedDataset
from mkd.data.images.conversation import ConversationImages
from mkd.data.stored.teacher_topk import CHAT_DATE, TaughtDataset, TopKMeta, TopKPart, load_pyarrow
from mkd.errors import CheckpointError, DataError, MkdError, UsageError
from mkd.kinds.stored.stored_term import Stored
from mkd.parallel.context import ParallelContext
from mkd.plan.facts import RunFacts
from mkd.plan.parallel_sizes import Sizes
from mkd.resolve.model_source import ModelSource
from mkd.resolve.preflight import Tokenizers
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mkd.resolve.teacher_setup import DataSets

READ_BYTES = 1 << 22
OVERLONG_CONVERSATIONS = "overlong_conversations"  # absent in exports of earlier versions
DATA_FLAGS = {  # setting of `data_settings`: (its flag, its effect)
    "seq_length": ("--seq-length", "it is the length of a pack"),
    "pack": ("--pack", "it decides which documents share a pack"),
    "overlong": ("--overlong", "it decides how long documents are cut"),
    OVERLONG_CONVERSATIONS: ("--overlong-conversations", "it decides what is kept of long conversations"),
    "append_eod": ("--append-eod or --no-append-eod", "it decides whether documents end with EOS"),
    "document_multiple": (
        "--context-parallel-size",
        "documents are padded to multiples of 2 x --context-parallel-size (1 without context parallelism)",
    ),
    "max_patches_per_pack": ("--max-patches-per-pack", "it decides which documents with images share a pack"),
    "chat_loss": ("--chat-loss", "it decides which messages have loss"),
    "chat_template_kwargs": ("--chat-template-kwargs", "the chat template reads them"),
    CHAT_DATE: ("--chat-date", "the chat template writes it"),
}
STORED_K = "loss.stored_k"  # among the fingerprints of a run
IMAGE_PROCESSOR = "image_processor"  # entry beside `data_settings`, if the models read images


@dataclass(frozen=True)
class StoredSetup(TeacherSetup):
    """The cache that takes the place of a teacher. `source` is the model that it must come from, if given."""

    folder: Path
    meta: TopKMeta

    runs: ClassVar[bool] = False

    @classmethod
    def find(
        cls, problems: list[MkdError], facts: RunFacts, index: int, source: ModelSource | None
    ) -> StoredSetup | None:
        """Return the cache from its description; None after adding an error to `problems`."""
        config, settings = facts.config, facts.config.teachers[index]
        assert settings.topk is not None, "the teacher is of this kind"
        folder = Path(settings.topk)
        try:
            load_pyarrow()
            meta = TopKMeta.read(folder)
        except MkdError as error:
            problems.append(error)
            return None
        student_ids = None if facts.student is None else facts.student.vocab_size
        problems += _differences(folder, meta, config, student_ids)
        return cls(settings, index, facts.teacher_names[index], source, folder, meta)

    @property
    def card_note(self) -> str:
        return f"; exported with layers in {self.meta.precision}" if self.meta.is_rounded else ""

    def fingerprint(self) -> str:
        return self.meta.weights_fingerprint

    def fingerprints(self, config: Config, tokenizers: Tokenizers) -> Mapping[str, object]:
        found: dict[str, object] = {STORED_K: self.meta.k}
        if self.meta.is_rounded:  # else absent as in earlier versions
            found["loss.stored_precision"] = self.meta.precision
        return found

    def term(self, share: float, divergence: Mapping[str, Any]) -> Stored:
        return Stored(self.name, share, self.index, divergence)

    def attach(
        self, config: Config, tokenizers: Tokenizers, context: ParallelContext, sets: DataSets
    ) -> DataSets:
        """Return both data sets with the teacher's rows. Collective; raises the same error on every rank.

        Without evaluations there is no held-out set. Raises DataError for a cache of another tokenizer, image
        processor or other data, CheckpointError for one of other weights.
        """
        train_set, valid_set = sets[0], sets[1] if config.training.evaluates else None
        error = None
        if context.rank == 0:
            try:
                self._check(tokenizers.student, tokenizers.images)
                self._taught(train_set, valid_set)
            except MkdError as caught:
                error = caught
        error = context.broadcast_object(error)
        if error is not None:
            error.on_all_ranks = True
            raise error
        return self._taught(train_set, valid_set)

    def _taught(self, train_set: BlendedDataset | None, valid_set: BlendedDataset | None) -> DataSets:
        assert train_set is not None, "the student's own text has no stored teacher"
        train = TaughtDataset(train_set, TopKPart(self.folder, "train", self.meta))
        if valid_set is None:
            return train, None
        return train, TaughtDataset(valid_set, TopKPart(self.folder, "valid", self.meta))

    def _check(self, tokenizer: Tokenizer, images: ConversationImages | None) -> None:
        if self.meta.vocabulary_fingerprint != tokenizer.vocabulary_fingerprint:
            what = f"the teacher cache {self.folder} is of another tokenizer"
            why = "its ids stand for other strings than this run's"
            do = "export the cache with this run's tokenizer, or train with that of the export"
            raise DataError(what, why, do, code="teacher-cache-differs")
        seen = self.meta.data.get(IMAGE_PROCESSOR)
        if seen is not None and images is not None and seen != images.processor.fingerprint:
            what = f"the teacher cache {self.folder} is of another image processor or --max-image-side"
            why = "the student would see other pixels of an image than the teacher saw"
            do = "use the processor and the flag of the export, or export again into another folder"
            raise DataError(what, why, do, code="teacher-cache-differs")
        if self.source is not None and weights_fingerprint(self.source) != self.meta.weights_fingerprint:
            teacher = self.source.load or self.source.assets
            what = f"the teacher cache {self.folder} is of other weights than {teacher}"
            why = f"it was exported from {self.meta.teacher}, whose content differs"
            do = "export again from this teacher elsewhere, or leave --teacher-hf and --teacher-load away"
            raise CheckpointError(what, why, do, code="teacher-cache-weights-differ")


def _differences(folder: Path, meta: TopKMeta, config: Config, student_ids: int | None) -> Iterator[MkdError]:
    """Yield the problems of settings that do not fit the cache."""
    temperature = temperature_of(config)
    if temperature != meta.temperature:
        setting = "--kd-temperature" if config.teachers[0].temperature is None else "teachers[0].temperature"
        name = setting.removeprefix("--")
        what = f"{name} is {temperature}, the teacher cache {folder} is at {meta.temperature}"
        why = "the probability of all ids outside the top-k at another temperature does not follow from it"
        do = f"use {setting} {meta.temperature}, or export again with {setting} {temperature}"
        yield UsageError(what, why, do, code="teacher-cache-temperature-differs")
    settings = data_settings(config)
    is_tokenised = all_tokenised(config.data)
    for name, (flag, reason) in DATA_FLAGS.items():
        value, exported = settings.get(name), meta.data.get(name)
        follows = name == OVERLONG_CONVERSATIONS and meta.data.get("overlong") != settings["overlong"]
        is_known = name in meta.data or name != OVERLONG_CONVERSATIONS  # else the packs alone are compared
        if name == CHAT_DATE:  # without the flag the run takes the export's
            is_known = None not in (value, exported)
        if is_tokenised and name.startswith("chat_"):  # the packs are compared, and the flags are refused
            is_known = False
        if exported != value and is_known and not follows:
            what = f"{name.replace('_', '-')} is {value}, the teacher cache {folder} was made with {exported}"
            why = f"{reason}, so the student's packs would differ from those that the teacher saw"
            do = f"use the {flag} of the export, or export again into another folder"
            yield DataError(what, why, do, code="teacher-cache-differs")
    if student_ids is not None and meta.vocab_size > student_ids:
        what = f"the teacher cache {folder} is over {meta.vocab_size} ids, the student has {student_ids}"
        why = "both distributions are compared on the ids that both models have"
        do = "export again with this student's --student-hf"
        yield DataError(what, why, do, code="teacher-cache-differs")


def temperature_of(config: Config) -> float:
    """Return the temperature of the first teacher: its own, or the common one."""
    own = config.teachers[0].temperature
    return config.kd.kd_temperature if own is None else own


def data_settings(config: Config) -> dict[str, Any]:
    """Return the settings that, besides files and tokenizer, decide which tokens make a pack."""
    found = {
        "seq_length": config.training.seq_length,
        "pack": config.data.pack,
        "overlong": config.data.overlong,
        OVERLONG_CONVERSATIONS: rule_for_conversations(
            config.data.overlong, config.data.overlong_conversations
        ),
        "append_eod": config.data.append_eod,
        "document_multiple": Sizes.of(config.parallel).document_multiple,
    }
    if config.data.max_patches_per_pack is not None:  # absent as in earlier versions
        found["max_patches_per_pack"] = config.data.max_patches_per_pack
    for name in ("chat_loss", "chat_template_kwargs", CHAT_DATE):  # absent as in earlier versions
        value = getattr(config.data, name)
        if value != getattr(DataConfig, name):
            found[name] = value
    return found


def weights_fingerprint(source: ModelSource) -> str:
    """Return the SHA-256 over names and contents of a model's config.json and weight files; streams them."""
    digest = hashlib.sha256()
    for path in source.weight_files("**/*"):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()
