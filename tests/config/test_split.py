from __future__ import annotations

import pytest

from mkd.config.split import EXAMPLE_SPLIT, parse_split
from mkd.errors import UsageError


@pytest.mark.parametrize(
    ("text", "split", "ends"),
    [
        (EXAMPLE_SPLIT, (99, 1, 0), (0.99, 1.0)),
        ("969, 30, 1", (969, 30, 1), (0.969, 0.999)),
        ("3,1", (3, 1, 0), (0.75, 1.0)),
        ("1", (1, 0, 0), (1.0, 1.0)),
    ],
)
def test_splits(text, split, ends):
    assert parse_split(text) == split and parse_split(text).ends == ends


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2", "1,1,1,1", "nan,1", "inf"])
def test_malformed_splits(split):
    with pytest.raises(UsageError) as caught:
        parse_split(split)
    assert caught.value.code == "value-not-valid" and EXAMPLE_SPLIT in caught.value.do and caught.value.why
