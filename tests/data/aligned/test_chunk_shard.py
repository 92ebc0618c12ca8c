"""Chunks on context-parallel ranks: together they are the chunks of the whole row, and the exchanges fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkd.data.aligned.chunk_shard import range_owners, select_ranges
from mkd.data.batch import collate
from mkd.data.teacher_input import SharedTokens
from mkd.parallel.zigzag import RowShard
from tests.data.pairs import TEACHER, open_pair, relation, teacher_text, texts


@pytest.fixture
def batch(write_jsonl, tmp_path):
    path = write_jsonl("texts.jsonl", *({"text": text} for text in texts()))
    text = teacher_text(TEACHER, spellings=relation(TEACHER).spellings)
    dataset, _ = open_pair(path, tmp_path, SharedTokens(), text, document_multiple=8)
    return collate([dataset[0], dataset[3], dataset.empty_pack()])


def listed(chunks, student_rows, teacher_rows):
    """Return every chunk with its rows in the whole row, its tokens and all other fields, sorted."""
    found = []
    for i in range(len(chunks.kinds)):
        one = [int(chunks.kinds[i]), float(chunks.weights[i]), int(chunks.packs[i])]
        for side, rows in ((chunks.student, student_rows), (chunks.teacher, teacher_rows)):
            tokens = slice(*side.host_offsets[i : i + 2])
            one += [rows[tokens].tolist(), side.labels[tokens].tolist()]
        pairs = slice(*chunks.support_offsets[i : i + 2])
        found.append((*one, chunks.support_student[pairs].tolist(), chunks.support_teacher[pairs].tolist()))
    return sorted(found)


def exchanged(sides, held):
    """Return the rows that every rank receives if each sends the rows it holds.

    `held` has the numbers of these rows in the whole row.
    """
    plans = [side.exchange for side in sides]
    sent = [
        torch.split(rows[plan.send_rows], plan.send_counts) for plan, rows in zip(plans, held, strict=True)
    ]
    received = [torch.cat([sent[source][rank] for source in range(len(sides))]) for rank in range(len(sides))]
    for rank, side in enumerate(sides):
        assert side.exchange.receive_counts == tuple(len(sent[source][rank]) for source in range(len(sides)))
        assert sorted(side.rows.tolist()) == list(range(len(received[rank])))
    return received


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_chunks(batch, size):
    whole = batch.teacher_inputs[1].chunks
    shards = [batch.shard(RowShard(rank, size)) for rank in range(size)]
    parts = [shard.teacher_inputs[1].chunks for shard in shards]
    borders = {"student": batch.cu_seqlens_padded, "teacher": batch.teacher_inputs[1].cu_seqlens_padded}
    rows = {}
    for name, cu_seqlens in borders.items():
        held = [RowShard(rank, size).rows(cu_seqlens) for rank in range(size)]
        sides = [getattr(part, name) for part in parts]
        received = exchanged(sides, held)
        rows[name] = [received[rank][side.rows] for rank, side in enumerate(sides)]
    together = [
        listed(part, student, teacher)
        for part, student, teacher in zip(parts, rows["student"], rows["teacher"], strict=True)
    ]
    assert sorted(sum(together, [])) == listed(whole, whole.student.rows, whole.teacher.rows)
    assert all(len(own) > 10 for own in together) and {part.num_chunks for part in parts} == {
        whole.num_chunks
    }
    assert any(part.teacher.exchange.receive_counts[1 - rank] for rank, part in enumerate(parts[:2])), (
        "something travels"
    )
    for rank, (part, shard) in enumerate(zip(parts, shards, strict=True)):
        last = rows["student"][rank][part.student.offsets[1:] - 1]
        assert np.isin(last, RowShard(rank, size).rows(batch.cu_seqlens_padded)).all(), "of the owner"
        assert (np.diff(part.kinds) >= 0).all()
        own = RowShard(rank, size).rows(borders["teacher"])
        for name in ("tokens", "position_ids"):
            assert torch.equal(
                getattr(shard.teacher_inputs[1], name), getattr(batch.teacher_inputs[1], name)[:, own]
            )
        assert (
            shard.teacher_inputs[1].cu_seqlens_padded is batch.teacher_inputs[1].cu_seqlens_padded
            and shard.teacher_inputs[0] == SharedTokens()
        )


def test_a_rank_without_chunks_takes_part(write_jsonl, tmp_path):
    path = write_jsonl("texts.jsonl", {"text": "ab"})
    dataset, _ = open_pair(path, tmp_path, teacher_text(), document_multiple=4)
    parts = [collate([dataset[0]]).shard(RowShard(rank, 2)).teacher_inputs[0].chunks for rank in range(2)]
    assert (
        sorted(len(part.kinds) for part in parts) == [0, parts[0].num_chunks]
        and parts[0].num_chunks == parts[1].num_chunks
    )
    assert all(len(part.teacher.exchange.send_counts) == 2 for part in parts)


def test_ranges():
    entries, offsets = select_ranges(np.array([0, 2, 2, 5]), np.array([2, 0, 1]))
    assert entries.tolist() == [2, 3, 4, 0, 1] and offsets.tolist() == [0, 3, 5, 5]
    assert range_owners(offsets).tolist() == [0, 0, 0, 1, 1]
