"""Raw files to corpora: content, independence of workers, and nothing half-done on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import RECORDS_VERSION, StoreSummary, build_store, cache_key
from mkd.data.quarantine import MAX_REPORTED_ERRORS
from mkd.errors import EXIT_DATA, ErrorList
from mkd.run.fingerprints import _corpus
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.datasets import open_datasets
from tests.reported import refused
from tests.tokenizers.trained import train_hf_tokenizer

MESSAGES = {"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_text_and_conversations(tokenizer, write_jsonl, tmp_path):
    path = write_jsonl(
        "a.jsonl", {"text": "The fox"}, {"text": ""}, MESSAGES, {"prompt": "p", "completion": "c"}
    )
    prefix = str(tmp_path / "new" / "corpus")
    summary = build_store([path], prefix, tokenizer, True)
    store = TokenStore(prefix)
    ids, loss = store.document(2)
    assert (ids.tolist(), loss.tolist()) == tuple(
        map(list, tokenizer.apply_chat_template(Conversation(MESSAGES["messages"])))
    )
    targets = sum(int(store.document(i)[1][1:].sum()) for i in range(4))
    highest = max(int(store.document(i)[0].max()) for i in range(4))
    kinds, ends = ("messages", "prompt-completion", "text"), {"end_of_turn", "eos"} & set(tokenizer.roles)
    ends = tuple(sorted({tokenizer.roles[name] for name in ends}))
    assert summary == StoreSummary(4, store.num_tokens, targets, highest, kinds=kinds, trained_ends=ends)
    meta = json.loads(Path(prefix + ".meta.json").read_text())
    assert meta["tokenizer_fingerprint"] == tokenizer.fingerprint and meta["append_eod"] is True
    assert (
        meta["sources"] == [{"path": path, "bytes": Path(path).stat().st_size}]
        and meta["tokens"] == summary.tokens
    )


def test_text_alone_has_no_mask_file(tokenizer, write_jsonl, tmp_path):
    build_store([write_jsonl("a.jsonl", {"text": "fox"})], str(tmp_path / "c" / "c"), tokenizer, False)
    assert set(files_of(tmp_path / "c")) == {"c.bin", "c.idx", "c.meta.json"}
    assert np.fromfile(tmp_path / "c/c.bin", dtype=np.uint16).tolist() == tokenizer.encode("fox")


def test_bytes_do_not_depend_on_workers(tokenizer, write_jsonl, tmp_path):
    records = [({"text": f"fox {i} " * (i % 9)}, MESSAGES)[i % 2] for i in range(1200)]
    inputs = [write_jsonl("a.jsonl", *records), write_jsonl("b.jsonl", *records[:5])]
    summaries = [
        build_store(inputs, str(tmp_path / f"{n}" / "c"), tokenizer, True, workers=n) for n in (0, 2)
    ]
    assert summaries[0] == summaries[1] and summaries[0].documents == 1205
    assert files_of(tmp_path / "0") == files_of(tmp_path / "2")


def test_a_failure_keeps_the_old_corpus_and_leaves_nothing_else(tokenizer, write_jsonl, tmp_path):
    prefix = str(tmp_path / "c" / "c")
    build_store([write_jsonl("a.jsonl", MESSAGES)], prefix, tokenizer, True)
    before = files_of(tmp_path / "c")
    with refused("record-not-json: not valid JSON"):
        build_store([write_jsonl("b.jsonl", {"text": "ok"}, b"{")], prefix, tokenizer, True)
    assert files_of(tmp_path / "c") == before


def test_what_a_killed_build_has_left_goes(tokenizer, write_jsonl, tmp_path):
    prefix, path = str(tmp_path / "c" / "c"), write_jsonl("a.jsonl", *[{"text": "fox " * 50}] * 20000)
    code = f"""if True:
        import os, sys
        from mkd.data.corpus.store_builder import build_store
        from tests.tokenizers.trained import train_hf_tokenizer
        from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
        tokenizer = HuggingFaceTokenizer(train_hf_tokenizer())
        build_store([{path!r}], {prefix!r}, tokenizer, True, progress=lambda: os.kill(os.getpid(), 9))
    """
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    assert len(files_of(tmp_path / "c")) >= 2 and all(
        ".partial-" in name for name in files_of(tmp_path / "c")
    )
    build_store([write_jsonl("b.jsonl", {"text": "fox"})], prefix, tokenizer, True)
    assert set(files_of(tmp_path / "c")) == {"c.bin", "c.idx", "c.meta.json"}


def test_what_progress_raises_ends_the_build(tokenizer, write_jsonl, tmp_path):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(
            [write_jsonl("a.jsonl", {"text": "fox"})],
            str(tmp_path / "c" / "c"),
            tokenizer,
            True,
            progress=stop,
        )
    assert not files_of(tmp_path / "c")


def test_replacing_a_masked_corpus_removes_its_mask(tokenizer, write_jsonl, tmp_path):
    prefix = str(tmp_path / "c" / "c")
    build_store([write_jsonl("a.jsonl", MESSAGES)], prefix, tokenizer, True)
    build_store([write_jsonl("a.jsonl", {"text": "fox"})], prefix, tokenizer, True)
    assert set(files_of(tmp_path / "c")) == {"c.bin", "c.idx", "c.meta.json"}


def test_several_malformed_records_are_reported_at_once(tokenizer, write_jsonl, tmp_path):
    path = write_jsonl("a.jsonl", b"{", {"text": "ok"}, {"body": 1}, {"text": None})
    with pytest.raises(ErrorList) as caught:
        build_store([path], str(tmp_path / "c"), tokenizer, True)
    text = str(caught.value)
    assert text.startswith("4 problems:") and caught.value.exit_code == EXIT_DATA
    assert (
        all(f"{path}:{line}: " in text for line in (1, 3, 4)) and text.count("why:") == text.count("do:") == 4
    )
    assert "3 bad records: more than --max-bad-records 0" in text


def test_at_most_ten_malformed_records_are_reported(tokenizer, write_jsonl, tmp_path):
    with pytest.raises(ErrorList) as caught:
        build_store([write_jsonl("a.jsonl", *[b"{"] * 5000)], str(tmp_path / "c"), tokenizer, True)
    assert len(caught.value.errors) == MAX_REPORTED_ERRORS + 1
    assert "bad records, where reading stopped: more than --max-bad-records 0" in str(caught.value)


def test_nothing_to_train_on(tokenizer, write_jsonl, tmp_path):
    with refused("data-file-empty: no tokens in"):
        build_store([write_jsonl("a.jsonl", {"text": ""})], str(tmp_path / "c"), tokenizer, False)
    with refused("data-file-unreadable: cannot be read"):
        build_store([str(tmp_path / "missing.jsonl")], str(tmp_path / "c"), tokenizer, True)


def test_a_folder_that_cannot_be_written(tokenizer, write_jsonl, tmp_path):
    (tmp_path / "file").write_text("")
    with refused("data-not-writable: the corpus cannot be written"):
        build_store([write_jsonl("a.jsonl", {"text": "x"})], str(tmp_path / "file" / "c"), tokenizer, True)


def test_cache_key_is_the_content_and_what_decides_the_tokens(tokenizer, write_jsonl):
    key = cache_key([write_jsonl("a.jsonl", {"text": "fox"})], tokenizer, True)
    assert key == cache_key([write_jsonl("renamed.jsonl", {"text": "fox"})], tokenizer, True)
    other_template = HuggingFaceTokenizer(train_hf_tokenizer(template="{{ messages }}"))
    others = [
        cache_key([write_jsonl("a.jsonl", {"text": "dog"})], tokenizer, True),
        cache_key([write_jsonl("a.jsonl", {"text": "fox"})], tokenizer, False),
        cache_key([write_jsonl("a.jsonl", {"text": "fox"})], other_template, True),
    ]
    assert len({key, *others}) == 4


def test_a_cached_corpus_of_another_version_is_made_again(tokenizer, write_jsonl, tmp_path):
    """Runs that resume compare its tokens and its key, which stay, but not the version."""
    path, cache = write_jsonl("a.jsonl", {"text": "fox"}), str(tmp_path / "cache")
    settings = dict(tokenizer=tokenizer, seq_length=16, vocab_size=tokenizer.vocab_size, data_path=[path])

    def opened():
        (member,) = open_datasets(cache_dir=cache, **settings)[0].members
        return member.store, _corpus(member.store)

    store, known = opened()
    meta = Path(f"{store.prefix}.meta.json")
    earlier = json.loads(meta.read_text()) | {"records_version": RECORDS_VERSION - 1}
    meta.write_text(json.dumps(earlier))
    assert _corpus(TokenStore(store.prefix)) == known and TokenStore(store.prefix).meta == earlier
    again, now = opened()
    assert now == known and again.meta["records_version"] == RECORDS_VERSION
    assert again.meta["cache_key"] == earlier["cache_key"]
