"""The document (ids and loss mask) that each record becomes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mkd.data.images.conversation import ConversationImages, EncodedImage
from mkd.data.records.kinds import MESSAGES, PROMPT_COMPLETION, Record
from mkd.errors import DataError
from mkd.tokenizers.tokenizer import Tokenizer


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
    the prompt has the tokenizer's BOS.
    """
    if record.kind == MESSAGES:
        if images is None and record.images:
            raise _no_image_reader()
        if images is not None:
            ids, loss, placed = images.encode(record.values[0], record.images)
            return Document(ids, loss, record.kind, placed)
        ids, loss = tokenizer.apply_chat_template(record.values[0])
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


def _no_image_reader() -> DataError:
    return DataError(
        "the conversation has images, and nothing here can read them",
        "student or teacher has no preprocessor_config.json of a supported vision-language model, and reads "
        "text alone",
        "use vision-language models, or remove the records with images",
        code="images-without-processor",
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
