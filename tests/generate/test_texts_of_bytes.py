"""Completions whose bytes are not UTF-8: their text would hold U+FFFD, which the teacher has not written."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mkd.generate.generate_job import completion_of
from mkd.generate.generate_settings import Filter
from mkd.generate.journal import Journal
from mkd.generate.selection import Index, Selection, summary_lines
from mkd.generate.teacher_prompts import TeacherPrompt
from mkd.kinds.sampled.sampler.rollouts import LENGTH, STOP, Request, Rollout
from mkd.tokenizers.load import open_tokenizer
from tests.tokenizers.trained import train_hf_tokenizer

CHARACTER = "\u4eac".encode()
WRITTEN = (
    (CHARACTER, STOP, True),
    (CHARACTER[:2], LENGTH, False),  # cut in the middle of a character
    (b"C" + CHARACTER[1:] + b" table", STOP, False),
    ("a \ufffd of the teacher".encode(), STOP, True),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_hf_tokenizer().save_pretrained(folder)
    return open_tokenizer(folder)


def test_completions_that_are_not_utf8_are_dropped_and_counted(tokenizer, tmp_path):
    reader = SimpleNamespace(tokenizer=tokenizer, stops={tokenizer.eos_id}, context_length=100)
    prompt = TeacherPrompt(0, "p.jsonl", 1, "Hello", {}, np.array(tokenizer.encode("Hello")))
    journal = Journal(tmp_path, 0)
    for sample, (data, finish, _) in enumerate(WRITTEN):
        single = {one: i for i, one in enumerate(tokenizer.token_bytes) if one is not None and len(one) == 1}
        ids = [single[data[i : i + 1]] for i in range(len(data))]
        ids += [tokenizer.eos_id] if finish == STOP else []
        numbers = np.zeros(len(ids), np.float32)
        rollout = Rollout(Request(0, sample, prompt.ids), np.array(ids), numbers, numbers, finish)
        journal.add(completion_of(reader, rollout))
    journal.close()
    rule = Filter(truncated="keep")
    selection = Selection(rule)
    records = list(selection.records(Index.read(tmp_path), [prompt], len(WRITTEN), {}))
    assert [one["completion"] for one in records] == [data.decode() for data, _, good in WRITTEN if good]
    summary = selection.summary()
    assert summary["dropped"] == {"bytes": 2} and summary["kept"] == 2
    line = "dropped 2: they have bytes that are not UTF-8, which a text cannot hold"
    assert line in summary_lines(summary, rule, 12)
