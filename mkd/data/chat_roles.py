"""The roles of tokens in a pack: found by the text with which the chat template begins a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.tokenizer import Tokenizer

WORDS = ("qa0q", "qb1q", "qc2q")  # contents of messages, which no template writes
SHORTEST = 3  # characters of a header that is not taken for text


def role_headers(tokenizer: Tokenizer) -> dict[str, str]:
    """Return role -> text that begins its messages; {} without a chat template that tells them apart.

    A header is what stands between two contents, without the end of the first message.
    """
    if not tokenizer.has_chat_template:
        return {}
    found = {
        "system": _header(tokenizer, "system", "user"),
        "user": _header(tokenizer, "user", "assistant", "user"),
        "assistant": _header(tokenizer, "user", "assistant"),
        "tool": _header(tokenizer, "user", "assistant", "tool"),
    }
    known = {role: header for role, header in found.items() if len(header.strip()) >= SHORTEST}
    has_both = {"user", "assistant"} <= known.keys()
    return known if has_both and len(set(known.values())) == len(known) else {}


def _header(tokenizer: Tokenizer, *roles: str) -> str:
    """Return the text that begins the last message of `roles`, or the first if it is `system`; else ""."""
    last = 0 if roles[0] == "system" else len(roles) - 1
    messages = [{"role": role, "content": word} for role, word in zip(roles, WORDS, strict=False)]
    try:
        text = tokenizer.render(Conversation(messages))
        if last == 0:
            control = next((one for one in tokenizer.special_tokens if text.startswith(one)), "")
            before = text.partition(WORDS[0])[0]
            return before if before.find(control, 1) < 0 else before[before.rfind(control) :]
        ending = tokenizer.render(Conversation(messages[:last])).partition(WORDS[last - 1])[2]
    except DataError:  # the template refuses the role
        return ""
    gap = text.partition(WORDS[last - 1])[2].partition(WORDS[last])[0]
    return gap.removeprefix(ending) if gap.startswith(ending) else ""


def role_parts(texts: Sequence[str], headers: Mapping[str, str]) -> Iterator[tuple[str, int, int]]:
    """Yield (role, first token, end) of the parts of a document whose tokens are `texts`.

    Tokens before the first header have the role "".
    """
    whole, starts = "".join(texts), [0]
    for text in texts:
        starts.append(starts[-1] + len(text))
    longest = sorted(headers.items(), key=lambda one: -len(one[1]))
    begins: dict[int, str] = {}  # character -> role
    for role, header in longest:
        place = whole.find(header)
        while place >= 0:
            begins.setdefault(place, role)  # of two headers that begin here, the longer one
            place = whole.find(header, place + 1)
    borders, token = [(0, "")], 0
    for place in sorted(begins):
        while starts[token + 1] <= place:
            token += 1
        borders.append((token, begins[place]))
    for (first, role), (end, _) in zip(borders, [*borders[1:], (len(texts), "")], strict=True):
        if first < end:
            yield role, first, end
