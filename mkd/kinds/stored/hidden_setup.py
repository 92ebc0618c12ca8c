"""The set-up of stored hidden states: the loss is that of the teacher that made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from mkd.data.images.conversation import ConversationImages
from mkd.data.stored.cache_meta import HiddenMeta
from mkd.data.stored.teacher_hidden import HiddenPart, read_head_rows, require_head
from mkd.errors import MkdError
from mkd.kinds.stored.cache_setup import CacheSetup
from mkd.models.stored_head import StoredHead
from mkd.parallel.context import ParallelContext
from mkd.plan.facts import RunFacts
from mkd.plan.models.model_shape import ModelShape
from mkd.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class HiddenSetup(CacheSetup):
    """Hidden states and a head in the place of a teacher."""

    meta: HiddenMeta

    kind_of_meta: ClassVar[type[HiddenMeta]] = HiddenMeta

    @property
    def head_shape(self) -> ModelShape:
        return self.meta.shape

    def differences(self, facts: RunFacts) -> Iterator[MkdError]:
        self.meta.require_shape(self.folder)
        yield from super().differences(facts)

    def check(self, tokenizer: Tokenizer, images: ConversationImages | None) -> None:
        super().check(tokenizer, images)
        require_head(self.folder, self.meta)

    def part(self, name: str, is_read: bool) -> HiddenPart:
        return HiddenPart(self.folder, name, self.meta, is_read)

    def head(self, padded_rows: int, dtype: torch.dtype, context: ParallelContext) -> StoredHead:
        rows = padded_rows // context.tp_size
        weight = read_head_rows(self.folder, context.tp.rank * rows, rows, dtype)
        return StoredHead(self.meta.shape, weight.to(context.device))
