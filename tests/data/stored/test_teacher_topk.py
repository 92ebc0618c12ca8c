"""The teacher cache on disk: a run reads what the export wrote, in any order, and refuses all else."""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from mkd.data.batch import collate
from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.stored.cache_files import TaughtDataset, pack_digest
from mkd.data.stored.cache_meta import TopKMeta
from mkd.data.stored.teacher_topk import TopKPart, TopKWriter
from mkd.errors import DataError
from mkd.parallel.zigzag import RowShard

pytest.importorskip("pyarrow")
VOCAB, SEQ_LENGTH = 50, 16


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def dataset(make_store):
    """Return about 40 packs of documents with masks."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, VOCAB, size=random.integers(2, 16)) for _ in range(80)]
    masks = [(random.random(len(ids)) < 0.7).astype(np.uint8) for ids in documents]
    return packed(make_store(documents, masks))


def packed(store, **settings):
    settings = dict(seq_length=SEQ_LENGTH, vocab_size=VOCAB, pad_id=0, document_multiple=4) | settings
    return BlendedDataset([PackedDataset(store, **settings)])


def describe(num_packs, **changes):
    values = dict(k=5, temperature=1.0, logprob_dtype="float32", vocab_size=VOCAB, teacher="somewhere")
    values |= dict(weights_fingerprint="w", vocabulary_fingerprint="v", data={"seq_length": SEQ_LENGTH})
    return TopKMeta(**(values | dict(parts={"train": num_packs}, samples_per_shard=7) | changes))


def teacher(pack, k):
    """Return (ids, log-probabilities [n, k], metrics [n, 2]) of a pack, made up from its number."""
    generator = torch.Generator().manual_seed(pack.sample_id)
    n = int(np.count_nonzero(pack.loss_mask))
    log_p = (4 * torch.randn(n, VOCAB, generator=generator)).log_softmax(dim=1)
    values, ids = log_p.topk(k, dim=1)
    return ids.numpy(), values.numpy(), torch.rand(n, 2, generator=generator).numpy()


def write(folder, dataset, meta, shards=None):
    meta.write(folder)
    for shard in range(meta.num_shards("train")) if shards is None else shards:
        with TopKWriter(meta.shard_path(folder, "train", shard), meta) as writer:
            for sample in meta.shard_samples("train", shard):
                pack = dataset[sample]
                writer.add(sample, pack_digest(pack), *teacher(pack, meta.k))
    return TopKPart(folder, "train", TopKMeta.read(folder))


def test_random_access_gives_what_was_written(dataset, cache):
    part = write(cache, dataset, describe(len(dataset)))
    taught = TaughtDataset(dataset, part)
    assert len(list(cache.glob("*.parquet"))) == -(-len(dataset) // 7) > 3
    again = pickle.loads(pickle.dumps(taught))
    for sample in np.random.default_rng(1).permutation(len(dataset)).tolist():
        ids, logprobs, metrics = teacher(dataset[sample], 5)
        for pack in (taught[sample], again[sample]):
            assert np.array_equal(pack.tokens, dataset[sample].tokens)
            assert np.array_equal(pack.teacher_inputs[0].ids, ids)
            assert np.allclose(pack.teacher_inputs[0].logprobs, logprobs, rtol=1e-6, atol=1e-6)
            assert np.array_equal(pack.teacher_inputs[0].metrics, metrics)
            assert pack.teacher_inputs[0].vocab_size == VOCAB
    assert (taught.describe(), taught.num_documents) == (dataset.describe(), dataset.num_documents)
    assert np.array_equal(taught.sample_order(3, True)(0, 50), dataset.sample_order(3, True)(0, 50))


@pytest.mark.parametrize("k", [1, 5, VOCAB])
def test_half_precision_keeps_the_mass(dataset, cache, k):
    """Rounding moves single log-probabilities by up to 2^-11 of their size.

    It does not move the mass that all other ids have together.
    """
    part = write(cache, dataset, describe(len(dataset), logprob_dtype="float16", k=k))
    for pack in (dataset[sample] for sample in range(len(dataset))):
        _, logprobs, _ = teacher(pack, k)
        rows = part.rows(pack.sample_id, pack_digest(pack))
        mass, wanted = (
            rows.logprobs.double().exp().sum(dim=1),
            np.exp(logprobs.astype(np.float64)).sum(axis=1),
        )
        assert np.abs(mass.numpy() - wanted).max() <= 3e-7
        assert np.abs(rows.logprobs.numpy() - logprobs).max() <= 2 * 2**-11 * np.abs(logprobs).max()
    if k == 5:
        assert not np.allclose(rows.logprobs.numpy(), logprobs, rtol=1e-6), "this is half precision"


def test_a_micro_batch_carries_the_rows_of_its_loss_positions(dataset, cache):
    taught = TaughtDataset(dataset, write(cache, dataset, describe(len(dataset))))
    packs = [taught[3], taught.empty_pack(), taught[8]]
    batch = collate(packs)
    assert torch.equal(
        batch.teacher_inputs[0].ids,
        torch.cat([packs[0].teacher_inputs[0].ids, packs[2].teacher_inputs[0].ids]),
    )
    assert len(batch.teacher_inputs[0].logprobs) == len(batch.loss_rows) == batch.num_loss_tokens
    assert batch.to("cpu").teacher_inputs[0].metrics.shape == (len(batch.loss_rows), 2)
    assert collate([taught.empty_pack()] * 2).teacher_inputs[0].ids.shape == (0, 5)
    assert collate([dataset[3]]).teacher_inputs == ()
    by_position = dict(zip(batch.loss_rows.tolist(), batch.teacher_inputs[0].ids.tolist(), strict=True))
    seen = []
    for rank in range(2):
        shard = batch.shard(RowShard(rank, 2))
        positions = RowShard(rank, 2).rows(batch.cu_seqlens_padded)[shard.loss_rows].tolist()
        assert [by_position[position] for position in positions] == shard.teacher_inputs[0].ids.tolist()
        assert len(shard.teacher_inputs[0].logprobs) == len(shard.teacher_inputs[0].metrics) == len(positions)
        seen += positions
    assert sorted(seen) == sorted(by_position)


def test_groups_are_small_and_found(dataset, cache, monkeypatch):
    """A group holds at least one pack; several groups in a shard."""
    import pyarrow.parquet as pq

    monkeypatch.setattr("mkd.data.stored.cache_meta.GROUP_BYTES", 2 * SEQ_LENGTH * (5 * 8 + 12))
    part = write(cache, dataset, describe(len(dataset)))
    assert pq.ParquetFile(part.meta.shard_path(cache, "train", 0)).num_row_groups == 4
    for sample in reversed(range(len(dataset))):
        assert np.array_equal(
            part.rows(sample, pack_digest(dataset[sample])).ids, teacher(dataset[sample], 5)[0]
        )


def test_a_failed_shard_leaves_nothing(dataset, cache):
    meta = describe(len(dataset))
    with pytest.raises(RuntimeError), TopKWriter(meta.shard_path(cache, "train", 0), meta) as writer:
        writer.add(0, pack_digest(dataset[0]), *teacher(dataset[0], 5))
        raise RuntimeError
    assert list(cache.iterdir()) == []
    assert meta.missing_shards(cache, "train") == list(range(meta.num_shards("train")))


def test_what_a_killed_export_has_left_goes(dataset, cache):
    meta = describe(len(dataset))
    if (child := os.fork()) == 0:
        with TopKWriter(meta.shard_path(cache, "train", 0), meta):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = cache.iterdir()
    assert left.name.startswith("train-00000.parquet.partial-")
    with TopKWriter(meta.shard_path(cache, "train", 0), meta):
        assert not left.exists()
    assert [path.name for path in cache.iterdir()] == ["train-00000.parquet"]


def assert_refused(call, *texts):
    with pytest.raises(DataError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


def test_an_unfinished_export(dataset, cache):
    assert_refused(
        lambda: write(cache, dataset, describe(len(dataset)), shards=[0, 2]),
        "is incomplete",
        "train shards are missing",
        "it resumes where it stopped",
    )


def test_no_cache_and_a_part_that_it_lacks(dataset, cache):
    assert_refused(lambda: TopKMeta.read(cache), "holds no teacher cache", "--out folder of `mkd topk`")
    part = write(cache, dataset, describe(len(dataset)))
    assert_refused(lambda: TopKPart(cache, "valid", part.meta), "has no valid data")
    for text in ('{"format_version": 2}', "{}", "[]", "{"):
        (cache / "meta.json").write_text(text)
        assert_refused(lambda: TopKMeta.read(cache), "does not describe a teacher cache")


def test_other_data(dataset, make_store, cache):
    part = write(cache, dataset, describe(len(dataset)))
    store = dataset.members[0].store
    documents = [store.document(i) for i in range(len(store))]
    ids, masks = zip(*documents, strict=True)
    one_token = [tokens.copy() for tokens in ids]
    one_token[0][0] = (one_token[0][0] + 1) % VOCAB
    fewer = packed(make_store(ids[:20], masks[:20], name="fewer"))
    assert_refused(lambda: TaughtDataset(fewer, part), f"has {len(dataset)} packs, this run has {len(fewer)}")
    other = packed(make_store(one_token, masks, name="other"))
    changed = [i for i in range(len(dataset)) if pack_digest(other[i]) != pack_digest(dataset[i])]
    assert len(changed) == 1
    assert_refused(
        lambda: part.rows(changed[0], pack_digest(other[changed[0]])), f"another train pack {changed[0]} than"
    )
    pack = dataset[0]
    for name in ("tokens", "labels", "loss_mask", "lengths", "spans"):
        assert pack_digest(replace(pack, **{name: getattr(pack, name) + 1})) != pack_digest(pack)


def test_damaged_shards(dataset, cache):
    part = write(cache, dataset, describe(len(dataset)))
    path, digest = part.meta.shard_path(cache, "train", 0), pack_digest(dataset[0])
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PAR1" * 10):
        path.write_bytes(content)
        assert_refused(lambda: TopKPart(cache, "train", part.meta).rows(0, digest), f"{path} is damaged")
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 4  # one bit, in the pages
    path.write_bytes(flipped)
    part = TopKPart(cache, "train", part.meta)
    digests = [pack_digest(dataset[i]) for i in range(len(dataset))]
    assert_refused(lambda: [part.rows(i, each) for i, each in enumerate(digests)], f"{path} is damaged")
    path.write_bytes(part.meta.shard_path(cache, "train", 1).read_bytes())
    assert_refused(
        lambda: TopKPart(cache, "train", part.meta).rows(0, digest), "pack 0 is not where it should be"
    )


def test_a_shard_of_another_export(dataset, cache, tmp_path):
    """Its packs are those of this export, its teacher's predictions are not."""
    part = write(cache, dataset, describe(len(dataset), export_id="of this"))
    part.require_shards()
    taken = [part.shard_path(0), part.meta.shard_path(tmp_path / "other", "train", 0)]
    for export_id in ("of another", ""):
        write(tmp_path / "other", dataset, describe(len(dataset), export_id=export_id))
        taken[0].write_bytes(taken[1].read_bytes())
        assert_refused(
            TopKPart(cache, "train", part.meta).require_shards, f"{taken[0]} was written by another"
        )
    write(cache, dataset, describe(len(dataset))).require_shards()  # of an earlier version: no ids
