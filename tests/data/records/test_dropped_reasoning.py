"""Reasoning that a chat template does not write is counted once for a file."""

from __future__ import annotations

import pytest

from mkd.data.corpus.store_builder import build_store
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.tokenizers.chat_templates import CHATML_CONTROLS, REWRITES_HISTORY, THINK, said, user
from tests.tokenizers.test_chat import DROPS_REASONING
from tests.tokenizers.trained import CHATML, train_hf_tokenizer

KEPT = [user("a"), said("<think>\nso it is\n</think>\n\nb")]
INLINE = [*KEPT, user("c"), said("<think>well</think>d")]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (DROPS_REASONING, INLINE, "the reasoning of 3 of 6 assistant messages (24 characters)"),
        (REWRITES_HISTORY, THINK, "the reasoning of 3 of 6 assistant messages (33 characters)"),
        (CHATML, INLINE, None),
        (DROPS_REASONING, KEPT, None),
    ],
)
def test_reasoning_that_nothing_learns_is_counted(template, messages, expected, tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", *[{"messages": messages}] * 3)
    tokenizer = HuggingFaceTokenizer(train_hf_tokenizer(template, CHATML_CONTROLS))
    lines = build_store([str(path)], str(tmp_path / "c"), tokenizer, True).note_lines()
    found = [line for line in lines if "reasoning of" in line]
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]
