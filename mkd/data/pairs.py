"""Preference pairs: a prompt with a chosen and a rejected answer becomes two documents in a row.

Document 2i of a corpus of pairs is the prompt with the chosen answer, document 2i + 1 the prompt with the
rejected one. Packs take both or none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mkd.data.documents import Document, encode_record
from mkd.data.images.conversation import ConversationImages
from mkd.data.packing.cutting import whole_records
from mkd.data.records.format_hints import PAIR_HINT
from mkd.data.records.kinds import MESSAGES, PAIR, PROMPT_COMPLETION, Record
from mkd.errors import DataError
from mkd.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:  # workers that tokenise do not import Megatron
    from mkd.data.store import TokenStore


def encode_documents(
    record: Record, tokenizer: Tokenizer, append_eod: bool, images: ConversationImages | None = None
) -> list[Document]:
    """Return the documents of a record: two of a pair, else the one of `encode_record`.

    Raises DataError for a pair whose answers are the same tokens, or have no token with loss.
    """
    if record.kind != PAIR:
        return [encode_record(record, tokenizer, append_eod, images)]
    prompt, *answers = record.values
    documents = [_answered(prompt, answer, tokenizer, append_eod, images) for answer in answers]
    chosen, rejected = documents
    if not (chosen.loss[1:].any() and rejected.loss[1:].any()):
        what, why = "an answer of the pair is empty", "there is no token to prefer"
        raise DataError(what, why, "repair or remove the record", code="pair-answer-empty")
    if chosen.ids.tolist() == rejected.ids.tolist():
        what, why = "chosen and rejected are the same tokens", "there is nothing to prefer"
        raise DataError(what, why, "remove the record", code="pair-without-difference")
    return documents


def _answered(
    prompt: Any, answer: Any, tokenizer: Tokenizer, append_eod: bool, images: ConversationImages | None
) -> Document:
    """Return the prompt with one answer; only tokens of the answer have loss."""
    if isinstance(prompt, str):
        found = encode_record(Record(PROMPT_COMPLETION, (prompt, answer)), tokenizer, append_eod)
        return replace(found, kind=PAIR)
    if answer.messages[: len(prompt.messages)] == prompt.messages:
        what, why = (
            "an answer of the pair begins with the prompt's messages",
            "the model would read them twice",
        )
        do = f"leave only the answer's messages in chosen and rejected; {PAIR_HINT}"
        raise DataError(what, why, do, code="pair-answer-repeats-prompt")
    found = encode_record(Record(MESSAGES, (prompt.followed_by(answer),)), tokenizer, append_eod, images)
    return replace(found, kind=PAIR)


def require_pairs(kinds: Collection[str], wanted: bool | None, name: str) -> None:
    """Raise DataError unless the corpus, called `name`, has only pairs if they are `wanted`, else none.

    If `wanted` is None, it may have either, but not both.
    """
    has_pairs, has_others = PAIR in kinds, bool(set(kinds) - {PAIR})
    if has_pairs and has_others:
        what, why = f"{name} has preference pairs and other records", "each has a loss of its own"
        do = "put them into two files, and train on one after the other"
        raise DataError(what, why, do, code="pairs-with-other-records")
    if has_pairs and wanted is False:
        what, why = f"{name} has preference pairs", "a cross entropy with rejected answers would teach them"
        do = "add --dpo-beta 0.1, or give records of another kind"
        raise DataError(what, why, do, code="pairs-without-dpo")
    if wanted and not has_pairs:
        what, why = f"{name} has no preference pairs", "--dpo-beta compares a chosen with a rejected answer"
        do = 'give records {"prompt", "chosen", "rejected"}, or remove --dpo-beta'
        raise DataError(what, why, do, code="dpo-without-pairs")


def require_pairs_fit(
    store: TokenStore, seq_length: int, multiple: int, overlong: str, documents: tuple[int, int]
) -> None:
    """Raise DataError if a pair of the `documents` [first, last) does not fit a pack, unless it is dropped.

    Documents take a `multiple` of tokens. A pair is never cut.
    """
    lengths = store.lengths_between(*documents)
    too_long = (whole_records(lengths, 2, multiple, seq_length) < lengths)[::2]
    if overlong == "drop" or not too_long.any():
        return
    longest = int(lengths.reshape(-1, 2).sum(axis=1).max())
    ((path, line),) = store.places([documents[0] + 2 * int(np.argmax(too_long))])
    raise DataError(
        f"{path}:{line}: the pair does not fit --seq-length {seq_length}, as {too_long.sum()} of "
        f"{len(too_long)} in {store.name}; the longest has {longest} tokens",
        "the prompt with both answers must be in one pack, and a cut answer would be judged by its beginning",
        "raise --seq-length, or leave such pairs out: --overlong drop",
        code="pair-too-long",
    )
