"""Segments of rendered text and token ids: the same documents as the conversation that they come from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mkd.data.aligned.aligned_documents import RowAligner, StoreAligner
from mkd.data.aligned.aligned_ids import Pair
from mkd.data.corpus.documents import encode_record
from mkd.data.corpus.encoding import FileBatch
from mkd.data.corpus.store import StoreFiles, TokenStore
from mkd.data.corpus.store_builder import build_store
from mkd.data.first_records import kinds_of_records
from mkd.data.records.parsing import parse_row
from mkd.errors import DataError
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.tokenizer import Tokenizer
from tests.reported import refused
from tests.tokenizers.trained import train_hf_tokenizer

MESSAGES = [
    {"role": "user", "content": "Which fox?"},
    {"role": "assistant", "content": "The quick one."},
    {"role": "user", "content": "Caf\u00e9 \U0001f98a <|im_end|>?"},
    {"role": "assistant", "content": "A brown \U0001f98a!"},
]


def segments_of(tokenizer, ids, loss):
    """Return the text of the ids in runs of equal loss."""
    borders = [0, *(i for i in range(1, len(ids)) if loss[i] != loss[i - 1]), len(ids)]
    pairs = zip(borders, borders[1:], strict=False)
    return [{"text": tokenizer.decode(ids[a:b]), "loss": bool(loss[a])} for a, b in pairs]


def same_records(tokenizer):
    """Return a conversation as messages, as segments and as tokens under all names."""
    ids, loss = tokenizer.apply_chat_template(Conversation(MESSAGES))
    segments = segments_of(tokenizer, ids, loss)
    labels = [i if one else -100 for i, one in zip(ids, loss, strict=True)]
    return [
        {"messages": MESSAGES},
        {"segments": segments},
        {"segments": [{"text": one["text"], "label": int(one["loss"]), "role": "x"} for one in segments]},
        {"tokens": {"ids": ids, "loss": loss}},
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids, "completion_mask": loss, "attention_mask": [1] * len(ids)},
        {"input_ids": ids, "assistant_masks": [one == 1 for one in loss]},
        {"input_ids": ids, "completion_mask": loss, "assistant_masks": [1] * len(ids)},
        {"input_ids": ids, "completion_mask": [1] * len(ids), "assistant_masks": loss},
    ]


def test_all_forms_of_a_conversation_become_the_same_corpus(tokenizer, tmp_path):
    corpora = []
    for number, record in enumerate(same_records(tokenizer)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(record) + "\n")
        summary = build_store([str(path)], str(tmp_path / str(number)), tokenizer, append_eod=True)
        files = StoreFiles(str(tmp_path / str(number)))
        corpora.append([one.read_bytes() for one in (files.bin, files.idx, files.loss_mask)])
        assert summary.trained_ends and kinds_of_records("--data-path", str(path), 0) == set(summary.kinds)
    assert all(corpus == corpora[0] for corpus in corpora)
    notes = {number: TokenStore(str(tmp_path / str(number))).meta.get("notes", {}) for number in (1, 2, 5)}
    said = {number: [note for one in notes[number].values() for note in one] for number in notes}
    assert said == {1: [], 2: ["ignored keys: segments.role (1)"], 5: ["ignored keys: attention_mask (1)"]}


def test_rows_of_tables(tokenizer, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    _, segments, _, tokens, labelled, *_ = same_records(tokenizer)
    for number, record in enumerate((segments, tokens, labelled)):
        pq.write_table(pa.Table.from_pylist([record]), tmp_path / f"{number}.parquet")
        build_store([str(tmp_path / f"{number}.parquet")], str(tmp_path / str(number)), tokenizer, True)
    stores = [TokenStore(str(tmp_path / str(number))).document(0) for number in range(3)]
    for ids, loss in stores[1:]:
        assert ids.tolist() == stores[0][0].tolist() and loss.tolist() == stores[0][1].tolist()


def test_a_token_over_a_border_of_segments_has_loss(tokenizer):
    whole = tokenizer.encode_continuation("The quick brown fox")
    assert [tokenizer.decode([one]) for one in whole[:2]] == ["The", " qu"]
    ids, loss = tokenizer.encode_segments([("The q", False), ("u", True), ("ick brown fox", False)])
    assert ids == whole and loss == [0, 1] + [0] * (len(ids) - 2)
    assert not any(tokenizer.encode_segments([("", True), ("The fox", False), ("", True)])[1])


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"segments": []}, "segments is an empty list"),
        ({"segments": "a"}, "segments is a string"),
        ({"segments": [{"text": "a", "loss": True}, "b"]}, "segment 2 is a string"),
        ({"segments": [{"text": "a"}]}, "segment 1 has no loss"),
        ({"segments": [{"text": "a", "loss": True, "label": True}]}, "segment 1 has loss and label"),
        ({"segments": [{"text": "a", "loss": 0.5}]}, "segment 1: loss is 0.5"),
        ({"segments": [{"text": None, "loss": 1}]}, "segment 1: text is missing or null"),
        ({"tokens": [1]}, "tokens is a list"),
        ({"tokens": {"ids": [1]}}, "tokens has no loss"),
        ({"tokens": {"ids": [1, 2], "loss": [1]}}, "tokens: ids has 2 numbers, and tokens: loss 1"),
        ({"tokens": {"ids": [1, -2], "loss": [0, 1]}}, "tokens: ids: -2 at token 2"),
        ({"tokens": {"ids": [1, True], "loss": [0, 1]}}, "tokens: ids: a boolean at token 2"),
        ({"tokens": {"ids": [1, 2.0], "loss": [0, 1]}}, "tokens: ids: a number at token 2"),
        ({"tokens": {"ids": [1, 2], "loss": [0, 2]}}, "tokens: loss: 2 at token 2"),
        ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "labels has 6 at token 1, and input_ids 5"),
        ({"input_ids": [5], "labels": [5, 6]}, "input_ids has 1 numbers, and labels 2"),
        ({"input_ids": [5]}, "the record has input_ids, but no labels"),
        (
            {"input_ids": [5], "labels": [5], "tokens": {"ids": [5]}},
            "the record is tokens and labels at once",
        ),
        (
            {"input_ids": [5], "labels": [5], "completion_mask": [1]},
            "the record is labels and completion-mask",
        ),
        ({"input_ids": [5], "completion_mask": [1], "assistant_masks": [2]}, "assistant_masks: 2 at token 1"),
        (
            {"input_ids": [5], "completion_mask": [], "assistant_masks": [1]},
            "input_ids has 1 numbers, and comp",
        ),
        (
            {"completion_mask": [1], "assistant_masks": [1]},
            "the record has completion_mask and assistant_masks, ",
        ),
        (
            {"text": "a", "messages": MESSAGES, "input_ids": [5], "labels": [5]},
            "the record is text and messages",
        ),
        ({"tokens": {"ids": [1], "loss": [0]}, "images": ["a"]}, "the record has images beside tokens"),
        ({"tokens": {"ids": [1], "loss": [0]}, "label": True}, "the record has label beside tokens"),
    ],
)
def test_records_that_are_refused(record, what):
    with pytest.raises(DataError) as caught:
        parse_row(json.dumps(record).encode())
    assert caught.value.what.startswith(what) and caught.value.why and caught.value.do, caught.value


def test_of_two_masks_a_token_has_loss_if_both_are_1():
    masks = {"completion_mask": [0, 0, 1, 1], "assistant_masks": [False, True, False, True]}
    record = parse_row(json.dumps({"input_ids": [5, 6, 7, 8], **masks, "tokens": 4}).encode())
    assert record.values == (((5, 6, 7, 8), (0, 0, 0, 1)),) and record.ignored == ("tokens",)


OTHER_KINDS = {
    "text": {"text": "The fox."},
    "messages": {"messages": MESSAGES},
    "conversations": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "prompt-completion": {"prompt": "Which fox?", "completion": " The quick one."},
    "chat-completion": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]},
    "pair": {"prompt": "Which fox?", "chosen": " This.", "rejected": " That."},
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_tokens_beside_another_kind_are_ignored_and_named(kind, tokenizer, tmp_path):
    alone = OTHER_KINDS[kind]
    ids = {"input_ids": [5, 6], "labels": [5, -100], "completion_mask": [0, 1], "assistant_masks": [1, 1]}
    given = {**ids, "tokens": {"ids": [5], "loss": [1]}, "segments": [{"text": "a", "loss": True}]}
    expected = parse_row(json.dumps(alone).encode())
    for keys in (("input_ids", "labels"), ("input_ids", "completion_mask"), ("tokens",), tuple(given)):
        record = parse_row(json.dumps({**alone, **{key: given[key] for key in keys}}).encode())
        assert record == expected and record.ignored == keys  # `ignored` is not compared
    if kind in ("text", "messages"):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([{**alone, **ids}]), tmp_path / "both.parquet")
        (tmp_path / "alone.jsonl").write_text(json.dumps(alone) + "\n")
        stores = []
        for name in ("alone.jsonl", "both.parquet"):
            build_store([str(tmp_path / name)], str(tmp_path / name[:4]), tokenizer, append_eod=True)
            stores.append(TokenStore(str(tmp_path / name[:4])))
        assert [one.tolist() for one in stores[0].document(0)] == [
            one.tolist() for one in stores[1].document(0)
        ]
        notes = [note for one in stores[1].meta["notes"].values() for note in one if "ignored" in note]
        assert [set(note.removeprefix("ignored keys: ").split(", ")) for note in notes] == [
            {f"{key} (1)" for key in ids}
        ]


def test_other_meanings_of_the_keys_are_ignored():
    speech = {"text": "a", "segments": [{"text": "a", "start": 0.0}], "tokens": 57}
    record = parse_row(json.dumps(speech).encode())
    assert (record.kind, record.ignored) == ("text", ("segments", "tokens"))


def test_ids_of_another_tokenizer_are_refused(tokenizer):
    record = parse_row(json.dumps({"tokens": {"ids": [1, tokenizer.vocab_size], "loss": [0, 1]}}).encode())
    with refused("token-beyond-vocabulary: token 2 has the id"):
        encode_record(record, tokenizer, append_eod=True)


def test_segments_need_a_tokenizer_that_reads_control_tokens():
    with refused("chat-template-missing: the tokenizer reads no control tokens"):
        Tokenizer.encode_segments(None, [("a", True)])  # type: ignore[arg-type]


def test_a_teacher_with_another_tokenizer_reads_them_as_a_tokenised_corpus(tokenizer, tmp_path):
    other = HuggingFaceTokenizer(train_hf_tokenizer(vocab_size=290))
    pair = Pair(tokenizer, other, "byte_offset", False, append_eod=True)
    rows = [(n, json.dumps(one).encode()) for n, one in enumerate(same_records(tokenizer)[1:], 1)]
    Path(tmp_path / "a.jsonl").write_bytes(b"\n".join(row for _, row in rows))
    build_store([str(tmp_path / "a.jsonl")], str(tmp_path / "a"), tokenizer, append_eod=True)
    aligned = RowAligner(pair)(FileBatch("a.jsonl", rows))
    stored = StoreAligner(TokenStore(str(tmp_path / "a")), pair)(range(len(rows)))
    assert not aligned.errors
    for name in ("student_ids", "teacher_ids", "student_marks", "teacher_marks", "teacher_lengths"):
        assert np.array_equal(getattr(aligned, name), getattr(stored, name)), name
    assert aligned.student_marks.any()
