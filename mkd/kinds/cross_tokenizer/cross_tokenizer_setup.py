"""The set-up of a teacher with another tokenizer than the student."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from mkd.config.schema import Config, XTokenConfig
from mkd.data.aligned.teacher_pieces import LENGTH_UNIT
from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.processors import load_image_processor
from mkd.data.prompt_readers import PromptReader
from mkd.data.prompts import PromptSet
from mkd.kinds.context.context_setup import OwnRowSetup
from mkd.kinds.cross_tokenizer.cross_tokenizer_term import CrossTokenizer
from mkd.models.language_model import LanguageModel
from mkd.models.stored_head import StoredHead
from mkd.operations.run_folders import cache_folder
from mkd.parallel.context import ParallelContext
from mkd.resolve.preflight import Tokenizers
from mkd.train.teachers.base import Teacher
from mkd.xtoken import build_projection
from mkd.xtoken.loss_settings import ChunkLossSettings
from mkd.xtoken.vocabulary.chunk_vocabulary import ChunkVocabulary
from mkd.xtoken.vocabulary.relation import VocabularyRelation
from mkd.xtoken.vocabulary.slots import TeacherSlots

SPARE_ROOM = 1.25  # in packs for completions: texts vary


@dataclass(frozen=True)
class CrossTokenizerSetup(OwnRowSetup):
    """The teacher's side of the text and of the vocabulary."""

    relation: VocabularyRelation | None = None  # known after `meet`
    vocabulary: ChunkVocabulary | None = None  # beside the student's; on ranks with the last stage

    has_own_tokens: ClassVar[bool] = True

    @property
    def xtoken(self) -> XTokenConfig:
        """Settings of the comparison."""
        assert self.settings.xtoken is not None, "the teacher is of this kind"
        return self.settings.xtoken

    def meet(self, config: Config, tokenizers: Tokenizers, context: ParallelContext) -> CrossTokenizerSetup:
        """Relate both vocabularies, once: the relation is cached beside the tokenised data. Collective.

        Raises UsageError on every rank for tokenizers that cannot be related.
        """
        return context.rank_0_first(partial(self._related, config, tokenizers))

    def _related(self, config: Config, tokenizers: Tokenizers) -> CrossTokenizerSetup:
        ours, theirs = tokenizers.student, tokenizers.teachers[self.index]
        assert theirs is not None and self.source is not None, "the teacher runs, with a tokenizer of its own"
        cache = cache_folder(config)
        relation = build_projection(ours, theirs, cache_dir=cache, projection=self.xtoken.projection)
        text = TeacherText(
            tokenizer=theirs,
            vocab_size=self.source.shape.vocab_size,
            spellings=relation.spellings,
            alignment=self.xtoken.alignment,
            seq_length=self.xtoken.seq_length,
            twins=relation.twins(),
            reasoning=self.xtoken.reasoning,
            name=self.name,
            images=self._images(config, tokenizers),
            context=self.template,
        )
        longest = config.rollout.max_new_tokens
        return replace(self, relation=relation, own_text=text, longest_completion=longest)

    def _images(self, config: Config, tokenizers: Tokenizers) -> ConversationImages | None:
        """Return the reader of the teacher's images; None if the teacher or the student reads none."""
        ours, theirs = tokenizers.images, tokenizers.teachers[self.index]
        if ours is None or theirs is None or self.source is None:
            return None
        processor = load_image_processor(self.source.assets, theirs, config.data.max_image_side)
        return None if processor is None else ConversationImages(processor, ours.source)

    def prompt_reader(self, tokenizers: Tokenizers) -> PromptReader | None:
        theirs = tokenizers.teachers[self.index]
        return None if theirs is None else PromptReader(theirs, self.template)

    def with_room(self, prompts: PromptSet, seq_length: int, document_multiple: int) -> OwnRowSetup:
        """Return the teacher with packs that have room for completions.

        By default their number of tokens is that of the student's, times the proportion of both in the
        prompts, times SPARE_ROOM. Without prompts the proportion is 1.
        """
        if self.template is not None:
            return super().with_room(prompts, seq_length, document_multiple)
        ours = sum(len(prompt.ids) for prompt in prompts.prompts)
        theirs = sum(len(prompt.of_teachers[self.name]) for prompt in prompts.prompts) or 1
        unit, needed = (
            document_multiple * LENGTH_UNIT,
            seq_length * max(1.0, SPARE_ROOM * theirs / max(ours, 1)),
        )
        return replace(self, own_text=replace(self.text, least_seq_length=math.ceil(needed / unit) * unit))

    def fingerprints(self, config: Config, tokenizers: Tokenizers) -> Mapping[str, object]:
        """Return the fingerprint of the teacher's image processor, if it reads images."""
        images = self._images(config, tokenizers)
        return {} if images is None else {f"teacher.{self.name}.images": images.processor.fingerprint}

    def beside(
        self,
        student: LanguageModel,
        teacher: LanguageModel | StoredHead,
        student_rows: int,
        context: ParallelContext,
    ) -> CrossTokenizerSetup:
        """Put the rows of the teacher's head where the student has the same tokens.

        This comes after the weights are read, because it selects and sorts rows of the head.
        """
        assert self.relation is not None, "`meet` comes first"
        student_ids, teacher_ids = student.shape.vocab_size, teacher.shape.vocab_size
        slots = TeacherSlots.from_relation(
            self.relation, student_rows, teacher_ids, context.tp_size, student_vocab_size=student_ids
        )
        ids = torch.from_numpy(slots.teacher_ids[context.tp_rank]).to(context.device)
        teacher.select_head_rows(ids, context.tp_group)
        vocabulary = ChunkVocabulary.from_slots(
            slots,
            student_ids,
            context.tp_rank,
            relation=self.relation,
            loss=self.xtoken.loss,
            relaxed=self.xtoken.relaxed_map,
        )
        return replace(self, vocabulary=vocabulary.to(context.device))

    def term(self, share: float, divergence: Mapping[str, Any]) -> Teacher:
        settings = ChunkLossSettings(loss=self.xtoken.loss, top_k=self.xtoken.top_k, **divergence)
        return CrossTokenizer(self.name, share, self.index, settings, self.vocabulary)
