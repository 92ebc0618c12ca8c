"""Empty, one-token, overlong and huge documents: the result, and the time and memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mkd.data.corpus import encoding
from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import build_store
from mkd.data.dataset import PackedDataset
from mkd.data.records import parsing
from mkd.errors import ErrorList
from mkd.tokenizers.load import load_tokenizer
from tests.data.pairs import chat_tokenizer
from tests.tokenizers.trained import write_ranks

ROOT = Path(__file__).parents[2]
HUGE = 20_000_000  # characters
BUILD = """
import resource, sys, time
from mkd.data.corpus.store_builder import build_store
from mkd.errors import ErrorList
from mkd.tokenizers.load import load_tokenizer
tokenizer = load_tokenizer("HuggingFaceTokenizer", sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
build_store([sys.argv[2]], sys.argv[3], tokenizer, True)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(time.process_time() - start, (peak - before) / 1024)
"""


def open_packs(store, **options):
    return PackedDataset(store, **{"seq_length": 8, "vocab_size": 1000, "pad_id": 99, **options})


@pytest.mark.fault(25)
def test_empty_and_one_token_documents_have_no_loss_and_no_place(make_store):
    dataset = open_packs(make_store([[], [5], [1, 2, 3], [], [6]]))
    assert len(dataset) == 1 and dataset[0].tokens.tolist() == [1, 2, 3, 99, 99, 99, 99, 99]
    assert dataset.num_loss_tokens == 2 and dataset[0].lengths.tolist() == [3]


@pytest.mark.parametrize(
    ("overlong", "pieces", "loss_tokens"),
    [("split", [8, 8, 8, 1, 2], 24 + 1), ("truncate", [8, 2], 7 + 1), ("drop", [2], 1)],
)
@pytest.mark.fault(25)
def test_overlong_documents(make_store, overlong, pieces, loss_tokens):
    """25 tokens have 24 labels; the last piece of one token has none and is skipped."""
    dataset = open_packs(make_store([range(1, 26), [1, 2]]), overlong=overlong)
    assert sorted(dataset.index.pieces(0, dataset.index.num_pieces).length.tolist()) == sorted(
        n for n in pieces if n > 1
    )
    assert (
        dataset.num_loss_tokens
        == loss_tokens
        == sum(int(dataset[i].loss_mask.sum()) for i in range(len(dataset)))
    )


@pytest.fixture
def huge(tmp_path):
    path = tmp_path / "huge.jsonl"
    path.write_text(json.dumps({"text": "a" * HUGE}) + "\n" + json.dumps({"text": "fox"}) + "\n")
    return path


@pytest.mark.fault(25)
@pytest.mark.slow
def test_20_mb_of_one_letter_take_seconds_and_little_memory(huge, hf_dir, tmp_path):
    """Time is measured in processor seconds, because other programs may run on this machine."""
    command = [sys.executable, "-c", BUILD, hf_dir, str(huge), str(tmp_path / "corpus")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    seconds, mebibytes = map(float, result.stdout.split())
    assert seconds < 5 and mebibytes < 1000


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer"])
def test_a_huge_text_becomes_documents_that_join_to_it(
    kind, write_jsonl, hf_dir, spm_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(encoding, "MAX_CHARACTERS", 1000)
    models = {"HuggingFaceTokenizer": hf_dir, "SentencePieceTokenizer": spm_file}
    tokenizer = load_tokenizer(kind, models.get(kind) or str(write_ranks(tmp_path)))
    path = write_jsonl("long.jsonl", {"text": "a fox, " * 300})
    summary = build_store([path], str(tmp_path / "corpus"), tokenizer, True)
    store = TokenStore(str(tmp_path / "corpus"))
    dataset = open_packs(store, seq_length=1024, vocab_size=tokenizer.vocab_size, pad_id=0)
    texts = [tokenizer.decode(store.document(i)[0][:-1].tolist()) for i in range(3)]
    assert "".join(texts).replace(" ", "") == "afox," * 300 and summary.documents == 3
    assert all(text.strip().startswith(("a", "fox")) for text in texts), "cut at a blank"
    for i in range(3):
        assert np.array_equal(store.document(i)[0][:-1], tokenizer.encode(texts[i]))
    assert dataset.num_loss_tokens == summary.tokens - 3


def records_of(size: int) -> list[dict]:
    """Return a conversation, and a prompt with its completion, of this many characters."""
    answer = "a" * (size - len("user" + "fox?" + "assistant"))
    chat = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": answer}]
    return [{"messages": chat}, {"prompt": "a" * (size // 2), "completion": "a" * (size - size // 2)}]


@pytest.mark.fault(25)
def test_huge_conversations_and_completions_are_bad_records(write_jsonl, tmp_path, monkeypatch):
    """Unlike text, conversations and completions are not cut.

    One that is too long is skipped and listed, or refused; one that just fits is kept.
    """
    monkeypatch.setattr(parsing, "MAX_CHARACTERS", 1000)
    path = write_jsonl("long.jsonl", *records_of(1001), *records_of(1000), {"text": "fox"})
    tokenizer, prefix = chat_tokenizer(350), str(tmp_path / "corpus")
    summary = build_store([path], prefix, tokenizer, True, max_bad_records=2)
    assert (summary.documents, summary.bad_records) == (3, 2)
    listed = [json.loads(line) for line in Path(prefix + ".quarantine.jsonl").read_text().splitlines()]
    assert [(entry["line"], entry["reason"]) for entry in listed] == [
        (1, "a conversation of 1001 characters, more than 1000"),
        (2, "a prompt and completion of 1001 characters, more than 1000"),
    ]
    with pytest.raises(
        ErrorList, match="(?s)long.jsonl:1: a conversation of 1001 .*more than --max-bad-records 1"
    ):
        build_store([path], prefix, tokenizer, True, max_bad_records=1)
