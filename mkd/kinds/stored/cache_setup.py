"""The set-up of a stored teacher: whether its cache fits the run, and its rows.

Teacher, tokenizer and data must be those of the run. Kinds of caches have subclasses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mkd.config.data_files import all_tokenised
from mkd.config.run_files import DataConfig, rule_for_conversations
from mkd.config.schema import Config
from mkd.data.dataset import BlendedDataset
from mkd.data.images.conversation import ConversationImages
from mkd.data.stored.cache_files import CachePart, TaughtDataset, load_pyarrow
from mkd.data.stored.cache_meta import CHAT_DATE, CacheMeta
from mkd.errors import CheckpointError, DataError, MkdError
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
IMAGE_PROCESSOR = "image_processor"  # entry beside `data_settings`, if the models read images


S = TypeVar("S", bound="CacheSetup")


@dataclass(frozen=True)
class CacheSetup(TeacherSetup):
    """The cache that takes the place of a teacher. `source` is the model that it must come from, if given."""

    folder: Path
    meta: CacheMeta

    runs: ClassVar[bool] = False
    kind_of_meta: ClassVar[type[CacheMeta]]

    @classmethod
    def find(
        cls: type[S], problems: list[MkdError], facts: RunFacts, index: int, source: ModelSource | None
    ) -> S | None:
        """Return the cache from its description; None after adding an error to `problems`."""
        settings = facts.config.teachers[index]
        assert settings.stand_in is not None, "the teacher is of a stored kind"
        folder = Path(getattr(settings, settings.stand_in))
        try:
            load_pyarrow()
            found = cls(
                settings, index, facts.teacher_names[index], source, folder, cls.kind_of_meta.read(folder)
            )
            problems += found.differences(facts)
        except MkdError as error:
            problems.append(error)
            return None
        return found

    def differences(self, facts: RunFacts) -> Iterator[MkdError]:
        """Yield the problems of settings that do not fit the cache."""
        yield from _data_differences(self.folder, self.meta, facts.config)

    def part(self, name: str, is_read: bool) -> CachePart:
        """Open a data set of the cache. Raises DataError if it is missing or not finished.

        `is_read`: this process computes the loss.
        """
        raise NotImplementedError

    @property
    def card_note(self) -> str:
        return f"; exported with layers in {self.meta.precision}" if self.meta.is_rounded else ""

    def fingerprint(self) -> str:
        return self.meta.weights_fingerprint

    def fingerprints(self, config: Config, tokenizers: Tokenizers) -> Mapping[str, object]:
        if not self.meta.is_rounded:  # absent as in earlier versions
            return {}
        number = f".{self.index}" if self.index else ""  # absent as in earlier versions
        return {f"loss.stored_precision{number}": self.meta.precision}

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
                self.check(tokenizers.student, tokenizers.images)
                for taught in self._taught(train_set, valid_set, is_read=True):
                    if taught is not None:
                        taught.require_shards()
            except MkdError as caught:
                error = caught
        error = context.broadcast_object(error)
        if error is not None:
            error.on_all_ranks = True
            raise error
        return self._taught(train_set, valid_set, context.holds_last_stage)

    def _taught(
        self, train_set: BlendedDataset | None, valid_set: BlendedDataset | None, is_read: bool
    ) -> tuple[TaughtDataset, TaughtDataset | None]:
        assert train_set is not None, "the student's own text has no stored teacher"
        train = TaughtDataset(train_set, self.part("train", is_read))
        if valid_set is None:
            return train, None
        return train, TaughtDataset(valid_set, self.part("valid", is_read))

    def check(self, tokenizer: Tokenizer, images: ConversationImages | None) -> None:
        """Raise the first problem of tokenizer, images, and weights of the model that the run names."""
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


def _data_differences(folder: Path, meta: CacheMeta, config: Config) -> Iterator[MkdError]:
    """Yield the settings of the data that differ from the export's."""
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
