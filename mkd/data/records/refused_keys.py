"""Keys that would change what a record means, and that mkd does not support: refused instead of ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mkd.errors import DataError

MEDIA = ("image", "video", "videos", "audio", "audios")
PREFERENCES = ("chosen", "rejected", "rejected_messages", "rejected_response", "label", "kto_tag")
CONTEXTS = ("teacher_messages", "teacher_prompt", "privileged_context")
REFUSED_KEYS = (*MEDIA, *PREFERENCES, *CONTEXTS, "functions")
"""`label` is refused only if it is true or false, as for KTO: texts of other uses have labels too."""


def refuse_unsupported(
    fields: Mapping[str, Any], used: Sequence[str], kind: Sequence[str], is_text: bool
) -> None:
    """Raise DataError if a record has one of these keys beside those that are used, which make its `kind`.

    A plain text (`is_text`) means the same with media or a judgement beside it, so there they are ignored.
    """
    for key in REFUSED_KEYS:
        value = fields.get(key)
        if key in used or value is None or value in ("", []) or (is_text and key not in CONTEXTS):
            continue
        if key == "label" and not isinstance(value, bool):
            continue
        raise _refused(key, kind)


def refuse_in_prompt(fields: Mapping[str, Any], used: str, contexts: Sequence[str] = ()) -> None:
    """Raise DataError if a prompt has one of these keys beside it; judgements are for the reward function.

    `contexts` are the keys that teachers read.
    """
    others = {key: value for key, value in fields.items() if key not in (*PREFERENCES, *contexts)}
    refuse_unsupported(others, (used,), (used,), is_text=isinstance(fields[used], str))


def _refused(key: str, kind: Sequence[str]) -> DataError:
    if key in MEDIA:
        why = "the model would answer a question about something that it does not see"
        do = "give images as the list `images`, with image parts in the messages"
        do = do if key == "image" else "remove the record: mkd reads texts and images"
    elif key in PREFERENCES:
        why = "it says which answers are good; a bad one would be trained like a good one"
        do = 'write {"prompt", "chosen", "rejected"} for --dpo-beta, or keep only the good answers'
    elif key in CONTEXTS:
        why = "it asks for a teacher that reads another prompt than the student, and no teacher here does"
        do = "give a teacher a context (`context: {}`), or remove the key"
    else:
        why = "tools are given in another form now, and the prompt would lack them"
        program = '.tools = [.functions[] | {type: "function", function: .}] | del(.functions)'
        do = f"write them as `tools`: jq -c '{program}'"
    what = f"the record has {key} beside {' and '.join(kind)}"
    return DataError(what, why, do, code="record-key-not-supported")
