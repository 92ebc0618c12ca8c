"""Tags of a tokenised corpus: it keeps their key, and a run that reads other tags refuses it."""

from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.config.tag_rules import TagRules
from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import build_store, cache_key
from mkd.data.records.wanted import WantedRecords
from mkd.data.tags import require_tag_key
from mkd.resolve.preflight import data_problems
from tests.data.datasets import open_datasets
from tests.plan.checks.test_problems import BASE
from tests.reported import refused, reports

RECORDS = [{"text": "a fox", "source": "math", "domain": "code"}, {"text": "a dog", "source": "math"}]
TEACHERS = {"one": ("math",), "other": ()}


def rules(key, **files):
    return TagRules(TEACHERS, files, {}, key=key)


@pytest.fixture
def corpus(tmp_path, tokenizer, write_jsonl):
    """Return a function that makes the corpus of a key."""

    def make(key):
        prefix = str(tmp_path / f"by-{key}")
        build_store(
            [write_jsonl("a.jsonl", *RECORDS)], prefix, tokenizer, True, wanted=WantedRecords(tag=key)
        )
        return prefix

    return make


def test_a_corpus_of_another_key_is_refused(corpus, tokenizer, tmp_path):
    by_source, plain = corpus("source"), corpus(None)
    store = TokenStore(by_source)
    assert store.meta["tag_key"] == "source" and "tag_key" not in TokenStore(plain).meta
    settings = dict(
        tokenizer=tokenizer, seq_length=64, vocab_size=tokenizer.vocab_size, cache_dir=str(tmp_path)
    )
    data, _ = open_datasets(data_path=[by_source], tags=rules("source"), **settings)
    assert data.tag_names == ("math",)
    with refused("corpus-of-another-model: by the key source, but tag-key is domain"):
        open_datasets(data_path=[by_source], tags=rules("domain"), **settings)
    with refused("corpus-of-another-model: by the key source, but the run has no tag-key"):
        require_tag_key(store, rules(None, **{by_source: "law"}), by_source)
    require_tag_key(store, rules("source", **{by_source: "law"}), by_source)  # of records without the key
    with refused("corpus-of-another-model: without the tags of its records"):
        require_tag_key(TokenStore(plain), rules("domain"), plain)
    require_tag_key(TokenStore(plain), rules("domain", **{plain: "law"}), plain)
    del store.meta["tag_key"]
    with refused("corpus-of-another-model: by a key that it does not name, but tag-key is source"):
        require_tag_key(store, rules("source"), by_source)


def test_the_checks_before_a_run_see_it(corpus):
    for key, codes in (("source", []), ("domain", ["corpus-of-another-model: by the key source"])):
        flags = ("--teacher-combination", "route", "--tag-key", key)
        config = load_config([*BASE, *flags]).config
        paths = {corpus("source"): "--data-path"}
        assert reports(data_problems(paths, None, config, WantedRecords(tag=key))) == codes


def test_the_key_is_part_of_the_cached_corpus(tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", *RECORDS)
    keys = {
        cache_key([path], tokenizer, True, wanted=WantedRecords(tag=k)) for k in (None, "source", "domain")
    }
    assert len(keys) == 3
