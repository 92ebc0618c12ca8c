"""Chunks as marks: they are read for whole documents and parts, and files that do not fit are refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mkd.data.aligned.teacher_store import TeacherStore, TeacherStoreFiles, chunk_marks
from tests.reported import refused


def random_chunks(random, n, m):
    """Return chunks of 1 to 3 tokens on each side with gaps between them, int64 [c, 4]."""
    sides = []
    for length in (n, m):
        steps = random.integers([0, 1], [3, 4], (length, 2))
        ends = np.cumsum(steps.ravel()).reshape(-1, 2)
        sides.append(ends[ends[:, 1] <= length])
    count = min(map(len, sides))
    return np.concatenate([side[:count] for side in sides], axis=1)


@pytest.fixture
def corpus(make_store, tmp_path):
    """Return (TeacherStore, chunks of each document) of made-up ids."""
    random = np.random.default_rng(0)
    lengths = [(40, 60), (0, 0), (5, 3), (1, 1), (0, 4), (70, 30)]
    chunks = [random_chunks(random, n, m) for n, m in lengths]
    student = make_store([range(n) for n, _ in lengths], name="student")
    make_store([range(m) for _, m in lengths], name="teacher")
    files = TeacherStoreFiles(str(tmp_path / "teacher"))
    for path, side in ((files.student_marks, 0), (files.teacher_marks, 1)):
        parts = [
            chunk_marks(n[side], c[:, 2 * side], c[:, 2 * side + 1])
            for n, c in zip(lengths, chunks, strict=True)
        ]
        np.concatenate(parts).tofile(path)
    return TeacherStore(str(tmp_path / "teacher"), student), chunks


def test_chunks_of_documents(corpus):
    store, chunks = corpus
    assert sum(map(len, chunks)) > 20
    for document, expected in enumerate(chunks):
        assert store.chunks(document).tolist() == expected.tolist()
        assert pickle.loads(pickle.dumps(store)).chunks(document).tolist() == expected.tolist()


def test_chunks_of_parts_of_a_document(corpus):
    store, chunks = corpus
    for document in (0, 5):
        whole = chunks[document]
        for start, stop in [(0, 20), (7, 25), (13, 13), (20, 40)]:
            behind = whole[whole[:, 0] < start]
            teacher_start = behind[-1, 3] if len(behind) else 0
            for teacher_stop in (teacher_start + 4, 60):
                inside = (whole[:, 0] >= start) & (whole[:, 1] <= stop) & (whole[:, 3] <= teacher_stop)
                found = store.chunks(document, (start, stop), (int(teacher_start), int(teacher_stop)))
                assert found.tolist() == whole[inside].tolist()


def test_marks():
    marks = chunk_marks(7, np.array([0, 1, 4]), np.array([1, 3, 7]))
    assert marks.tolist() == [1, 1, 2, 0, 1, 2, 2] and marks.dtype == np.uint8
    assert chunk_marks(2, np.array([], int), np.array([], int)).tolist() == [0, 0]


def test_files_of_another_corpus_are_refused(corpus, make_store, tmp_path):
    store, _ = corpus
    prefix = store.tokens.prefix
    for documents in ([range(7)], [range(n) for n in (40, 0, 5, 1, 0, 71)]):
        with refused("cached-file-damaged: does not fit"):
            TeacherStore(prefix, make_store(documents, name="other"))
    TeacherStoreFiles(prefix).teacher_marks.unlink()
    with refused("cached-file-damaged: does not fit"):
        TeacherStore(prefix, store.student)
