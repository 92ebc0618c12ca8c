"""From flags to data sets: caches, splits, and errors that all processes see."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mkd.data.corpus.store_builder import build_store
from mkd.errors import DataError
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.datasets import open_datasets
from tests.reported import refused, reports
from tests.tokenizers.trained import train_hf_tokenizer


@pytest.fixture
def open_data(tokenizer, tmp_path):
    def open_(*data_path, **options):
        cache = str(tmp_path / "cache")
        options = {"tokenizer": tokenizer, "seq_length": 16, "vocab_size": 350, "cache_dir": cache, **options}
        return open_datasets(data_path=list(data_path), **options)

    return open_


@pytest.fixture
def texts(write_jsonl):
    return write_jsonl("texts.jsonl", *({"text": f"The fox {i}"} for i in range(40)))


def cached(tmp_path):
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir() if path.is_file()}


def loss_tokens(dataset):
    return sum(int(dataset[i].loss_mask.sum()) for i in range(len(dataset)))


def test_a_raw_file_is_tokenised_once(open_data, texts, tmp_path, tokenizer):
    train, valid = open_data(texts)
    expected = sum(len(tokenizer.encode(f"The fox {i}")) for i in range(40))
    assert valid is None and loss_tokens(train) == expected
    before = cached(tmp_path)
    open_data(texts)
    assert cached(tmp_path) == before and len(before) == 3


def test_a_change_that_keeps_size_and_time_of_a_file_is_seen(open_data, texts, tmp_path):
    """The key of the cache is the SHA-256 of the content."""
    open_data(texts)
    stat, content = os.stat(texts), Path(texts).read_bytes()
    Path(texts).write_bytes(content.replace(b"fox 7", b"dog 7"))
    os.utime(texts, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (os.stat(texts).st_size, os.stat(texts).st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    changed, _ = open_data(texts)
    assert len(cached(tmp_path)) == 6 and changed.members[0].store.document(7)[0].tolist() != ids_of(
        open_data, texts, content
    )


def ids_of(open_data, path, content):
    """Return the ids of document 7 of the file with this content."""
    Path(path).write_bytes(content)
    return open_data(path)[0].members[0].store.document(7)[0].tolist()


@pytest.mark.parametrize("end", ["bin", "idx", "loss_mask.bin"])
def test_a_flipped_bit_of_a_cache_is_mended_and_one_of_a_corpus_refused(
    open_data, write_jsonl, tmp_path, tokenizer, end
):
    path = write_jsonl("a.jsonl", *[{"prompt": "The fox", "completion": f"{i}"} for i in range(9)])
    open_data(path)
    build_store([path], str(tmp_path / "tokens"), tokenizer, True)
    (file,) = (tmp_path / "cache").glob(f"a-*[0-9a-f].{end}")
    content = file.read_bytes()
    file.write_bytes(flipped(content))
    open_data(path)
    assert file.read_bytes() == content
    (tmp_path / f"tokens.{end}").write_bytes(flipped(content))
    with refused("corpus-damaged: is damaged or incomplete") as caught:
        open_data(str(tmp_path / "tokens"))
    assert f"tokens.{end}" in caught.value.what


def flipped(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


def test_the_cache_sees_content_settings_and_tokenizer(open_data, texts, tmp_path):
    open_data(texts)
    open_data(texts, append_eod=False)
    open_data(texts, tokenizer=HuggingFaceTokenizer(train_hf_tokenizer(vocab_size=340)))
    Path(texts).write_text('{"text": "Another text"}\n')
    open_data(texts)
    assert len(cached(tmp_path)) == 12


@pytest.mark.parametrize("end", ["bin", "idx", "meta.json"])
def test_a_torn_cache_is_built_again(open_data, texts, tmp_path, end):
    train, _ = open_data(texts)
    (file,) = (tmp_path / "cache").glob(f"*.{end}")
    content, expected = file.read_bytes(), loss_tokens(train)
    file.write_bytes(content[: len(content) // 2])
    again, _ = open_data(texts)
    assert file.read_bytes() == content and loss_tokens(again) == expected


def test_split_by_documents(open_data, texts):
    whole, _ = open_data(texts)
    train, valid = open_data(texts, split="90,10,0")
    assert (train.num_documents, valid.num_documents) == (36, 4)
    assert loss_tokens(train) + loss_tokens(valid) == loss_tokens(whole)
    assert open_data(texts, split="999,1,0")[1] is None  # not a document


def test_validation_data_of_its_own(open_data, texts, write_jsonl, tokenizer):
    held_out = write_jsonl("valid.jsonl", {"text": "lazy dog"})
    train, valid = open_data(texts, valid_data_path=[held_out], split="50,50,0")
    assert loss_tokens(train) == loss_tokens(open_data(texts)[0])
    assert loss_tokens(valid) == len(tokenizer.encode("lazy dog"))


def test_blend_of_raw_and_tokenised(open_data, texts, write_jsonl, tokenizer, tmp_path):
    prefix = str(tmp_path / "tokens")
    build_store([write_jsonl("b.jsonl", {"text": "dog"})], prefix, tokenizer, True)
    train, _ = open_data("1", texts, "3", prefix)
    assert train.weights == [1.0, 3.0] and len(train.members) == 2
    train, _ = open_data(texts, prefix)
    assert train.weights is None


@pytest.mark.fault(28)
def test_tokens_of_another_tokenizer_are_refused(open_data, texts, tmp_path):
    prefix = str(tmp_path / "tokens")
    build_store([texts], prefix, HuggingFaceTokenizer(train_hf_tokenizer(vocab_size=340)), True)
    with refused("corpus-of-another-model: with another tokenizer"):
        open_data(prefix)


@pytest.mark.fault(28)
def test_a_tokenizer_of_the_same_size_is_another_one(open_data, texts, tmp_path, tokenizer):
    """The hash of the vocabulary shows it: all ids are in range, but mean other strings."""
    hf = train_hf_tokenizer()
    state = json.loads(hf.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["x"], vocabulary["z"] = vocabulary["z"], vocabulary["x"]
    swapped = Backend.from_str(json.dumps(state))
    other = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=swapped, eos_token="<|endoftext|>"))
    assert other.vocab_size == tokenizer.vocab_size and other.encode("fox") != tokenizer.encode("fox")
    build_store([texts], str(tmp_path / "tokens"), other, True)
    with refused("corpus-of-another-model: with another tokenizer"):
        open_data(str(tmp_path / "tokens"))
    open_data(texts)
    open_data(texts, tokenizer=other)
    assert len(cached(tmp_path)) == 6, "and has a cache of its own"


def test_token_ids_beyond_the_model_are_refused_at_once(open_data, make_store, texts):
    with refused("token-beyond-vocabulary: the model knows 0 to"):
        open_data(make_store([[1, 2], [3, 350]]).prefix)
    with refused("token-beyond-vocabulary: the model knows 0 to"):
        open_data(texts, vocab_size=100)


@pytest.mark.parametrize("path", ["missing.jsonl", "missing"])
def test_missing_paths(open_data, texts, path):
    with refused("data-path-not-found: nothing found"):
        open_data(path)
    with refused("data-path-not-found: nothing found") as caught:
        open_data(texts, valid_data_path=[path])
    assert caught.value.what.startswith(f"--valid-data-path {path}")


def test_nothing_left_for_training(open_data, texts):
    with refused("split-leaves-nothing: leaves no document for training"):
        open_data(texts, split="0,1,0")


@pytest.mark.fault(35)
def test_an_all_masked_file_is_refused(open_data, write_jsonl):
    path = write_jsonl("a.jsonl", {"messages": [{"role": "user", "content": "no answer"}]})
    with refused("corpus-without-loss-tokens"):
        open_data(path)


class Ranks:
    """The function `share` for two threads in place of processes: rank 1 waits for the value of rank 0."""

    def __init__(self):
        self.ready, self.value = threading.Event(), None

    def share_of(self, rank):
        def share(value):
            if rank == 0:
                self.value = value
                self.ready.set()
            assert self.ready.wait(30)
            return self.value

        return share


def run_two_ranks(open_data, *paths, **options):
    ranks, outcomes = Ranks(), [None, None]

    def run(rank):
        try:
            outcomes[rank] = open_data(*paths, is_builder=rank == 0, share=ranks.share_of(rank), **options)
        except DataError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def test_other_processes_open_what_the_builder_made(open_data, texts):
    (first, _), (second, _) = run_two_ranks(open_data, texts)
    assert len(first) == len(second) and loss_tokens(first) == loss_tokens(second)


def test_an_error_of_the_builder_is_raised_by_all(open_data, write_jsonl):
    outcomes = run_two_ranks(open_data, write_jsonl("a.jsonl", b"{"))
    assert reports(outcomes) == ["record-not-json: not valid JSON"] * 2


def test_even_an_unexpected_error_of_the_builder_reaches_all(open_data, texts):
    class Broken(HuggingFaceTokenizer):
        def encode(self, text):
            raise ZeroDivisionError("broken")

    outcomes = run_two_ranks(open_data, texts, tokenizer=Broken(train_hf_tokenizer()))
    assert reports(outcomes) == ["data-preparation-failed"] * 2
    assert all("ZeroDivisionError: broken" in error.what for error in outcomes)


def test_description_of_a_cache(open_data, texts, tmp_path, tokenizer):
    open_data(texts)
    (meta,) = (tmp_path / "cache").glob("texts-*.meta.json")
    content = json.loads(meta.read_text())
    assert content["tokenizer_fingerprint"] == tokenizer.fingerprint and content["documents"] == 40
