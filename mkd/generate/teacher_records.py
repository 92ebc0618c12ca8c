"""From sampled ids to the record that a completion becomes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mkd.chat.text_stream import CONTEXT_TOKENS
from mkd.data.prompts import KEYS
from mkd.data.records.conversations import MESSAGE_KEYS
from mkd.data.records.kinds import KINDS
from mkd.data.records.refused_keys import REFUSED_KEYS
from mkd.data.records.written_keys import GENERATED
from mkd.generate.completions import Completion
from mkd.generate.teacher_prompts import TeacherPrompt
from mkd.tokenizers.chat_input import ASSISTANT, Conversation
from mkd.tokenizers.tokenizer import Tokenizer

THINKS = re.compile(r"<think>\s*\Z")  # end of a generation prompt that begins the reasoning
NOT_COPIED = frozenset(
    (*KEYS, *MESSAGE_KEYS, *REFUSED_KEYS, GENERATED, *(key for kind in KINDS.values() for key in kind.keys))
)
"""Keys of a prompt's record that the new record has with another value, or that would change what it is."""


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of the ids that follow a prompt."""
    tail = list(prompt)[-CONTEXT_TOKENS:]
    before, after = tokenizer.decode(tail), tokenizer.decode([*tail, *ids])
    return after[len(before) :] if after.startswith(before) else tokenizer.decode(list(ids))


def without_stop(ids: Sequence[int], stops: Collection[int]) -> list[int]:
    """Return the ids without the stop token at the end."""
    return list(ids[:-1] if len(ids) and int(ids[-1]) in stops else ids)


def num_control_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Return how many ids are control tokens, which a text cannot hold: read again, they mean other ids."""
    known = tokenizer.token_bytes
    return sum(one >= len(known) or known[one] is None for one in ids)


def is_utf8(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Return False if the bytes of the ids are not valid UTF-8, so that their text has U+FFFD instead."""
    known = tokenizer.token_bytes
    pieces = (known[one] if one < len(known) else None for one in ids)
    try:
        b"".join(piece or b"" for piece in pieces).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def begun_text(tokenizer: Tokenizer, prompt: TeacherPrompt) -> str:
    """Return what the teacher's template has written of the answer: the tag that opens its reasoning."""
    if not isinstance(prompt.prompt, Conversation):
        return ""
    found = THINKS.search(tokenizer.decode(prompt.ids.tolist()[-CONTEXT_TOKENS:]))
    return found[0] if found else ""


def record_of(prompt: TeacherPrompt, completion: Completion, begun: str) -> dict[str, Any]:
    """Return the record to train from: a conversation with the answer, or a text with its completion.

    Earlier answers in a conversation are the record's, not the teacher's: they have no loss. `begun` is what
    the template has written of the answer.
    """
    record = {
        key: value for key, value in prompt.fields.items() if key not in NOT_COPIED and value is not None
    }
    conversation = prompt.prompt
    if isinstance(conversation, Conversation):
        messages = [_read_only(one) for one in conversation.messages]
        record["messages"] = [*messages, {"role": ASSISTANT, "content": begun + completion.text}]
        if conversation.tools:
            record["tools"] = list(conversation.tools)
        if conversation.template_kwargs:
            record["chat_template_kwargs"] = dict(conversation.template_kwargs)
    else:
        record |= {"prompt": conversation, "completion": completion.text}
    about = {"prompt": completion.prompt, "sample": completion.sample, "end": completion.end}
    about |= {"tokens": completion.tokens, "logp": round(completion.logp, 4)}
    if completion.reward is not None:
        about["reward"] = completion.reward
    return {**record, GENERATED: about}


def _read_only(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "loss": False} if message["role"] == ASSISTANT else dict(message)
