"""A teacher that reads the same text in tokens of its own: what the data side has to know about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.vocabulary.spelling import Spellings


@dataclass(frozen=True)
class TeacherText:
    """The text settings of one cross-tokenizer teacher. Can be pickled for workers."""

    tokenizer: Tokenizer
    vocab_size: int  # token ids that the teacher's model knows
    spellings: Spellings | None = (
        None  # None: the support of a chunk other than 1-1 is its realised pair alone
    )
    alignment: str = "byte_offset"  # or "dp"
    seq_length: int | None = None  # teacher tokens of a pack; None: what the longest pack of the data needs
    twins: np.ndarray | None = None  # [student ids] the common token's teacher id, -1: none; None: not known
    exact_only: bool = False  # keep only the chunks of two such tokens
    reasoning: bool = True  # chat: align the reasoning of assistant turns too
    name: str = "teacher"  # for messages
