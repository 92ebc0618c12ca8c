"""Blends, splits and paths, as written on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkd.config.data_files import Blend, is_raw, parse_blend
from mkd.data.corpus.sources import find_prefix
from mkd.errors import DataError, UsageError


@pytest.mark.parametrize(
    ("values", "blend"),
    [
        (["a"], Blend(("a",), None)),
        (["a", "b"], Blend(("a", "b"), None)),
        (["3", "a", "0.5", "b"], Blend(("a", "b"), (3.0, 0.5))),
        (["1"], Blend(("1",), None)),
        (["./1", "a", "2"], Blend(("./1", "a", "2"), None)),
    ],
)
def test_blends(values, blend):
    assert parse_blend(values) == blend


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "--data-path is empty"),
        (["1", "a", "2"], "--data-path has 3 values: a weight or a path is missing"),
        (["1", "a", "b", "c"], "b stands where a positive weight is expected"),
        (["0", "a"], "0 stands where"),
        (["nan", "a"], "nan stands where"),
        (["1", "a", "-2", "b"], "-2 stands where"),
    ],
)
def test_malformed_blends(values, message):
    with pytest.raises(UsageError) as caught:
        parse_blend(values)
    assert message in str(caught.value) and caught.value.do


def test_prefixes_with_and_without_suffix(make_store):
    prefix = make_store([[1, 2]]).prefix
    assert {find_prefix(prefix + end) for end in ("", ".bin", ".idx")} == {prefix}
    assert is_raw("a.jsonl") and is_raw("b/c.parquet") and not is_raw(prefix)


def test_missing_path_lists_where_was_looked(tmp_path):
    with pytest.raises(DataError) as caught:
        find_prefix(str(tmp_path / "c.bin"), "--valid-data-path")
    text = str(caught.value)
    assert text.startswith("--valid-data-path ") and f"looked for {tmp_path}/c.bin.bin with" in text
    assert f"{tmp_path}/c.bin with {tmp_path}/c.idx" in text and ".jsonl" in text and "do:" in text


@pytest.mark.parametrize(("missing", "there"), [("idx", "bin"), ("bin", "idx")])
def test_half_of_a_pair_is_named(missing, there, make_store):
    prefix = make_store([[1, 2]]).prefix
    Path(f"{prefix}.{missing}").unlink()
    for path in (prefix, f"{prefix}.{there}"):
        with pytest.raises(DataError) as caught:
            find_prefix(path)
        assert caught.value.what == f"--data-path {path}: {prefix}.{missing} is missing"
        assert caught.value.why.startswith(f"{prefix}.{there} is there") and caught.value.do
