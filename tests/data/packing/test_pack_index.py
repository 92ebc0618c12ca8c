"""Packs in a file: the same as packs in memory, written once, and written again when damaged."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mkd.data.corpus.known_files import KnownFiles
from mkd.data.corpus.store import TokenStore
from mkd.data.dataset import BlendedDataset, PackedDataset, later_orders
from mkd.data.packing import pack_index
from mkd.data.packing.pack_index import PackIndex, Windows, pack_in_memory, pack_into_file
from mkd.data.packing.pack_settings import PackSettings
from mkd.errors import CheckpointError, DataError
from mkd.run.fingerprints import require_same
from tests.data.datasets import open_datasets
from tests.data.pairs import STUDENT, open_pair, teacher_text, texts
from tools.benchmarks.corpus_benchmark import packs_of_histogram, write_corpus

SETTINGS = PackSettings(seq_length=128)
DOCUMENTS = 5000


@pytest.fixture
def store(tmp_path):
    """Return a corpus of short documents in which the first half of each has no loss."""
    write_corpus(str(tmp_path / "corpus"), DOCUMENTS, seed=3, with_mask=True)
    return TokenStore(str(tmp_path / "corpus"))


def build(store, settings=SETTINGS, **options):
    place = Path(store.prefix).parent / "cache"
    return PackIndex.in_file(pack_into_file(store, settings, str(place), KnownFiles(None), **options))


def content(index):
    """Return all pieces as rows, the pieces of each pack, and the packs' loss tokens."""
    pieces = index.pieces(0, index.num_pieces)
    rows = np.stack([pieces.document, pieces.offset, pieces.length, pieces.num_labels], axis=1).tolist()
    packs = range(len(index))
    return rows, [index.piece_range(i) for i in packs], [index.loss_tokens(i) for i in packs]


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        replace(SETTINGS, pack="none", overlong="truncate", seq_length=32),
        replace(SETTINGS, overlong="drop", seq_length=48, document_multiple=8),
        replace(SETTINGS, documents=(100, 4000), left_out=(5, 100, 3999, 4500)),
    ],
)
def test_a_file_of_one_window_has_the_packs_of_memory(store, settings):
    index, expected = build(store, settings), pack_in_memory(store, settings)
    assert content(index) == content(expected)
    assert content(pickle.loads(pickle.dumps(index))) == content(expected)
    assert (index.num_tokens, index.num_loss_tokens) == (expected.num_tokens, expected.num_loss_tokens)


def test_windows_pack_every_loss_token_once_and_as_tight(store):
    settings = replace(SETTINGS, window_pieces=600)
    index, whole = build(store, settings), pack_in_memory(store, SETTINGS)
    rows, ranges, loss_tokens = content(index)
    assert index.num_windows == 9 and sorted(rows) == sorted(content(whole)[0])
    assert all(a[1] == b[0] for a, b in pairwise(ranges)) and ranges[-1][1] == len(rows)
    lengths = np.add.reduceat([row[2] for row in rows], [first for first, _ in ranges])
    assert lengths.max() <= 128 and len(index) <= 1.01 * len(whole)
    dataset = PackedDataset(store, vocab_size=50_000, pad_id=0, index=index, seq_length=128)
    assert loss_tokens == [int(dataset[i].loss_mask.sum()) for i in range(len(dataset))]
    histogram = np.bincount(store.lengths_between(0, len(store)))
    assert len(whole) == packs_of_histogram(histogram, 128), "best fit of counts needs as many packs"


def test_windows_end_at_documents_and_hold_few_pieces(make_store):
    store = make_store([[1] * n for n in (3, 50, 2, 1, 1, 30, 8)])
    windows = list(Windows(store, PackSettings(seq_length=5, window_pieces=4)))
    assert windows == [(0, 1), (1, 2), (2, 5), (5, 6), (6, 7)], "a document of ten pieces is one window"
    whole = list(Windows(store, PackSettings(seq_length=5, overlong="truncate", window_pieces=4)))
    assert whole == [(0, 4), (4, 7)]


def test_workers_write_the_same_bytes(store):
    settings = replace(SETTINGS, window_pieces=600)
    alone = build(store, settings).file.path
    expected = alone.read_bytes()
    alone.unlink()
    assert build(store, settings, workers=2).file.path.read_bytes() == expected


def test_a_file_is_used_again_until_something_changes(store):
    first = build(store).file.path
    written = first.stat().st_mtime_ns
    assert build(store).file.path == first and first.stat().st_mtime_ns == written
    assert build(store, replace(SETTINGS, seq_length=64)).file.path != first
    mask = Path(store.prefix + ".loss_mask.bin")
    mask.write_bytes(b"\1" * mask.stat().st_size)
    changed = build(TokenStore(store.prefix))
    assert changed.file.path != first and changed.num_loss_tokens == changed.num_tokens - DOCUMENTS


@pytest.mark.parametrize("place", [3, 40, -1, None])
def test_a_damaged_file_is_written_again_with_a_word(store, caplog, place):
    path = build(store).file.path
    whole = path.read_bytes()
    damaged = bytearray(whole)
    if place is None:
        del damaged[-5:]
    else:
        damaged[place] ^= 1
    path.write_bytes(damaged)
    build(store)
    assert path.read_bytes() == whole
    assert "written again" in caplog.text and path.name in caplog.text


def test_a_builder_that_is_stopped_leaves_nothing(store, tmp_path):
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(store, replace(SETTINGS, window_pieces=600), progress=stop)
    assert not list((tmp_path / "cache").iterdir())
    assert len(build(store, replace(SETTINGS, window_pieces=600)))


BUILDER = """
import sys
from mkd.data.corpus.known_files import KnownFiles
from mkd.data.packing.pack_index import pack_into_file
from mkd.data.packing.pack_settings import PackSettings
from mkd.data.corpus.store import TokenStore
store, settings = TokenStore(sys.argv[1]), PackSettings(seq_length=128, window_pieces=50)
print("ready", flush=True)
input()
pack_into_file(store, settings, sys.argv[2], KnownFiles(sys.argv[2]))
"""


def test_two_jobs_may_build_at_once(store, tmp_path):
    cache = str(tmp_path / "cache")
    command = [sys.executable, "-c", BUILDER, store.prefix, cache]
    jobs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [job.stdout.readline() for job in jobs] == ["ready\n"] * 2
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    assert [job.communicate() and job.returncode for job in jobs] == [0, 0]
    (path,) = Path(cache).glob("corpus-packs-*")
    settings = replace(SETTINGS, window_pieces=50)
    written = path.stat().st_mtime_ns
    assert content(build(store, settings)) == content(pack_in_memory(store, settings))
    assert path.stat().st_mtime_ns == written


def test_a_folder_that_cannot_be_written_is_an_error(store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError) as caught:
        pack_into_file(store, SETTINGS, str(tmp_path / "file"), KnownFiles(None))
    assert caught.value.code == "data-not-writable" and "--data-cache-path" in caught.value.do


def test_an_all_masked_corpus_is_refused(store):
    mask = Path(store.prefix + ".loss_mask.bin")
    mask.write_bytes(bytes(mask.stat().st_size))
    with pytest.raises(DataError) as caught:
        build(TokenStore(store.prefix))
    assert caught.value.code == "corpus-without-loss-tokens"


def packs(dataset):
    """Return the arrays of every pack of the student and of its cross-tokenizer teacher."""
    found = []
    for i in range(len(dataset)):
        pack = dataset[i]
        (teacher,) = pack.teacher_inputs
        rows = (pack.tokens, pack.labels, pack.loss_mask, pack.spans, teacher.tokens, teacher.spans)
        found.append([row.tolist() for row in (*rows, teacher.chunks.student_rows, teacher.chunks.kinds)])
    return found


def test_a_run_reads_the_same_from_files(write_jsonl, tmp_path, monkeypatch):
    """Student and cross-tokenizer teacher, split and blend, with documents that are cut."""
    path = write_jsonl("texts.jsonl", *({"text": text} for text in texts()))
    teacher = teacher_text()
    options = dict(split="80,20", document_multiple=4)
    expected = [packs(one) for one in open_pair(path, tmp_path / "a", teacher, **options)]
    assert not list((tmp_path / "a").glob("*-packs-*"))
    monkeypatch.setattr(pack_index, "SMALL_PIECES", 0)
    train, valid = open_pair(path, tmp_path / "b", teacher, **options)
    assert len(list((tmp_path / "b").glob("*-packs-*"))) == 4, "two data sets, two models"
    assert [packs(train), packs(valid)] == expected
    assert train.teacher_seq_lengths == valid.teacher_seq_lengths
    assert packs(pickle.loads(pickle.dumps(train))) == expected[0]


def test_packs_in_windows_are_refused_by_name_in_a_run_that_had_none(store, make_store):
    options = dict(vocab_size=50_000, pad_id=0, seq_length=128)
    small = BlendedDataset([PackedDataset(make_store([[1, 2, 3]], name="small"), **options)])
    settings = replace(SETTINGS, window_pieces=600)
    large = BlendedDataset([PackedDataset(store, index=build(store, settings), **options)])
    assert later_orders(small) == {}
    now = {f"data.{name}": value for name, value in later_orders(large).items()} | {"data.seed": 1}
    assert list(now) == ["data.packing", "data.seed"]
    with pytest.raises(CheckpointError) as caught:
        require_same(Path("run"), {"data.seed": 1}, now, [])
    assert caught.value.code == "run-differs" and "data.packing" in caught.value.do
    require_same(Path("run"), {"data.seed": 1}, now, ["data.packing"])


def test_the_second_start_reads_no_file_whole(tmp_path, monkeypatch):
    import time

    from mkd.data.corpus import known_files

    write_corpus(str(tmp_path / "corpus"), 70_000, seed=3, with_mask=True)
    time.sleep(known_files.SETTLED_S + 0.1)
    options = dict(tokenizer=STUDENT, seq_length=128, vocab_size=50_000, cache_dir=str(tmp_path / "cache"))
    first, _ = open_datasets(data_path=[str(tmp_path / "corpus")], **options)
    reads = []
    monkeypatch.setattr(known_files, "sha256_of_file", lambda path, *_: reads.append(path))
    second, _ = open_datasets(data_path=[str(tmp_path / "corpus")], **options)
    assert not reads and second.members[0].index.file.path == first.members[0].index.file.path
    assert content(second.members[0].index) == content(first.members[0].index)


def read_on_a_rank(prefix: str, cache: str) -> tuple[str, list[int], list[list[int]]]:
    """Return (file of the packs, packs of three steps, tokens of the last step) of one data-parallel rank."""
    from mkd.data.loader import TrainStream
    from mkd.operations.phases import Phases
    from mkd.operations.shared_build import SharedBuild
    from mkd.operations.signals import Signals
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    context = ParallelContext.create(detect())
    build = SharedBuild(context, Signals(), Phases())
    data, _ = open_datasets(
        data_path=[prefix],
        tokenizer=STUDENT,
        seq_length=128,
        vocab_size=50_000,
        cache_dir=cache,
        is_builder=context.rank == 0,
        share=build.share,
        progress=build.progress,
    )
    layout = dict(data_parallel_rank=context.dp_rank, data_parallel_size=context.dp_size, micro_batch_size=2)
    stream = TrainStream(data, global_batch_size=8, seed=5, num_workers=context.rank, **layout)
    steps = [stream.next_step() for _ in range(3)]
    samples = [i for step in steps for batch in step for i in batch.sample_ids]
    return str(data.members[0].index.file.path), samples, [batch.tokens[0].tolist() for batch in steps[-1]]


def test_ranks_share_one_file_and_read_each_pack_once(ranks, tmp_path):
    write_corpus(str(tmp_path / "corpus"), 70_000, seed=3, with_mask=True)
    arguments = (str(tmp_path / "corpus"), str(tmp_path / "cache"))
    one, two = ranks.run(read_on_a_rank, 2, *arguments)
    ((path, samples, tokens),) = ranks.run(read_on_a_rank, 1, *arguments)
    assert one[0] == two[0] == path and len(list((tmp_path / "cache").glob("*.bin"))) == 1
    assert sorted(one[1] + two[1]) == sorted(samples) and len(set(samples)) == 24
    assert sorted(one[2] + two[2]) == sorted(tokens)
