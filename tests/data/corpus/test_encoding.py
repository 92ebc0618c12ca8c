"""Files to encoded batches: the same order for any number of workers, and errors that name their place."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from mkd.data.corpus.encoding import RECORDS_PER_BATCH, WORKER_BYTES, encode_files, useful_workers
from mkd.data.records.ignored_keys import IgnoredKeys


def joined(chunks):
    chunks = list(chunks)
    arrays = [
        np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("ids", "loss", "lengths")
    ]
    ignored = IgnoredKeys()
    for chunk in chunks:
        ignored.add(chunk.ignored)
    return arrays, [str(ignored), *(str(error) for chunk in chunks for error in chunk.errors)]


def test_order_and_errors_do_not_depend_on_workers(tokenizer, write_jsonl):
    first = write_jsonl(
        "a.jsonl", *({"text": f"fox {i} " * (i % 7), "id": i} for i in range(3 * RECORDS_PER_BATCH + 5))
    )
    second = write_jsonl("b.jsonl", *({"prompt": f"{i}", "completion": "dog"} for i in range(9)), b"{")
    alone, errors = joined(encode_files([first, second], tokenizer, True))
    state = torch.get_rng_state()
    shared, shared_errors = joined(encode_files([first, second], tokenizer, True, workers=2))
    assert all(np.array_equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert len(alone[2]) == 3 * RECORDS_PER_BATCH + 14
    assert errors == shared_errors and errors[0] == f"ignored keys: id ({3 * RECORDS_PER_BATCH + 5})"
    assert errors[1].startswith(f"{second}:10: not valid JSON")
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [(0, 8, 0), (2, 8, 2), (1.99, 8, 0), (5.5, 8, 5), (100, 8, 8), (100, 1, 0), (100, 0, 0)],
)
def test_processes_are_for_large_files(size, most, expected):
    assert useful_workers(int(size * WORKER_BYTES), most) == expected


GROUP = """
import os, signal, sys
from mkd.data.corpus.encoding import in_workers

class Slow:
    def __call__(self, number):
        import time
        time.sleep(0.01)
        return number

if __name__ == "__main__":
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    for number in in_workers(range(100), Slow(), 2):
        if number == 5:
            os.killpg(0, signal.SIGTERM)
    print(number, received)
"""


@pytest.mark.slow
def test_a_signal_to_all_leaves_the_workers(tmp_path):
    (tmp_path / "group.py").write_text(GROUP)
    command = [sys.executable, str(tmp_path / "group.py")]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, start_new_session=True)
    assert (ended.returncode, ended.stdout) == (0, "99 [1]\n"), ended.stderr


def test_a_document_is_where_its_line_is(tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", {"text": "one"}, {"text": ""}, {"text": "three"})
    (chunk,) = encode_files([path], tokenizer, True)
    parts = np.split(chunk.ids, np.cumsum(chunk.lengths)[:-1])
    assert [tokenizer.decode(part) for part in parts] == [
        "one<|endoftext|>",
        "<|endoftext|>",
        "three<|endoftext|>",
    ]


def test_an_unreadable_file_is_an_error_of_its_own(tokenizer, write_jsonl, tmp_path):
    good = write_jsonl("a.jsonl", {"text": "one"})
    (tmp_path / "b.parquet").write_bytes(b"junk")
    arrays, errors = joined(encode_files([str(tmp_path / "b.parquet"), good], tokenizer, True))
    assert len(arrays[2]) == 1 and len(errors) == 2 and "b.parquet is not a valid parquet file" in errors[1]
