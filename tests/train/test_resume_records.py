"""A run resumes where a later version of mkd reads its records: with the same tokens, and not with others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mkd.data.corpus.store_builder import RECORDS_VERSION
from tests.train.command import call_main, read_metrics
from tests.train.test_resume import STEPS, argv, files, train_and_hash  # noqa: F401 (files is a fixture)

LATER = RECORDS_VERSION + 1


@contextmanager
def records_version(version: int, changes_tokens: bool = False) -> Iterator[None]:
    """Read records as another version of mkd would, which may make other tokens of them."""
    from mkd.data.corpus import cached_corpus, store_builder

    def changed(*args):
        for batch in kept(*args):
            batch.ids[:-1] ^= 1
            yield batch

    kept = store_builder.encode_files
    modules = cached_corpus, store_builder
    for module in modules:
        module.RECORDS_VERSION = version
    store_builder.encode_files = changed if changes_tokens else kept
    try:
        yield
    finally:
        store_builder.encode_files = kept
        for module in modules:
            module.RECORDS_VERSION = RECORDS_VERSION


def train_with_version(arguments, version):
    with records_version(version):
        return train_and_hash(arguments)


def main_with_version(arguments, version, changes_tokens):
    with records_version(version, changes_tokens):
        return call_main(arguments)


def descriptions(folder) -> list[dict]:
    """Return the descriptions of the corpora in a cache."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.meta.json"))]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_tokens_are_trained_on_bit_for_bit(processes, files, ranks, tmp_path):  # noqa: F811
    cache = ("--data-cache-path", tmp_path)
    whole, parts = f"one version {processes}", f"two versions {processes}"
    straight = ranks.run(train_with_version, processes, argv(files, whole, *cache), RECORDS_VERSION)
    half = argv(files, parts, *cache, "--exit-interval", STEPS // 2)
    ranks.run(train_with_version, processes, half, RECORDS_VERSION)
    (before,) = descriptions(tmp_path)
    rest = argv(files, parts, *cache, "--load", files / parts)
    assert ranks.run(train_with_version, processes, rest, LATER) == straight
    (after,) = descriptions(tmp_path)
    assert (before["records_version"], after["records_version"]) == (RECORDS_VERSION, LATER)
    assert after["sha256"] == before["sha256"]
    ours, theirs = (
        [(one["iteration"], one["loss"], one["num_loss_tokens"]) for one in read_metrics(files / run)]
        for run in (parts, whole)
    )
    assert ours == theirs and len(ours) == STEPS


def test_other_tokens_are_refused(files, ranks, tmp_path):  # noqa: F811
    cache, run = ("--data-cache-path", tmp_path), "other tokens"
    half = argv(files, run, *cache, "--exit-interval", STEPS // 2)
    ranks.run(train_with_version, 1, half, RECORDS_VERSION)
    rest = argv(files, run, *cache, "--load", files / run)
    ((code, _, errors),) = ranks.run(main_with_version, 1, rest, LATER, True)
    assert code == 66 and "error[run-differs]" in errors and "with other data.files" in errors
    ((code, _, errors),) = ranks.run(
        main_with_version, 1, [*rest, "--accept-change", "data.files"], LATER, True
    )
    assert code == 0, errors
