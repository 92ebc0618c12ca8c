"""Benchmark the start of a run on a large corpus: the pack index, memory of a process, and fill.

The corpus is Megatron's .bin/.idx pair with random short documents. Every start is a process of its own, so
that its private memory (anonymous pages) can be told from the pages of mapped files, which all processes of a
machine share and the kernel may drop.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkd.data.corpus.known_files import SETTLED_S
from tools.benchmarks.benchmark_report import Report, Requirement, table
from tools.benchmarks.results import Other

SHORTEST, LONGEST = 5, 60  # tokens of a document
VOCAB_SIZE = 50_000
DOCUMENTS_PER_WRITE = 1 << 20
POLL_S = 0.02
MIB = 2**20


@dataclass(frozen=True)
class Start:
    """One start of a run, from its data flags to its first batch."""

    seconds: float
    private_mib: float  # private memory after the first batch, above the memory before
    mapped_mib: float  # pages of mapped files after the first batch, above those before
    peak_mib: float  # largest private memory of the process and its workers together
    packs: int
    tokens: int


@dataclass(frozen=True)
class Ids:
    """Stands for a tokenizer: the corpus has no text."""

    pad_id: int = 0
    vocabulary_fingerprint: str = "random ids"


def benchmark(
    documents: int, seq_length: int, workers: int, folder: Path | None, with_mask: bool, seed: int
) -> Report:
    """Time the first start (which builds the index) and the second one, and print the table."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        prefix, cache = str(Path(place) / "corpus"), Path(place) / "cache"
        write_corpus(prefix, documents, seed, with_mask)
        time.sleep(SETTLED_S + 0.1)  # younger files are read again at every start
        first = timed_start(prefix, cache, seq_length, workers)
        time.sleep(SETTLED_S + 0.1)
        second = timed_start(prefix, cache, seq_length, workers)
        index_mib = sum(path.stat().st_size for path in cache.glob("*-packs-*")) / MIB
        corpus_mib = sum(path.stat().st_size for path in Path(place).glob("corpus.*")) / MIB
        lengths = (lengths for _, lengths in length_blocks(documents, seed))
        best = packs_of_histogram(
            sum(np.bincount(part, minlength=LONGEST + 1) for part in lengths), seq_length
        )
    header = ["", "seconds", "private MiB", "mapped MiB", "peak private MiB"]
    rows = [
        [name, f"{one.seconds:.2f}", f"{one.private_mib:.0f}", f"{one.mapped_mib:.0f}", f"{one.peak_mib:.0f}"]
        for name, one in (("first start", first), ("second start", second))
    ]
    mask = ", loss mask" * with_mask
    case = f"{documents} documents of {SHORTEST} to {LONGEST} tokens{mask}, packs of {seq_length}"
    print(table(f"corpus {case}, {corpus_mib:.0f} MiB, index {index_mib:.0f} MiB", header, rows))
    fill, best_fill = (first.tokens / (packs * seq_length) for packs in (first.packs, best))
    print(f"fill {fill:.5f}, packed as a whole {best_fill:.5f} ({first.packs} and {best} packs)")
    requirements = [
        Requirement("R14", first.seconds, "s for the first start", "<=", 300),
        Requirement("R15", first.peak_mib, "MiB of private memory to build the index", "<=", 2048),
        Requirement("R16", second.seconds, "s from the data flags to the first batch", "<=", 3),
        Requirement("R17", second.private_mib, "MiB of private memory for the data", "<=", 200),
        Requirement("R18", 100 * (1 - fill / best_fill), "% less fill than packed as a whole", "<=", 0.5),
    ]
    others = [
        Other(case, name, quantity, unit, value)
        for name, one in (("first start", first), ("second start", second))
        for quantity, unit, value in (
            ("time", "s", one.seconds),
            ("private memory", "MiB", one.private_mib),
            ("peak", "MiB", one.peak_mib),
        )
    ]
    others += [Other(case, "windows", "fill", "", fill), Other(case, "whole", "fill", "", best_fill)]
    return Report(requirements, others=others)


def length_blocks(documents: int, seed: int) -> Iterator[tuple[np.random.Generator, np.ndarray]]:
    """Yield (generator for the tokens, lengths int32 [n]) of consecutive documents, always the same."""
    for first in range(0, documents, DOCUMENTS_PER_WRITE):
        random = np.random.default_rng([seed, first])
        count = min(DOCUMENTS_PER_WRITE, documents - first)
        yield random, random.integers(SHORTEST, LONGEST + 1, count, dtype=np.int32)


def write_corpus(prefix: str, documents: int, seed: int, with_mask: bool) -> None:
    """Write PREFIX.bin and PREFIX.idx as Megatron does, with uint16 tokens.

    With a mask, the first half of each document has no loss.
    """
    from megatron.core.datasets.indexed_dataset import DType

    from mkd.data.corpus.store import INDEX_HEADER

    code = DType.code_from_dtype(np.uint16)
    paths = [Path(f"{prefix}.{name}") for name in ("bin", "idx", "pointers")]
    with ExitStack() as stack:
        tokens, index = (stack.enter_context(path.open("wb")) for path in paths[:2])
        pointers = stack.enter_context(paths[2].open("w+b"))
        mask = stack.enter_context(open(prefix + ".loss_mask.bin", "wb")) if with_mask else None
        index.write(INDEX_HEADER.pack(b"MMIDIDX\0\0", 1, code, documents, documents + 1))
        place = 0
        for random, lengths in length_blocks(documents, seed):
            ids = random.integers(0, VOCAB_SIZE, lengths.sum(), dtype=np.uint16)
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
            tokens.write(ids)
            index.write(lengths)
            pointers.write(place + 2 * starts)
            place += ids.nbytes
            if mask is not None:
                inside = np.arange(len(ids)) - np.repeat(starts, lengths)
                mask.write((inside >= np.repeat(lengths // 2, lengths)).astype(np.uint8))
        pointers.seek(0)
        shutil.copyfileobj(pointers, index)
        for first in range(0, documents + 1, DOCUMENTS_PER_WRITE):
            index.write(np.arange(first, min(first + DOCUMENTS_PER_WRITE, documents + 1)))
    paths[2].unlink()


def timed_start(prefix: str, cache: Path, seq_length: int, workers: int) -> Start:
    """Start in a new process, and return its figures."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_start, args=(prefix, str(cache), seq_length, workers, sender))
    process.start()
    sender.close()
    peak, done = [0.0], threading.Event()
    watch = threading.Thread(target=_watch, args=(process.pid, peak, done))
    watch.start()
    try:
        figures, base = json.loads(receiver.recv())
    finally:
        done.set()
        watch.join()
        process.join()
    return Start(**figures, peak_mib=peak[0] - base)


def _start(prefix: str, cache: str, seq_length: int, workers: int, sender) -> None:
    """Open the data as a run does, read one batch, and send the figures."""
    from mkd.platform import prepare_for_files

    prepare_for_files()
    from mkd.data.build import DataBuilder
    from mkd.data.loader import TrainStream
    from mkd.data.packing.pack_settings import PackSettings
    from mkd.operations.console import console

    base, mapped = memory_mib(os.getpid())
    begin = time.perf_counter()
    with console(0):
        builder = DataBuilder(Ids(), VOCAB_SIZE, PackSettings(seq_length), cache, workers=workers)
        train, _ = builder.open([prefix])
    TrainStream(train, micro_batch_size=1, global_batch_size=8, seed=1).next_step()
    seconds = time.perf_counter() - begin
    private, now_mapped = memory_mib(os.getpid())
    figures = dict(seconds=seconds, private_mib=private - base, mapped_mib=now_mapped - mapped)
    sender.send(json.dumps([figures | {"packs": len(train), "tokens": train.members[0].num_tokens}, base]))


def memory_mib(process: int) -> tuple[float, float]:
    """Return (private, mapped from files) resident memory of a process, from /proc."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    kib = {line.split(":")[0]: float(line.split()[1]) for line in lines if line.startswith("Rss")}
    return kib["RssAnon"] / 1024, (kib["RssFile"] + kib["RssShmem"]) / 1024


def _watch(process: int, peak: list[float], done: threading.Event) -> None:
    """Keep the largest private memory of a process and its children in `peak`."""
    while not done.wait(POLL_S):
        total = 0.0
        for one in [process, *_children(process)]:
            try:
                total += memory_mib(one)[0]
            except (OSError, KeyError):  # it has ended
                continue
        peak[0] = max(peak[0], total)


def _children(process: int) -> list[int]:
    try:
        found = [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
    return found + [below for one in found for below in _children(one)]


def packs_of_histogram(counts: np.ndarray, seq_length: int) -> int:
    """Return the packs that best-fit decreasing needs for counts[n] pieces of n tokens each.

    A reference that keeps no pieces: it only counts the packs of each room.
    """
    packs = np.zeros(seq_length + 1, dtype=np.int64)  # with this room
    total = 0
    for length in np.flatnonzero(counts)[::-1]:
        left = int(counts[length])
        while left:
            rooms = length + np.flatnonzero(packs[length:])
            room = int(rooms[0]) if len(rooms) else seq_length
            if not len(rooms):  # as many new packs as the rest needs
                packs[room] = -(-left // (room // length))
                total += packs[room]
            each, number = room // length, int(packs[room])
            full = min(number, left // each)
            packs[room] -= full
            packs[room - full // max(full, 1) * each * length] += full
            left -= full * each
            if left and full < number:
                packs[room] -= 1
                packs[room - left * length] += 1
                left = 0
    return total
