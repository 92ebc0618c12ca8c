"""Streams of micro-batches: data parallelism, resuming, workers, evaluation."""

from __future__ import annotations

import os
import random
from collections import Counter

import numpy as np
import pytest
import torch

from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.loader import EvalStream, TrainStream, read_ahead
from mkd.data.teacher_input import SharedTokens
from mkd.errors import DataError, MkdError
from mkd.parallel.zigzag import RowShard
from tests.data.pairs import TEACHER, open_pair, relation, teacher_text, texts
from tests.reported import refused

TENSORS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "loss_rows")


@pytest.fixture
def dataset(make_store):
    """Return 23 packs in two members, mixed 3:1."""
    members = [
        PackedDataset(
            make_store([[i + 100 * m] * 6 for i in range(n)], name=f"m{m}"),
            seq_length=8,
            vocab_size=1000,
            pad_id=0,
        )
        for m, n in enumerate((17, 6))
    ]
    return BlendedDataset(members, [3, 1])


def steps(dataset, count, **options):
    """Return the samples of `count` steps: [step][micro-batch] -> sample ids."""
    options = {"micro_batch_size": 2, "global_batch_size": 8, "seed": 5, **options}
    stream = TrainStream(dataset, **options)
    return [[batch.sample_ids for batch in stream.next_step()] for _ in range(count)]


def test_microbatches_are_the_sample_order_in_turn(dataset):
    order = dataset.sample_order(5, True)(0, 24).reshape(3, 4, 2).tolist()
    assert steps(dataset, 3) == [[tuple(row) for row in step] for step in order]


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
def test_every_layout_has_the_same_samples_in_every_step(dataset, micro, dp):
    ranks = [
        steps(dataset, 6, micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=dp)
        for rank in range(dp)
    ]
    for step, expected in enumerate(steps(dataset, 6)):
        samples = Counter(i for rank in ranks for batch in rank[step] for i in batch)
        assert samples == Counter(i for batch in expected for i in batch)


def test_samples_are_dealt_out_as_megatron_does(dataset):
    whole = dataset.sample_order(5, True)(0, 8).tolist()
    rank1 = steps(dataset, 1, data_parallel_rank=1, data_parallel_size=2)
    assert rank1 == [[tuple(whole[2:4]), tuple(whole[6:8])]]


@pytest.mark.parametrize("consumed", [0, 16])
def test_the_last_samples_are_those_of_all_ranks(dataset, consumed):
    """The same holds after workers have read ahead, and in the next epoch."""
    options = dict(
        micro_batch_size=2, global_batch_size=8, seed=5, data_parallel_size=2, consumed_samples=consumed
    )
    streams = [
        TrainStream(dataset, data_parallel_rank=rank, num_workers=rank, **options) for rank in range(2)
    ]
    for _ in range(5):
        had = [i for stream in streams for batch in stream.next_step() for i in batch.sample_ids]
        assert sorted(streams[0].last_samples()) == sorted(streams[1].last_samples()) == sorted(had)


@pytest.mark.parametrize("consumed", [8, 40, 24_000])
def test_resuming_anywhere_goes_on_with_the_same_samples(dataset, consumed):
    before = consumed - 8
    assert steps(dataset, 4, consumed_samples=before)[1:] == steps(dataset, 3, consumed_samples=consumed)


def test_resuming_with_another_layout_goes_on_with_the_same_samples(dataset):
    one = steps(dataset, 2, consumed_samples=16)
    ranks = [
        steps(dataset, 2, consumed_samples=16, micro_batch_size=1, data_parallel_rank=r, data_parallel_size=4)
        for r in range(4)
    ]
    for step in range(2):
        assert Counter(sum(one[step], ())) == Counter(
            i for rank in ranks for batch in rank[step] for i in batch
        )


def test_consumed_samples_counts_steps_taken_not_read_ahead(dataset):
    stream = TrainStream(dataset, micro_batch_size=2, global_batch_size=8, consumed_samples=16)
    stream.next_step()
    assert stream.consumed_samples == 24


def test_a_look_at_the_following_step_moves_nothing(dataset):
    stream, other = (TrainStream(dataset, micro_batch_size=2, global_batch_size=8) for _ in range(2))
    for step in range(3):
        expected = [batch.sample_ids for batch in other.next_step()]
        assert [batch.sample_ids for batch in stream.following_step()] == expected
        assert stream.consumed_samples == 8 * step
        assert [batch.sample_ids for batch in stream.next_step()] == expected
        assert stream.last_samples() == other.last_samples()


def test_batches_do_not_depend_on_workers(dataset):
    options = dict(micro_batch_size=2, global_batch_size=8, seed=1)
    alone, ahead = TrainStream(dataset, **options), TrainStream(dataset, num_workers=2, **options)
    for _ in range(5):
        for a, b in zip(alone.next_step(), ahead.next_step(), strict=True):
            assert a.sample_ids == b.sample_ids and a.num_loss_tokens == b.num_loss_tokens
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS)


@pytest.mark.parametrize("workers", [0, 1])
def test_global_random_states_are_left_alone(dataset, workers):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    TrainStream(dataset, micro_batch_size=2, global_batch_size=8, num_workers=workers).next_step()
    list(EvalStream(dataset, micro_batch_size=2, global_batch_size=8, eval_iters=1, num_workers=workers))
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1], states[2]) == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_reading_arrive_as_they_are(make_store, workers):
    dataset = PackedDataset(make_store([[1, 2], [3, 4000]]), seq_length=8, vocab_size=10, pad_id=0)
    stream = TrainStream(dataset, micro_batch_size=1, global_batch_size=1, num_workers=workers)
    with pytest.raises(DataError) as caught:
        stream.next_step()
    assert (
        caught.value.what.endswith("document 1 has token id 4000, the model knows 0 to 9") and caught.value.do
    )


def end_this_process(samples):
    os._exit(9)


def test_a_worker_that_dies_is_named():
    with refused("data-worker-ended", MkdError):
        list(read_ahead(end_this_process, [[0], [1]], num_workers=1, pin_memory=False))


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_evaluation_takes_every_pack_once_and_fills_up_with_empty_ones(dataset, dp):
    streams = [
        EvalStream(
            dataset,
            micro_batch_size=2,
            global_batch_size=8,
            eval_iters=100,
            data_parallel_rank=rank,
            data_parallel_size=dp,
        )
        for rank in range(dp)
    ]
    samples = Counter(i for stream in streams for step in stream for batch in step for i in batch.sample_ids)
    assert samples == Counter({**dict.fromkeys(range(23), 1), -1: 1})
    assert {len(step) for stream in streams for step in stream} == {4 // dp} and {
        len(s) for s in streams
    } == {3}


@pytest.mark.parametrize("workers", [0, 1])
def test_context_parallel_ranks_hold_parts_of_the_same_micro_batches(make_store, workers):
    dataset = PackedDataset(
        make_store([[i] * 5 for i in range(1, 6)]), seq_length=16, vocab_size=9, pad_id=0, document_multiple=4
    )

    def batches(**options):
        options = dict(micro_batch_size=1, global_batch_size=4, **options)
        return TrainStream(dataset, **options).next_step() + next(
            iter(EvalStream(dataset, eval_iters=1, **options))
        )

    whole = batches()
    for rank in range(2):
        shards = batches(shard=RowShard(rank, 2), num_workers=workers)
        assert len(shards) == len(whole) == 8
        for shard, batch in zip(shards, whole, strict=True):
            expected = batch.shard(RowShard(rank, 2))
            assert shard.tokens.shape == (1, 8) and shard.sample_ids == batch.sample_ids
            assert all(torch.equal(getattr(shard, name), getattr(expected, name)) for name in TENSORS)


def test_evaluation_restarts_and_is_limited(dataset):
    stream = EvalStream(dataset, micro_batch_size=1, global_batch_size=4, eval_iters=2)
    first, second = ([i for step in stream for batch in step for i in batch.sample_ids] for _ in range(2))
    assert first == second == [0, 2, 5, 8, 11, 14, 17, 20]  # evenly spaced over each member


def test_a_held_out_blend_has_its_weights(dataset):
    """Megatron's rule: packs in the proportion of the weights; some come more than once if necessary."""
    stream = EvalStream(
        BlendedDataset(dataset.members, [1, 3]), micro_batch_size=1, global_batch_size=4, eval_iters=100
    )
    samples = [i for step in stream for batch in step for i in batch.sample_ids if i >= 0]
    assert (
        len(samples) == 23 and len([i for i in samples if i < 17]) == len({i for i in samples if i < 17}) == 6
    )
    assert set(Counter(i for i in samples if i >= 17).values()) == {2, 3}
    layout = dict(
        micro_batch_size=2, global_batch_size=4, eval_iters=100, data_parallel_size=2, num_workers=1
    )
    ranks = [
        EvalStream(BlendedDataset(dataset.members, [1, 3]), data_parallel_rank=rank, **layout)
        for rank in range(2)
    ]
    dealt = [i for rank in ranks for step in rank for batch in step for i in batch.sample_ids if i >= 0]
    assert sorted(dealt) == samples
    plain = EvalStream(BlendedDataset(dataset.members), micro_batch_size=1, global_batch_size=4, eval_iters=2)
    assert [i for step in plain for batch in step for i in batch.sample_ids] == [0, 2, 5, 8, 11, 14, 17, 20]


def test_empty_packs_have_no_loss(dataset):
    stream = EvalStream(dataset, micro_batch_size=8, global_batch_size=8, eval_iters=9)
    last = list(stream)[-1][0]
    assert last.sample_ids[-1] == -1 and last.loss_mask[0, -8:].sum() == 0
    assert last.cu_seqlens_padded[-1] == 64 and last.cu_seqlens.diff()[-1] == 0


@pytest.fixture
def taught(write_jsonl, tmp_path):
    """Return packs with a part for a cross-tokenizer teacher.

    A teacher that reads the student's tokens comes before it.
    """
    path = write_jsonl("texts.jsonl", *({"text": text} for text in texts(30)))
    text = teacher_text(spellings=relation(TEACHER).spellings)
    return open_pair(path, tmp_path, SharedTokens(), text, document_multiple=4)[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_carry_the_teachers(taught, rank):
    """Workers change nothing; the empty packs at the end of an evaluation have a part without chunks."""
    size = len(taught) - len(taught) % 4 + 4  # so that the only step of an evaluation has empty packs
    layout = dict(micro_batch_size=4, shard=RowShard(rank, 2))
    for open_stream in (
        lambda workers: TrainStream(taught, global_batch_size=8, num_workers=workers, **layout).next_step(),
        lambda workers: next(
            iter(EvalStream(taught, global_batch_size=size, eval_iters=1, num_workers=workers, **layout))
        ),
    ):
        for own, other in zip(open_stream(0), open_stream(2), strict=True):
            assert own.teacher_inputs[0] == other.teacher_inputs[0] == SharedTokens()
            own, other = own.teacher_inputs[1], other.teacher_inputs[1]
            assert own.tokens.shape == (1, 4 * taught.teacher_seq_lengths[1] // 2)
            assert (
                torch.equal(own.tokens, other.tokens) and own.chunks.num_chunks == other.chunks.num_chunks > 0
            )
            for side in ("student", "teacher"):
                pair = [getattr(part.chunks, side) for part in (own, other)]
                assert torch.equal(pair[0].rows, pair[1].rows) and torch.equal(pair[0].labels, pair[1].labels)
                assert pair[0].exchange.send_counts == pair[1].exchange.send_counts
            assert torch.equal(own.chunks.support_student, other.chunks.support_student)
            assert int(own.chunks.packs.max()) <= 3


def test_a_resumed_stream_has_the_same_chunks(taught):
    options = dict(micro_batch_size=2, global_batch_size=4, seed=3)
    stream = TrainStream(taught, **options)
    stream.next_step()
    resumed = TrainStream(taught, consumed_samples=4, **options)
    for own, other in zip(stream.next_step(), resumed.next_step(), strict=True):
        assert torch.equal(
            own.teacher_inputs[1].chunks.teacher.rows, other.teacher_inputs[1].chunks.teacher.rows
        )
        assert torch.equal(own.teacher_inputs[1].tokens, other.teacher_inputs[1].tokens)
