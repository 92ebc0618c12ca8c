"""Text token by token, and lines of a column."""

from __future__ import annotations

import pytest

from mkd.chat.text_stream import TextStream
from mkd.chat.wrapped_text import WrappedText, printable, width_of, wrap
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.tokenizers.trained import llama_tokenizer, train_hf_tokenizer

TEXTS = ("the fox", " the  fox\n", "fox\u00e9 \U0001f98a\U0001f98a the", "\u4f60\u597d", "the\ufffd")


@pytest.mark.parametrize("make", [train_hf_tokenizer, llama_tokenizer])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text_behind_the_prompt(make, text):
    tokenizer = HuggingFaceTokenizer(make())
    prompt = tokenizer.encode("fox the")
    ids = tokenizer.encode("fox the" + text)[len(prompt) :]
    assert tokenizer.encode("fox the" + text)[: len(prompt)] == prompt
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push(one) for one in ids]
    assert "".join(pieces) + stream.end() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_are_shown_in_the_end():
    tokenizer = HuggingFaceTokenizer(train_hf_tokenizer())
    first = tokenizer.encode("\u4f60")[0]
    stream = TextStream(tokenizer, tokenizer.encode("fox"))
    assert [stream.push(first), stream.push(first)] == ["", ""]
    assert set(stream.end()) == {"\ufffd"}


def test_lines_have_the_width_of_their_cells():
    text = "the quick brown fox \u4f60\u597d\u4f60\u597d jumps\n\nover-a-very-long-word-here the dog"
    whole, grown = WrappedText(10), WrappedText(10)
    whole.add(text)
    for character in text:
        grown.add(character)
    assert whole.lines == grown.lines
    assert max(map(width_of, whole.lines)) <= 10
    assert "".join(whole.lines).replace(" ", "") == text.replace("\n", "").replace(" ", "")
    assert wrap("", 10) == [""] and wrap("the quick brown", 10) == ["the quick", "brown"]


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[2Jb\tc\r\nd\x07") == "a\ufffd[2Jb    c\nd\ufffd"
