"""The teacher's part of packs against a slow walk over every document."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from mkd.data.batch import collate
from mkd.data.teacher_input import SharedTokens
from mkd.xtoken.align.align_text import align
from tests.data.pairs import COARSE, STUDENT, TEACHER, open_pair, relation, teacher_text, texts
from tests.xtoken.small_tokenizers import sentence_piece


@pytest.fixture
def path(write_jsonl):
    return write_jsonl("texts.jsonl", *({"text": text} for text in texts()))


def found_chunks(dataset, number=0):
    """Return (student ids, teacher ids) of all chunks of all packs, sorted, after a check of their rows."""
    found = []
    for index in range(len(dataset)):
        pack = dataset[index]
        part, sides = pack.teacher_inputs[number], []
        chunks = part.chunks
        for rows, counts, own in (
            (chunks.student_rows, chunks.student_counts, pack),
            (chunks.teacher_rows, chunks.teacher_counts, part),
        ):
            borders = np.cumsum(own.spans)
            document = np.searchsorted(borders, rows, side="right")
            last_rows = rows + counts - 1
            assert (last_rows < (borders - own.spans + own.lengths)[document]).all(), (
                "predictors are tokens of one document"
            )
            sides.append(
                [own.labels[row : row + count].tolist() for row, count in zip(rows, counts, strict=True)]
            )
            for row, count in zip(rows, counts, strict=True):
                assert (
                    own.tokens[row + 1 : row + count].tolist() == own.labels[row : row + count - 1].tolist()
                )
        found += zip(map(tuple, sides[0]), map(tuple, sides[1]), strict=True)
    return sorted(found)


def pieces_of(n, seq_length, overlong):
    """Return (offset, end of the labels) of each piece of a document of n tokens."""
    if overlong == "truncate" or n <= seq_length:
        return [(0, min(n, seq_length))]
    return (
        []
        if overlong == "drop"
        else [(first, min(first + seq_length + 1, n)) for first in range(0, n, seq_length)]
    )


def expected_chunks(teacher, documents, seq_length=64, overlong="split"):
    expected = []
    for text in documents:
        aligned = align(STUDENT, teacher, text)
        student, own = (
            [*ids, tokenizer.eos_id]
            for ids, tokenizer in (
                (aligned.student_ids.tolist(), STUDENT),
                (aligned.teacher_ids.tolist(), teacher),
            )
        )
        chunks = [*aligned.chunks.tolist(), [len(student) - 1, len(student), len(own) - 1, len(own)]]
        for offset, end in pieces_of(len(student), seq_length, overlong):
            inside = [c for c in chunks if c[0] >= offset and c[1] <= end]
            first = max((c[3] for c in chunks if c[0] < offset), default=0)
            expected += [
                (tuple(student[a:b]), tuple(own[c:d])) for a, b, c, d in inside if a > offset and c > first
            ]
    return sorted(expected)


@pytest.mark.parametrize(
    ("teacher", "pack", "overlong"),
    [
        *product(["fine"], ["bfd", "none"], ["split", "truncate", "drop"]),
        *product(["coarse", "pieces"], ["bfd"], ["split"]),
    ],
)
def test_chunks_are_those_of_a_walk_over_the_documents(path, tmp_path, teacher, pack, overlong):
    tokenizer = {"fine": TEACHER, "coarse": COARSE, "pieces": sentence_piece()}[teacher]
    dataset, _ = open_pair(path, tmp_path, teacher_text(tokenizer), pack=pack, overlong=overlong)
    found = found_chunks(dataset)
    assert found == expected_chunks(tokenizer, texts(), overlong=overlong)
    kinds = {(len(a) > 1, len(b) > 1) for a, b in found}
    assert overlong != "split" or kinds == set(product([False, True], repeat=2))


@pytest.mark.parametrize(
    "options",
    [{}, dict(overlong="truncate", append_eod=False), dict(document_multiple=4)],
    ids=["split", "truncate", "padded"],
)
def test_identical_tokenizers_have_the_same_tokens_and_a_chunk_for_every_loss_token(path, tmp_path, options):
    dataset, _ = open_pair(path, tmp_path, teacher_text(STUDENT, seq_length=64), **options)
    batch = collate([dataset[i] for i in range(len(dataset))])
    teacher, chunks = batch.teacher_inputs[0], batch.teacher_inputs[0].chunks
    for name in ("tokens", "position_ids", "cu_seqlens", "cu_seqlens_padded"):
        assert getattr(batch, name).tolist() == getattr(teacher, name).tolist(), name
    assert chunks.student.rows.tolist() == chunks.teacher.rows.tolist() == batch.loss_rows.tolist()
    assert (
        chunks.student.labels.tolist()
        == chunks.teacher.labels.tolist()
        == batch.labels[0, batch.loss_rows].tolist()
    )
    assert chunks.num_chunks == batch.num_loss_tokens and not chunks.kinds.any()


def test_only_chunks_whose_tokens_all_have_loss(tmp_path, make_store):
    random = np.random.default_rng(0)
    documents = [STUDENT.encode(text) for text in texts()]
    masks = [random.integers(0, 2, len(ids)) for ids in documents]
    store = make_store(documents, masks)
    dataset, _ = open_pair(store.prefix, tmp_path, teacher_text(), seq_length=512, pack="none")
    expected = []
    for text, mask in zip(texts(), masks, strict=True):
        aligned = align(STUDENT, TEACHER, text)
        for a, b, c, d in aligned.chunks[1:].tolist():
            if mask[a:b].all():
                expected.append(
                    (tuple(aligned.student_ids[a:b].tolist()), tuple(aligned.teacher_ids[c:d].tolist()))
                )
    assert found_chunks(dataset) == sorted(expected) and len(expected) > 100


@pytest.mark.parametrize(("pack", "multiple"), [("none", 1), ("none", 8), ("bfd", 1), ("bfd", 8)])
def test_a_short_teacher_pack_cuts_at_common_borders(path, tmp_path, pack, multiple):
    free, _ = open_pair(path, tmp_path, teacher_text(), document_multiple=multiple, pack=pack)
    cut, _ = open_pair(path, tmp_path, teacher_text(seq_length=64), document_multiple=multiple, pack=pack)
    assert free.teacher_seq_lengths[0] > cut.teacher_seq_lengths[0] == 64 and len(free) == len(cut)
    num_cut = 0
    for index in range(len(free)):
        whole, part = free[index].teacher_inputs[0], cut[index].teacher_inputs[0]
        assert (
            part.spans.sum() == 64
            and (part.spans % multiple == 0).all()
            and (part.lengths <= part.spans).all()
        )
        rows = part.chunks.student_rows.tolist()
        if pack == "none":
            # The last token is only predicted.
            fits = whole.chunks.teacher_rows + whole.chunks.teacher_counts <= 64
            assert rows == whole.chunks.student_rows[fits].tolist()
        assert set(rows) <= set(whole.chunks.student_rows.tolist())
        assert part.tokens[: part.lengths[0]].tolist() == whole.tokens[: part.lengths[0]].tolist()
        num_cut += len(rows) < len(whole.chunks)
    assert num_cut > 5 and len(found_chunks(cut)) > len(found_chunks(free)) / 2
    assert "share of teacher tokens without room 0.000" in free.describe()[1]
    assert "share of teacher tokens without room 0.000" not in cut.describe()[1]


def test_text_decides_where_pairs_do_not(path, tmp_path):
    """If a token has another twin, its 1-1 chunk is compared as a realised pair only."""
    related = relation(TEACHER)
    every = teacher_text(twins=related.twins(), spellings=related.spellings)
    moved = replace(every, twins=np.roll(every.twins, 1))
    dataset, _ = open_pair(path, tmp_path, every, moved)
    plain, by_text = (part.chunks for part in collate([dataset[0], dataset[1]]).teacher_inputs)
    before, after = (Counter(part.kinds.tolist()) for part in (plain, by_text))
    assert before[0] > 50 and after[0] < before[0] / 2
    assert after[0] + after[3] == before[0] + before[3] and (after[1], after[2]) == (before[1], before[2])
    labels = [side.labels[side.offsets[:-1]].numpy() for side in (by_text.student, by_text.teacher)]
    single = np.flatnonzero(by_text.kinds == 0)
    twins, is_twin = moved.twins[labels[0][single]], np.isin(labels[1][single], moved.twins)
    assert ((twins == labels[1][single]) | ((twins < 0) & ~is_twin)).all()


def test_split_documents_keep_what_the_teacher_read_before_their_chunks(tmp_path, make_store):
    """A piece that begins in a prompt begins at the same proportion for the teacher.

    A prompt has no chunks.
    """
    text = texts(15)[14]
    ids = np.array(STUDENT.encode(text))
    store = make_store([ids], [[0] * (len(ids) - 3) + [1] * 3])
    settings = dict(seq_length=len(ids) - 20, overlong_conversations="split")
    dataset, _ = open_pair(store.prefix, tmp_path, teacher_text(), **settings)
    chunks = dataset[0].teacher_inputs[0].chunks
    assert len(dataset) == 1 and chunks.student_counts.sum() == 3 and chunks.teacher_rows[0] > 10


def test_pickled_data_sets_have_the_same_packs(path, tmp_path):
    dataset, _ = open_pair(
        path, tmp_path, SharedTokens(), teacher_text(spellings=relation(TEACHER).spellings)
    )
    copy = pickle.loads(pickle.dumps(dataset))
    for own, other in zip(
        dataset[1].teacher_inputs[1].__dict__.values(),
        copy[1].teacher_inputs[1].__dict__.values(),
        strict=True,
    ):
        assert pickle.dumps(own) == pickle.dumps(other)
