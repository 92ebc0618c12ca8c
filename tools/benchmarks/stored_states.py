"""Measure the reader of stored hidden states: packs in random order, files in the page cache.

    python -m tools.benchmarks.stored_states [--hidden-size 4096 --seq-length 2048 --packs 64]

It prints the rates of writing and of reading for a second of CPU time, so that a busy machine does not
matter, and the size of a million loss tokens on disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mkd.data.stored.cache_meta import HiddenMeta
from mkd.data.stored.teacher_hidden import HiddenPart, HiddenWriter


def describe(packs: int, hidden_size: int, seq_length: int) -> HiddenMeta:
    """Return the description of a cache of random states, in one shard."""
    return HiddenMeta(
        hidden_size=hidden_size,
        states_dtype="bfloat16",
        config={},
        vocab_size=1,
        teacher="random states",
        weights_fingerprint="",
        vocabulary_fingerprint="",
        data={"seq_length": seq_length},
        parts={"train": packs},
        samples_per_shard=packs,
    )


def measure(folder: Path, meta: HiddenMeta) -> tuple[float, float, float]:
    """Return bytes a CPU second of writing and of reading, and bytes of a row on disk."""
    packs, length = meta.parts["train"], meta.data["seq_length"]
    rows = np.random.default_rng(0).integers(0, 256, size=(length, meta.row_bytes), dtype=np.uint8)
    path, digest, total = meta.shard_path(folder, "train", 0), b"0" * 16, packs * length * meta.row_bytes
    start = time.process_time()
    with HiddenWriter(path, meta) as writer:
        for sample in range(packs):
            writer.add(sample, digest, rows)
    written_s, part = time.process_time() - start, HiddenPart(folder, "train", meta)
    order = np.random.default_rng(1).permutation(packs).tolist()
    start = time.process_time()
    for sample in order:
        assert len(part.rows(sample, digest).states) == length
    read_s = time.process_time() - start
    return total / written_s, total / read_s, path.stat().st_size / (packs * length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--hidden-size", 4096), ("--seq-length", 2048), ("--packs", 64)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    meta = describe(args.packs, args.hidden_size, args.seq_length)
    with tempfile.TemporaryDirectory() as folder:
        written, read, of_row = measure(Path(folder), meta)
    tokens = read / meta.row_bytes
    print(
        f"written {written / 1e6:,.0f} MB/s of CPU time; read {read / 1e6:,.0f} MB/s, {tokens:,.0f} tokens/s"
    )
    print(f"{of_row:.1f} bytes of a token on disk, {of_row * 1e6 / 2**30:.2f} GiB for a million")
    return 0


if __name__ == "__main__":
    sys.exit(main())
