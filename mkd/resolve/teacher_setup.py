"""The set-up of one teacher: from its files to its term of the loss.

Kinds of teachers (mkd/kinds) replace methods of `TeacherSetup`. This module loads torch only inside methods,
so that a kind's module can stay free of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from mkd.config.schema import Config, TeacherConfig

if TYPE_CHECKING:  # they load torch
    import torch

    from mkd.data.aligned.teacher_side import TeacherText
    from mkd.data.dataset import BlendedDataset
    from mkd.data.prompt_readers import PromptReader
    from mkd.data.prompts import PromptSet
    from mkd.data.teacher_input import SharedTokens
    from mkd.models.language_model import LanguageModel
    from mkd.models.stored_head import StoredHead
    from mkd.parallel.context import ParallelContext
    from mkd.plan.models.model_shape import ModelShape
    from mkd.resolve.model_source import ModelSource
    from mkd.resolve.preflight import Tokenizers
    from mkd.train.teachers.base import Teacher

    DataSets = tuple[BlendedDataset | None, BlendedDataset | None]  # for training, held out


@dataclass(frozen=True)
class TeacherSetup:
    """One teacher of a run. As it is here, it runs and reads the student's tokens.

    A run calls the methods in this order. Those that return a set-up return the one to continue with.
    """

    settings: TeacherConfig
    index: int  # its number in the configuration, and in a stage if it runs
    name: str  # in metrics
    source: ModelSource | None  # files of the model; None: it has none
    # Tokens of its packs, known once the text is read; 0: as many as the student's packs have.
    seq_length: int = field(default=0, kw_only=True)

    runs: ClassVar[bool] = True  # its layers run in every step
    has_own_tokens: ClassVar[bool] = False  # its tokenizer differs from the student's

    @property
    def head_shape(self) -> ModelShape | None:
        """Shape of the model of which the student's processes have only the head; None: of none.

        It runs on processes of its own, or its hidden states are stored.
        """
        return self.source.shape if self.settings.is_apart and self.source is not None else None

    @property
    def card_note(self) -> str:
        """Text that its files add to the loss card."""
        return ""

    def meet(self, config: Config, tokenizers: Tokenizers, context: ParallelContext) -> TeacherSetup:
        """Prepare what the text needs. Collective; the same error on every rank."""
        return self

    def prompt_reader(self, tokenizers: Tokenizers) -> PromptReader | None:
        """Return how it reads the prompts of completions; None: as the student does."""
        return None

    def with_room(self, prompts: PromptSet, seq_length: int, document_multiple: int) -> TeacherSetup:
        """Return the set-up with packs that have room for completions of `prompts`."""
        return self

    @property
    def text(self) -> TeacherText | SharedTokens:
        """Tokens that its layers read, if it runs."""
        from mkd.data.teacher_input import SharedTokens

        return SharedTokens()

    def pack_length(self, seq_length: int) -> int:
        """Return the tokens of its packs if completions are the only text. `seq_length`: the student's."""
        return seq_length

    def attach(
        self, config: Config, tokenizers: Tokenizers, context: ParallelContext, sets: DataSets
    ) -> DataSets:
        """Return the data sets with what the teacher adds. Collective; the same error on every rank."""
        return sets

    def fingerprint(self) -> str:
        """Return what identifies its predictions."""
        assert self.source is not None, "a teacher that runs has files"
        return self.source.ends_fingerprint()

    def fingerprints(self, config: Config, tokenizers: Tokenizers) -> Mapping[str, object]:
        """Return further entries that must not change when the run resumes, by their whole names."""
        return {}

    def beside(
        self,
        student: LanguageModel,
        teacher: LanguageModel | StoredHead,
        student_rows: int,
        context: ParallelContext,
    ) -> TeacherSetup:
        """Fit the loaded teacher, or its head, to the student. Called on the last stage, if the teacher runs.

        `student_rows`: rows of the student's padded head. Collective over tensor parallelism.
        """
        return self

    def head(self, padded_rows: int, dtype: torch.dtype, context: ParallelContext) -> StoredHead:
        """Return this rank's rows of the head, if it has a `head_shape`.

        `padded_rows`: rows of the student's padded head on all ranks together.
        """
        raise NotImplementedError

    def term(self, share: float, divergence: Mapping[str, Any]) -> Teacher:
        """Return the term of the loss. `share`: its fraction of all teachers' weights."""
        from mkd.train.teachers.same_tokens import SameTokens

        return SameTokens(self.name, share, (self.index,), divergence)
