"""The documents (ids and loss mask) that each record becomes: one, or two of a preference pair.

Document 2i of a corpus of pairs is the prompt with the chosen answer, document 2i + 1 the prompt with the
rejected one. Packs take both or none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_table import EncodedImage
from mkd.data.packing.cutting import whole_records
from mkd.data.records.format_hints import PAIR_HINT
from mkd.data.records.kinds import MESSAGES, PAIR, PROMPT_COMPLETION, SEGMENTS, TOKENS, Record
from mkd.data.records.wanted import WantedRecords
from mkd.errors import DataError
from mkd.families.vision import TEXT_ALONE, WITH_IMAGES
from mkd.human import counted
from mkd.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:  # workers that tokenise do not import Megatron
    from mkd.data.corpus.store import TokenStore


@dataclass(frozen=True)
class Document:
    """The tokens of one record; `loss[i] == 1` means that token i counts as a label (predicted at i-1)."""

    ids: np.ndarray  # [n] int32
    loss: np.ndarray  # [n] uint8
    kind: str  # form of its record
    images: tuple[EncodedImage, ...] = ()


def encode_record(
    record: Record, tokenizer: Tokenizer, append_eod: bool, images: ConversationImages | None = None
) -> Document:
    """Return the tokens and loss mask of a record, and its images, which only the reader `images` can read.

    If `append_eod`, texts and completions end with the EOS token. Text: loss everywhere. Messages: the chat
    template's ids, loss on assistant turns. Prompt and completion: loss on the completion and its EOS; only
    the prompt has the tokenizer's BOS. Segments and tokens: as given, nothing is added.
    """
    if record.kind == MESSAGES:
        if images is None and record.images:
            raise _no_image_reader()
        if images is not None:
            ids, loss, placed = images.encode(record.values[0], record.images)
            return Document(ids, loss, record.kind, placed)
        ids, loss = tokenizer.apply_chat_template(record.values[0])
    elif record.kind == SEGMENTS:
        ids, loss = tokenizer.encode_segments(record.values[0])
    elif record.kind == TOKENS:
        ids, loss = map(list, record.values[0])
        _require_known(ids, tokenizer)
    else:
        ids = tokenizer.encode(record.values[0])
        if len(ids) > 1 and ids[-1] == tokenizer.eos_id:
            ids = ids[:-1]  # drop the EOS that the tokenizer's configuration adds: append_eod alone decides
        num_prompt = 0
        if record.kind == PROMPT_COMPLETION:
            num_prompt = len(ids)
            ids = ids + tokenizer.encode_continuation(record.values[1])
        if append_eod:
            ids = [*ids, require_eos(tokenizer)]
        loss = [0] * num_prompt + [1] * (len(ids) - num_prompt)
    return Document(np.asarray(ids, dtype=np.int32), np.asarray(loss, dtype=np.uint8), record.kind)


def _require_known(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raise DataError for an id that the tokenizer does not have."""
    place = next((place for place, one in enumerate(ids, 1) if one >= tokenizer.vocab_size), None)
    if place is not None:
        raise DataError(
            f"token {place} has the id {ids[place - 1]}, the tokenizer has 0 to {tokenizer.vocab_size - 1}",
            "the tokens were made with another tokenizer",
            "make them with the student's tokenizer, or remove the record",
            code="token-beyond-vocabulary",
        )


def _no_image_reader() -> DataError:
    return DataError(
        "the conversation has images, and nothing here can read them",
        "student or teacher reads text alone: it has no preprocessor_config.json of a supported "
        f"vision-language model, or it is a model of {', '.join(TEXT_ALONE)}, whose tower mkd does not run",
        f"use models of {', '.join(WITH_IMAGES)}, or remove the records with images",
        code="images-not-read",
    )


def require_eos(tokenizer: Tokenizer) -> int:
    """Return the id that ends documents. Raises DataError if the tokenizer has none."""
    if tokenizer.eos_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token",
            "--append-eod ends every document with it",
            "use --no-append-eod, or set eos_token in tokenizer_config.json",
            code="tokenizer-without-eos",
        )
    return tokenizer.eos_id


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
        raise DataError(what, why, "repair or remove the record", code="record-empty")
    if chosen.ids.tolist() == rejected.ids.tolist():
        what, why = "chosen and rejected are the same tokens", "there is nothing to prefer"
        raise DataError(what, why, "remove the record", code="pair-not-valid")
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
        raise DataError(what, why, do, code="pair-not-valid")
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
        raise DataError(what, why, do, code="pairs-and-others")
    if has_pairs and wanted is False:
        what, why = f"{name} has preference pairs", "a cross entropy with rejected answers would teach them"
        do = "add --dpo-beta 0.1 or another loss of pairs, or give records of another kind"
        raise DataError(what, why, do, code="pairs-and-others")
    if wanted and not has_pairs:
        what, why = f"{name} has no preference pairs", "the loss compares a chosen with a rejected answer"
        do = 'give records {"prompt", "chosen", "rejected"}, or remove the loss, such as --dpo-beta'
        raise DataError(what, why, do, code="pairs-and-others")


def require_numbers(store: TokenStore, wanted: WantedRecords, name: str) -> None:
    """Raise DataError unless a tokenised corpus, called `name`, has the wanted numbers of its records."""
    missing = [key for key in wanted.numbers if key not in store.numbers]
    if missing:
        what, why = f"{name} has no numbers {', '.join(missing)}", "the loss of this run reads them"
        do = f"make it again: mkd preprocess --numbers {' '.join(wanted.numbers)}"
        raise DataError(what, why, do, code="corpus-without-numbers")
    for key in wanted.weights:
        not_above_0 = np.flatnonzero(store.numbers[key] <= 0)
        if not_above_0.size:
            ((path, line),) = store.places(not_above_0[:1].tolist())
            what = f"{path}:{line}: {key} is {store.numbers[key][not_above_0[0]]:g}"
            why = f"it weighs the record in the loss, as {counted(not_above_0.size, 'document')} of {name}"
            do = "use numbers above 0, or remove the records"
            raise DataError(what, why, do, code="record-value-not-valid")


def require_records(wanted: WantedRecords, name: str) -> None:
    """Raise DataError for a tokenised corpus, called `name`, if teachers make their prompts from records."""
    if wanted.context:
        what = f"{name} is a tokenised corpus, and a teacher reads a prompt of its own"
        why = f"its prompt is made from the keys of records: {', '.join(wanted.context)}"
        do = "name the raw file of the records instead"
        raise DataError(what, why, do, code="corpus-of-another-model")


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
        code="longer-than-seq-length",
    )
