"""Check that measuring says how far it is."""

from __future__ import annotations

import re

from mkd.data.measured_text import TimedBatches


def test_every_pass_says_what_is_left():
    lines: list[str] = []
    batches = TimedBatches([None] * 4, lines.append, every_s=0)
    assert list(batches) == [None] * 4 and len(batches) == 4
    assert [re.sub("most .* left", "most T left", line) for line in lines] == [
        f"measured {done} of 4 batches, at most T left" for done in (1, 2, 3)
    ]
    list(batches)
    assert len(lines) == 6


def test_a_short_pass_is_quiet():
    lines: list[str] = []
    list(TimedBatches([None] * 4, lines.append))
    assert lines == []


def test_the_cuts_of_a_batch_say_how_far_they_are():
    lines: list[str] = []
    batches = TimedBatches([None] * 2, lines.append, every_s=0)
    for _ in batches:
        assert list(batches.cuts("abc")) == ["a", "b", "c"]
    assert [line for line in lines if "cuts" in line] == [
        f"measured {done} of 3 cuts on batch {batch} of 2" for batch in (1, 2) for done in (1, 2)
    ]
