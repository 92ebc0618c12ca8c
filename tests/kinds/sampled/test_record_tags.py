"""Check that records of agents go to the teachers of their tags."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mkd.kinds.sampled.records.agent_record import RecordedRollout
from mkd.kinds.sampled.records.record_stream import RecordStream
from mkd.kinds.sampled.sampler.rollouts import STOP, Request

IDS, VALUES = np.array([1, 2]), np.zeros(2, np.float32)
RECORD = RecordedRollout(Request(0, 0, IDS), IDS, VALUES, VALUES, STOP, id="a", place=("in.jsonl", 3))


def test_tags_of_records_are_those_of_the_run():
    stream = object.__new__(RecordStream)
    stream.tag_names = ("code", "math")
    tagged = [replace(RECORD, tag=tag) for tag in ("math", "code", "math")]
    assert stream._tags(tagged).tolist() == [1, 0, 1]
    stream.tag_names = ()
    assert stream._tags([RECORD]) is None
