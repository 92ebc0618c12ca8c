"""Relations on disk: read back unchanged, refused if damaged or made for other tokenizers."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest

from mkd.errors import UsageError
from mkd.tokenizers.chat_input import ChatSettings
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.xtoken import build_projection
from mkd.xtoken.vocabulary.relation import ProjectionSettings, build_relation
from mkd.xtoken.vocabulary.relation_cache import save_relation
from tests.reported import refused
from tests.xtoken.small_tokenizers import byte_level, sentence_piece, train_byte_level


def assert_same(one, other) -> None:
    assert type(one) is type(other)
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(mine):
            assert_same(mine, theirs)
        else:
            np.testing.assert_array_equal(mine, theirs)
            assert not isinstance(mine, np.ndarray) or mine.dtype == theirs.dtype


def stored(tmp_path: Path, **changes: np.ndarray) -> Path:
    """Write the relation of byte_level <- sentence_piece to a file, with some arrays replaced."""
    path, settings = tmp_path / "relation.npz", ProjectionSettings()
    save_relation(
        path, build_relation(byte_level(), sentence_piece()), byte_level(), sentence_piece(), settings
    )
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files} | changes
    np.savez(path, **arrays)
    return path


def test_what_is_read_is_what_was_built(tmp_path):
    student, teacher = byte_level(), sentence_piece()
    built = build_projection(student, teacher, cache_dir=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    written = file.stat().st_mtime_ns
    assert_same(built, build_projection(student, teacher, cache_dir=tmp_path / "cache"))
    assert_same(built, build_projection(student, teacher))
    # The file was read, and nothing is left behind.
    assert file.stat().st_mtime_ns == written and [file] == list((tmp_path / "cache").iterdir())


def test_tokenizers_directions_and_settings_have_files_of_their_own(tmp_path):
    ours, theirs = byte_level(), sentence_piece()
    for student, teacher in ((ours, theirs), (theirs, ours), (ours, sentence_piece(700))):
        build_projection(student, teacher, cache_dir=tmp_path)
    build_projection(byte_level(), sentence_piece(), cache_dir=tmp_path, settings=ProjectionSettings(top_k=2))
    build_projection(
        byte_level(), sentence_piece(), cache_dir=tmp_path, settings=ProjectionSettings(("exact", "special"))
    )
    assert len(list(tmp_path.glob("*.npz"))) == 5


def test_a_file_may_be_named(tmp_path):
    read = build_projection(byte_level(), sentence_piece(), projection=stored(tmp_path))
    assert_same(read, build_projection(byte_level(), sentence_piece()))


def test_settings_for_conversations_make_no_other_relation(tmp_path):
    hf = train_byte_level()
    hf.chat_template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for chat in (None, ChatSettings("last", {"a": 1}, "2026-11-26"), ChatSettings(date="2026-11-27")):
        build_projection(HuggingFaceTokenizer(hf, chat), sentence_piece(), cache_dir=tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 1


def test_the_published_form_replaces_the_matrix_alone(tmp_path):
    indices, likelihoods = np.full((900, 2), 5), np.tile(np.float32([2, 0]), (900, 1))
    np.savez(tmp_path / "published.npz", indices=indices, likelihoods=likelihoods)
    relation = build_projection(byte_level(), sentence_piece(), projection=tmp_path / "published.npz")
    built = build_projection(byte_level(), sentence_piece())
    assert relation.projection.columns.tolist() == [5] * 900 and (relation.projection.values == 1).all()
    assert_same(relation.spellings, built.spellings)
    assert_same(relation.with_projection(built.projection), built)


def test_a_failed_write_leaves_no_file(tmp_path):
    (tmp_path / "relation.npz").mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        save_relation(
            tmp_path / "relation.npz",
            build_relation(byte_level(), sentence_piece()),
            byte_level(),
            sentence_piece(),
            ProjectionSettings(),
        )
    assert [path.name for path in tmp_path.iterdir()] == ["relation.npz"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"offsets": np.arange(5)}, "its matrix has 4 rows, and the student's tokenizer 900 ids"),
        ({"columns": np.zeros(3, np.int64)}, "and it holds 3 columns"),
        ({"common_teacher": np.array([900])}, "it names ids beyond the 900 of the student"),
        ({"meta": np.array("no JSON")}, "it cannot be read: JSONDecodeError"),
        ({"meta": np.array(json.dumps({"format": 0}))}, "its format is 0, and this run's is 3"),
    ],
)
def test_files_of_other_sizes_are_refused(tmp_path, changes, why):
    with refused("projection-does-not-fit: does not fit this run", UsageError) as error:
        build_projection(byte_level(), sentence_piece(), projection=stored(tmp_path, **changes))
    assert why in error.value.why  # one code for every way in which a file may not fit


def test_a_file_of_other_tokenizers_is_refused(tmp_path):
    path = stored(tmp_path)
    with refused("projection-does-not-fit: does not fit this run") as error:
        build_projection(byte_level(), byte_level(900, reverse=True), projection=path)
    assert "teacher fingerprint" in error.value.why
    with refused("projection-does-not-fit: does not fit this run") as error:
        build_projection(byte_level(), sentence_piece(700), projection=path)
    assert "teacher size" in error.value.why


def test_files_that_cannot_be_read_are_refused(tmp_path):
    path = stored(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with refused("projection-does-not-fit: does not fit this run"):
        build_projection(byte_level(), sentence_piece(), projection=path)
    with refused("path-not-found: is not a file"):
        build_projection(byte_level(), sentence_piece(), projection=tmp_path / "nothing.npz")
