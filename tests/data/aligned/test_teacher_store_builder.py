"""Corpora of teachers are cached, independent of the number of workers, and bound to one student's corpus."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mkd.config.data_files import is_raw
from mkd.data.aligned.teacher_store import TeacherStore
from mkd.data.aligned.teacher_store_builder import cached_teacher_store
from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import RECORDS_VERSION, build_store
from mkd.data.teacher_input import SharedTokens
from mkd.errors import DataError
from tests.data.pairs import COARSE, STUDENT, TEACHER, chat_tokenizer, open_pair, teacher_text, texts
from tests.reported import refused


@pytest.fixture
def path(write_jsonl):
    return write_jsonl("texts.jsonl", *({"text": text} for text in texts(150)))


@pytest.fixture
def student(path, tmp_path):
    prefix = str(tmp_path / "student")
    build_store([path], prefix, STUDENT, True)
    return prefix


def build(path, student, cache_dir, text=None, workers=0, **options):
    options = {"tokenizer": STUDENT, "append_eod": True, **options}
    files = [path] if is_raw(path) else []
    return cached_teacher_store(
        path, files, student, text or teacher_text(), cache_dir=str(cache_dir), workers=workers, **options
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_content(path, student, tmp_path):
    store = TeacherStore(build(path, student, tmp_path / "cache"), TokenStore(student))
    for document, text in enumerate(texts(150)):
        assert store.tokens.document(document)[0].tolist() == [*TEACHER.encode(text), TEACHER.eos_id]
        assert len(store.chunks(document)) > 3
    assert store.tokens.meta["tokenizer_fingerprint"] == TEACHER.fingerprint


def test_a_tokenised_corpus_gives_the_same_without_its_text(path, student, tmp_path):
    text, ids = (
        TeacherStore(build(p, student, tmp_path / "cache"), TokenStore(student)) for p in (path, student)
    )
    assert text.tokens.prefix != ids.tokens.prefix
    for document in range(150):
        assert text.tokens.document(document)[0].tolist() == ids.tokens.document(document)[0].tolist()
        assert text.chunks(document).tolist() == ids.chunks(document).tolist()


def test_a_tokenised_completion_gives_the_same_without_its_text(write_jsonl, tmp_path):
    """Teacher tokens never cross the end of the prompt.

    Prompt and completion are tokenised separately.
    """
    pairs = [{"prompt": text[: len(text) // 2], "completion": text[len(text) // 2 :]} for text in texts(40)]
    path, prefix = write_jsonl("pairs.jsonl", *pairs), str(tmp_path / "pairs")
    build_store([path], prefix, STUDENT, True)
    store = TokenStore(prefix)
    text, ids = (TeacherStore(build(one, prefix, tmp_path / "cache"), store) for one in (path, prefix))
    for document in range(40):
        assert text.tokens.document(document)[0].tolist() == ids.tokens.document(document)[0].tolist()
        first = int(store.document(document)[1].argmax())
        of_completion = [chunk for chunk in ids.chunks(document).tolist() if chunk[0] >= first]
        assert text.chunks(document).tolist() == of_completion and len(of_completion) > 1


def test_tokenised_conversations_are_refused(write_jsonl, tmp_path):
    """The conversations are in the student's template, and the teacher has another one."""
    chat = {"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]}
    student, prefix = chat_tokenizer(300), str(tmp_path / "chat")
    build_store([write_jsonl("chat.jsonl", chat, {"text": "the fox"})], prefix, student, True)
    same = dict(tokenizer=student, vocab_size=student.vocab_size)
    assert len(open_pair(prefix, tmp_path, SharedTokens(), **same)[0])
    with refused("corpus-of-another-model: is a tokenised corpus of"):
        open_pair(prefix, tmp_path, teacher_text(), **same)


@pytest.mark.slow
def test_bytes_do_not_depend_on_workers(path, tmp_path):
    student = str(tmp_path / "student")
    build_store([path], student, STUDENT, True)
    for workers in (0, 2):
        build(path, student, tmp_path / f"{workers}", workers=workers)
    assert files_of(tmp_path / "0") == files_of(tmp_path / "2") and len(files_of(tmp_path / "0")) == 5
    assert len(TokenStore(student)) > 64


def test_the_cache_sees_all_that_decides_the_alignment(write_jsonl, tmp_path):
    path, student = write_jsonl("few.jsonl", *({"text": text} for text in texts(8))), str(tmp_path / "few")
    build_store([path], student, STUDENT, True)
    prefixes = {build(path, student, tmp_path / "cache") for _ in range(2)}
    assert len(prefixes) == 1
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}
    changed = [teacher_text(COARSE), teacher_text(alignment="dp"), teacher_text(reasoning=False)]
    prefixes |= {build(path, student, tmp_path / "cache", text) for text in changed}
    prefixes.add(build(path, student, tmp_path / "cache", teacher_text(name="other", seq_length=64)))
    assert len(prefixes) == 4
    assert before == {file: file.stat().st_mtime_ns for file in before}


def test_a_torn_cache_is_built_again(path, student, tmp_path):
    prefix = build(path, student, tmp_path / "cache")
    before = files_of(tmp_path / "cache")
    for file in sorted((tmp_path / "cache").iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        assert build(path, student, tmp_path / "cache") == prefix
        assert files_of(tmp_path / "cache") == before


def test_a_corpus_of_another_version_of_records_is_made_again(path, student, tmp_path):
    """That version made as many tokens of the records, but others."""
    prefix = build(path, student, tmp_path / "cache")
    made = files_of(tmp_path / "cache")
    ids, meta = Path(f"{prefix}.bin"), Path(f"{prefix}.meta.json")
    (np.fromfile(ids, np.uint16) ^ 1).tofile(ids)
    earlier = json.loads(meta.read_text()) | {"records_version": RECORDS_VERSION - 1}
    meta.write_text(json.dumps(earlier))
    assert build(path, student, tmp_path / "cache") == prefix
    assert files_of(tmp_path / "cache") == made


@pytest.mark.parametrize(
    ("records", "what"), [(149, "document 149"), (151, "document 150"), (0, "document 0")]
)
def test_the_students_corpus_must_be_that_of_the_file(path, student, write_jsonl, tmp_path, records, what):
    changed = texts(151)[:records] or ["another text", *texts(150)[1:]]
    other = write_jsonl("other.jsonl", *({"text": text} for text in changed))
    with refused("cached-file-damaged: cannot be aligned") as caught:
        build(other, student, tmp_path / "cache")
    assert what in caught.value.what
    assert not files_of(tmp_path / "cache")


def test_records_that_the_teacher_refuses(write_jsonl, tmp_path):
    chat = {"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]}
    path = write_jsonl("chat.jsonl", {"text": "fox"}, chat)
    with pytest.raises(DataError, match="qwen: .*chat.jsonl:2: the tokenizer has no chat template"):
        open_pair(path, tmp_path, teacher_text(name="qwen"), tokenizer=chat_tokenizer(350))


def test_ids_that_the_teachers_model_does_not_know(path, student, tmp_path):
    with refused("token-beyond-vocabulary: the model knows 0 to"):
        build(path, student, tmp_path / "cache", teacher_text(vocab_size=100))
