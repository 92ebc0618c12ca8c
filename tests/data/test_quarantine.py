"""Bad records of every kind of file: skipped and listed up to a limit, refused above it.

All other data is unchanged.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import build_store
from mkd.data.quarantine import BadRecord
from mkd.errors import EXIT_DATA, DataError, ErrorList
from tests.data.pairs import chat_tokenizer, open_pair, teacher_text
from tests.reported import refused

GOOD = {
    1: "with a byte order mark",
    3: "ends like a line of Windows",
    12: "the same text",
    25: "the last one",
}
LINES = [  # (line, the start of the reason; None: it is a good one; "": it is blank)
    (b'\xef\xbb\xbf{"text": "with a byte order mark"}', None),
    (b"", ""),
    (b'{"text": "ends like a line of Windows"}\r', None),
    (b"  \t\r", ""),
    (b'{"text": "cut of', "not valid JSON: Unterminated string"),
    (b"null", "a JSON null, not an object"),
    (b'{"text": null}', "text is null"),
    (b"17", "a JSON number, not an object"),
    (b'{"text": 17}', "text is a number"),
    (b'{"body": "x"}', "no known keys (found: 'body')"),
    (b'["x"]', "a JSON list, not an object"),
    (b'{"text": "the same text"}', None),
    (b'{"text": ["x"]}', "text is a list"),
    (b'{"text": NaN}', "not valid JSON: NaN is not a JSON number"),
    (b'{"text": "x", "score": NaN}', "not valid JSON: NaN is not a JSON number"),
    (b'{"text": "x", "text": "y"}', "not valid JSON: the key 'text' is given twice"),
    (b'{"text": "caf\xe9"}', "not UTF-8: invalid continuation byte at byte 14"),
    (rb'{"text": "a\ud800b"}', "text has half of a surrogate pair at character 2"),
    (rb'{"text": "a\u0000b"}', "text has a NUL at character 2"),
    (b'{"text": "a\0b"}', "not valid JSON: Invalid control character"),
    (b"\0" * 40, "not valid JSON: Expecting value"),
    (b'{"text": "a"} {"text": "b"}', "not valid JSON: Extra data"),
    (b'{"text": ' + b"[" * 100_000, "not valid JSON: maximum recursion depth"),
    (
        b'{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}',
        "not valid JSON: the key 'role'",
    ),
    (b'{"text": "the last one"}', None),
    (b'{"text": "no line end', "not valid JSON: Unterminated string"),
]
BAD = {number: reason for number, (_, reason) in enumerate(LINES, 1) if reason}


@pytest.fixture
def damaged(tmp_path):
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in LINES))
    return str(path)


def entries(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def texts_of(prefix, tokenizer) -> list[str]:
    store = TokenStore(prefix)
    return [
        tokenizer.decode(store.document(i)[0].tolist()).removesuffix("<|endoftext|>")
        for i in range(len(store))
    ]


@pytest.mark.fault(24)
def test_every_bad_line_is_listed_and_the_others_are_intact(damaged, tokenizer, tmp_path):
    prefix = str(tmp_path / "corpus")
    summary = build_store([damaged], prefix, tokenizer, True, max_bad_records=len(BAD))
    assert texts_of(prefix, tokenizer) == list(GOOD.values())
    listed = entries(prefix + ".quarantine.jsonl")
    assert [entry["line"] for entry in listed] == list(BAD) and summary.bad_records == len(BAD)
    assert all(entry["reason"].startswith(BAD[entry["line"]]) for entry in listed)
    assert {entry["file"] for entry in listed} == {damaged}
    assert listed[0]["start"] == '{"text": "cut of' and max(len(entry["start"]) for entry in listed) == 80
    assert next(entry for entry in listed if entry["line"] == 17)["start"] == r'{"text": "caf\xe9"}'


@pytest.mark.ranks  # workers
@pytest.mark.fault(24)
def test_the_same_records_whatever_the_number_of_workers(damaged, tokenizer, write_jsonl, tmp_path):
    other = write_jsonl("b.jsonl", *[{"text": "fox"}, b"{", {"text": "dog"}] * 60)
    for workers in (0, 2):
        build_store(
            [damaged, other],
            str(tmp_path / f"{workers}" / "c"),
            tokenizer,
            True,
            workers,
            max_bad_records=1000,
        )
    contents = [
        {file.name: file.read_bytes() for file in (tmp_path / f"{workers}").iterdir()} for workers in (0, 2)
    ]
    assert contents[0] == contents[1] and "c.quarantine.jsonl" in contents[0]
    assert contents[0]["c.quarantine.jsonl"].count(b"\n") == len(BAD) + 60


@pytest.mark.parametrize("limit", [0, 1, len(BAD) - 1])
@pytest.mark.fault(24)
def test_one_record_more_than_allowed_is_an_error(damaged, tokenizer, tmp_path, limit):
    with pytest.raises(ErrorList) as caught:
        build_store([damaged], str(tmp_path / "c" / "corpus"), tokenizer, True, max_bad_records=limit)
    assert caught.value.exit_code == EXIT_DATA and not list((tmp_path / "c").iterdir())
    *first, total = caught.value.errors
    assert [str(error).split(": ")[0] for error in first] == [f"{damaged}:{line}" for line in list(BAD)[:10]]
    assert total.what.startswith(f"{len(BAD)} bad records") and f"--max-bad-records {limit}" in total.what


def test_nothing_is_left_where_all_are_bad(tokenizer, write_jsonl, tmp_path):
    path = write_jsonl("a.jsonl", *[b"{"] * 12)
    with pytest.raises(ErrorList) as caught:
        build_store([path], str(tmp_path / "corpus"), tokenizer, True, max_bad_records=20)
    *first, empty = caught.value.errors
    assert [str(error).partition(": ")[0] for error in first] == [f"{path}:{line}" for line in range(1, 11)]
    assert (
        empty.what == f"no tokens in {path}"
        and "12 bad records" in empty.why
        and caught.value.exit_code == EXIT_DATA
    )


def test_a_single_bad_record_says_how_to_leave_it_out(tokenizer, write_jsonl, tmp_path):
    path = write_jsonl("a.jsonl", {"text": "fox"}, b"{")
    with pytest.raises(
        DataError, match="(?s)a.jsonl:2: not valid JSON.*or leave it out: --max-bad-records 1"
    ):
        build_store([path], str(tmp_path / "corpus"), tokenizer, True)


def test_an_unreadable_file_is_no_bad_record(tokenizer, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with refused("data-file-unreadable: is not a valid"):
        build_store(
            [str(tmp_path / "a.parquet")], str(tmp_path / "corpus"), tokenizer, True, max_bad_records=1000
        )


def test_a_text_file(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  \ncaf\xe9\ntwo\0\n{not JSON}\n" + b"\0" * 9)
    build_store([str(path)], str(tmp_path / "corpus"), tokenizer, True, max_bad_records=3)
    assert texts_of(str(tmp_path / "corpus"), tokenizer) == ["one", "{not JSON}"]
    listed = entries(tmp_path / "corpus.quarantine.jsonl")
    assert [(entry["line"], entry["reason"].split(":")[0]) for entry in listed] == [
        (4, "not UTF-8"),
        (5, "text has a NUL at character 4"),
        (7, "text has a NUL at character 1"),
    ]


@pytest.mark.parametrize("suffix", ["parquet", "stream.arrow", "file.arrow"])
def test_tables(tokenizer, tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    values = [b"one", None, b"caf\xe9", b"a\0b", b"", b"two", b"\xed\xa0\x80"]
    as_bytes = pa.array(values, pa.binary())
    # As a writer that does not check would write it.
    as_text = pa.Array.from_buffers(pa.string(), len(values), as_bytes.buffers())
    for column in (as_text, as_bytes):
        path = write_table(pa, tmp_path / f"t.{suffix}", pa.table({"text": column, "id": range(len(values))}))
        build_store([path], str(tmp_path / "corpus"), tokenizer, True, max_bad_records=4)
        assert texts_of(str(tmp_path / "corpus"), tokenizer) == ["one", "", "two"]
        listed = entries(tmp_path / "corpus.quarantine.jsonl")
        assert [(entry["line"], entry["reason"].split(":")[0]) for entry in listed] == [
            (2, "text is null"),
            (3, "not UTF-8"),
            (4, "text has a NUL at character 2"),
            (7, "not UTF-8"),
        ]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"text": [1.5, float("nan")]}, "text is a number"),
        ({"text": [["a"], ["b"]]}, "text is a list"),
        ({"messages": ["a", "b"]}, "messages is a string"),
        ({"text": ["a", "b"], "messages": [[], []]}, "the record is text and messages at once"),
    ],
)
def test_tables_whose_columns_are_none_of_ours(tokenizer, tmp_path, columns, reason):
    pa = pytest.importorskip("pyarrow")
    path = write_table(pa, tmp_path / "t.parquet", pa.table(columns))
    with pytest.raises(ErrorList) as caught:
        build_store([path], str(tmp_path / "corpus"), tokenizer, True, max_bad_records=1)
    assert [error.what for error in caught.value.errors[:2]] == [f"{path}:{row}: {reason}" for row in (1, 2)]


@pytest.mark.parametrize("suffix", ["parquet", "stream.arrow", "file.arrow"])
def test_a_table_without_a_column_of_ours(tokenizer, tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    path = write_table(pa, tmp_path / f"t.{suffix}", pa.table({"prompt": ["a"], "answer": ["b"]}))
    with refused("record-without-known-keys"):
        build_store([path], str(tmp_path / "corpus"), tokenizer, True, max_bad_records=9)


@pytest.mark.parametrize("suffix", ["parquet", "stream.arrow"])
def test_a_table_with_one_column_twice(tokenizer, tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    path = write_table(pa, tmp_path / f"t.{suffix}", table)
    with refused("record-ambiguous: has two columns"):
        build_store([path], str(tmp_path / "corpus"), tokenizer, True, max_bad_records=9)


def write_table(pa, path: Path, table) -> str:
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        new = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    return str(path)


def test_a_cached_corpus_keeps_its_list_and_its_limit(damaged, tokenizer, tmp_path):
    """The second run tokenises nothing, and must refuse, list and skip the same records."""
    cache, listed = tmp_path / "cache", tmp_path / "log" / "quarantine.jsonl"
    options = dict(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, quarantine=str(listed))
    for _ in range(2):
        train, _ = open_pair(damaged, cache, max_bad_records=len(BAD), **options)
        assert [entry["line"] for entry in entries(listed)] == list(BAD)
        assert train.describe()[0].endswith(f"{len(BAD)} bad records skipped")
        listed.unlink()
    before = {file: file.stat().st_mtime_ns for file in cache.iterdir() if file.is_file()}
    with pytest.raises(ErrorList, match=f"{len(BAD)} bad records: more than --max-bad-records 3") as caught:
        open_pair(damaged, cache, max_bad_records=3, **options)
    assert f"{damaged}:5: not valid JSON" in str(caught.value) and caught.value.exit_code == EXIT_DATA
    assert before == {file: file.stat().st_mtime_ns for file in cache.iterdir() if file.is_file()}


def test_a_list_of_an_earlier_run_goes(tokenizer, write_jsonl, tmp_path):
    listed = tmp_path / "quarantine.jsonl"
    listed.write_text("old\n")
    path = write_jsonl("a.jsonl", {"text": "fox jumps"})
    open_pair(path, tmp_path / "cache", tokenizer=tokenizer, vocab_size=400, quarantine=str(listed))
    assert not listed.exists()


def test_student_and_teacher_leave_out_the_same_records(write_jsonl, tmp_path):
    """One record is unreadable, and another is refused by the teacher only: neither is in any pack."""
    chat = {"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]}
    path = write_jsonl("a.jsonl", {"text": "The quick brown"}, b"{", chat, {"text": "lazy dog"})
    student, listed = chat_tokenizer(350), tmp_path / "quarantine.jsonl"
    options = dict(tokenizer=student, vocab_size=350, max_bad_records=1, quarantine=str(listed))
    train, _ = open_pair(path, tmp_path / "cache", teacher_text(name="qwen"), pack="none", **options)
    tokens = [student.decode(train[i].tokens[: train[i].lengths.sum()].tolist()) for i in range(len(train))]
    assert tokens == ["The quick brown<|endoftext|>", "lazy dog<|endoftext|>"]
    for i in range(len(train)):
        assert len(train[i].teacher_inputs[0].chunks.kinds) > 0
    assert [(entry["line"], entry.get("teacher")) for entry in entries(listed)] == [(2, None), (3, "qwen")]
    assert train.describe()[0].endswith("2 bad records skipped")
    assert train.describe("q.jsonl")[0].endswith("2 bad records skipped, listed in q.jsonl")
    path = write_jsonl("a.jsonl", {"text": "fox"}, {"text": "dog"}, chat)
    with pytest.raises(DataError, match="qwen: .*a.jsonl:3: the tokenizer has no chat template"):
        open_pair(path, tmp_path / "other", teacher_text(name="qwen"), **(options | {"max_bad_records": 0}))


def test_bad_records_come_back_from_workers_as_they_are():
    error = BadRecord.from_row("a.jsonl", 3, b"{", DataError("what", "why", "do", code="example"))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.entry) == (
        str(error),
        {"file": "a.jsonl", "line": 3, "reason": "what", "start": "{"},
    )
