"""The record of a run that can start: its models, tokenizers, batch and layouts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_changes import PlainTokenizer, SavesFiles, StopIds
from mkd.config.schema import Config
from mkd.plan.batch import BatchPlan
from mkd.plan.facts import RunFacts
from mkd.plan.forecast import Forecast
from mkd.resolve.chat_setup import date_of
from mkd.resolve.model_source import ModelSource
from mkd.resolve.preflight import Tokenizers
from mkd.resolve.teacher_setup import TeacherSetup
from mkd.resolve.trained_ends import stop_notes
from mkd.tokenizers.tokenizer_files import rebuilt_example


@dataclass(frozen=True)
class Plan:
    """Models, batch and layouts of a run, fully checked."""

    facts: RunFacts
    student: ModelSource
    # The teachers that run, or the reference: none if no loss reads them, or the teacher is stored.
    teachers: tuple[ModelSource, ...]
    setups: tuple[TeacherSetup, ...]  # of all teachers in the loss, or of the reference
    tokenizers: Tokenizers | None = None  # None for engines without text
    trained_ends: tuple[int, ...] = ()  # tokens that end the texts of the training data
    gpu_gib: float | None = None  # memory of this process's GPU; None: not known

    @property
    def config(self) -> Config:
        """Settings of the run."""
        return self.facts.config

    @property
    def batch(self) -> BatchPlan:
        """Sizes of one optimizer step."""
        return self.facts.batch

    @property
    def assets(self) -> HFAssets:
        """Small files that are written beside the student's weights, with the tokenizer of the run.

        Generation stops where the student has learned to. With --max-image-side transformers must see the
        images that the student has learned from.
        """
        assert self.tokenizers is not None, "a plan without problems has tokenizers"
        images = self.tokenizers.images if self.config.data.max_image_side is not None else None
        changes: list[SavesFiles] = [] if images is None else [images.processor]
        changes += [StopIds(self.trained_ends)] if self.trained_ends else []
        changes += [PlainTokenizer()] if self._is_rebuilt else []
        return HFAssets(self.student.assets, self.tokenizers.source, tuple(changes))

    @cached_property
    def _is_rebuilt(self) -> bool:
        """True if transformers would read another tokenizer from an export than its tokenizer.json holds.

        The student's config.json beside a tokenizer of another folder may cause this.
        """
        assert self.tokenizers is not None
        source = self.tokenizers.source
        if source is None or source == self.student.assets:
            return self.tokenizers.student.is_rebuilt
        with TemporaryDirectory() as folder:
            HFAssets(self.student.assets, source).copy_to(Path(folder))
            return rebuilt_example(folder) is not None

    @property
    def choices(self) -> dict[str, object]:
        """Flag -> value that every rank chooses by itself if the flag is not given."""
        dated = self.tokenizers.opened if self.tokenizers else ()
        return {"--chat-date": date_of(dated), "--save": self.config.checkpoint.save}

    @property
    def known_ids(self) -> int:
        """Number of ids that the student and all teachers with its tokens know: none beyond is sampled."""
        return self.facts.pair.known_ids

    @cached_property
    def unused_ids(self) -> frozenset[int]:
        """Ids below `known_ids` that no token has: rows of the models without text, never sampled either."""
        if self.tokenizers is None:
            return frozenset()
        return frozenset(range(self.known_ids)).difference(self.tokenizers.student.vocabulary.values())

    @property
    def scored_ids(self) -> int:
        """Number of ids that the sampler's probabilities are over: a server's are over all of the student."""
        return self.known_ids if self.config.rollout.samples_here else self.student.shape.vocab_size

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Names of the teachers in the loss, including a stored one."""
        return tuple(one.name for one in self.setups)

    @cached_property
    def forecast(self) -> Forecast:
        """Forecast of step time and memory."""
        return Forecast(self.facts, self.gpu_gib)

    def stop_notes(self) -> list[str]:
        """Return a note if exports stop at tokens at which the student's own files do not."""
        return list(stop_notes(self.config, self.tokenizers, self.student.assets, self.trained_ends))
