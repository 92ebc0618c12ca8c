"""Flags of messages that say whether they have loss, in every kind of record that holds messages."""

from __future__ import annotations

import json

import pytest

from mkd.data.aligned.aligned_documents import align_record
from mkd.data.aligned.aligned_ids import Pair
from mkd.data.corpus.documents import encode_documents, encode_record
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import read_rows
from mkd.errors import DataError
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.reported import refused
from tests.tokenizers.trained import CHATML, train_hf_tokenizer

ASK = {"role": "user", "content": "Which fox?"}
BAD, GOOD = ({"role": "assistant", "content": text} for text in ("A lazy dog.", "The quick one."))
HF = train_hf_tokenizer()
TOKENIZER = HuggingFaceTokenizer(HF)
MARKED = CHATML.replace(
    "message['content'] | trim + '<|im_end|>\n' }}",
    "'' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)


def trained(record, tokenizer=TOKENIZER):
    (document,) = encode_documents(parse_row(json.dumps(record).encode()), tokenizer, True)
    return tokenizer.decode(document.ids[document.loss == 1].tolist())


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["turns", "marks"])
@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ({"loss": False}, {"loss": True}),
        ({"train": False}, {}),
        ({"trainable": False}, {}),
        ({"training": False}, {}),
        ({"weight": 0}, {"weight": 1}),
        ({"weight": 0.0}, {"weight": 1.0}),
        ({"loss_scale": 0, "loss": False}, {"loss": None}),
        ({"step_loss_mask": 0}, {"loss_mask": 1}),
        ({"masked": True}, {"masked": False}),
        ({"masked": True, "loss_weight": 0.0}, {"masked": False, "train": True}),
    ],
    ids=lambda flags: "".join(map(str, flags)),
)
def test_a_flag_removes_the_loss_of_a_message(template, bad, good):
    tokenizer = HuggingFaceTokenizer(train_hf_tokenizer(template))
    record = {"messages": [ASK | {"weight": 0}, BAD | bad, ASK, GOOD | good]}
    assert trained(record, tokenizer) == "The quick one.<|im_end|>"
    plain = HF.apply_chat_template([ASK, BAD, ASK, GOOD], return_dict=False)
    assert encode_record(parse_row(record), TOKENIZER, True).ids.tolist() == plain


def test_flags_in_other_records():
    flagged = BAD | {"train": False}
    turns = [
        {"from": "human", "value": "Which fox?"},
        {"from": "gpt", "value": "A lazy dog.", "train": False},
    ]
    answer = {"from": "gpt", "value": "The quick one.", "train": True}
    for record in (
        {"conversations": [*turns, turns[0], answer]},
        {"prompt": [ASK], "completion": [flagged, ASK, GOOD]},
        {"prompt": [ASK, flagged, ASK], "completion": [GOOD | {"loss": 1}]},
    ):
        assert trained(record) == "The quick one.<|im_end|>"
    pair = {"prompt": [ASK], "chosen": [flagged, ASK, GOOD], "rejected": [GOOD, ASK, flagged]}
    for document in encode_documents(parse_row(pair), TOKENIZER, True):
        assert HF.decode(document.ids[document.loss == 1]) == "The quick one.<|im_end|>"


def test_only_flagged_turns_are_aligned_with_a_teacher():
    teacher = HuggingFaceTokenizer(train_hf_tokenizer(vocab_size=300))
    record = parse_row({"messages": [ASK, BAD | {"loss": False}, ASK, GOOD]})
    aligned = align_record(record, Pair(TOKENIZER, teacher, "byte_offset", True, True))
    document = encode_record(record, TOKENIZER, True)
    assert aligned.student_ids.tolist() == document.ids.tolist()
    covered = [i for first, last, *_ in aligned.chunks.tolist() for i in range(first, last)]
    assert covered == document.loss.nonzero()[0].tolist()


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([ASK, GOOD | {"weight": 0.5}], "record-loss-flag-not-valid: with nothing between"),
        ([ASK, GOOD | {"loss": "no"}], "record-loss-flag-not-valid: with nothing between"),
        ([ASK, GOOD | {"loss": True, "weight": 0}], "record-loss-flag-not-valid: contradict each other"),
        ([ASK | {"train": True}, GOOD], "record-loss-flag-not-valid: asks for loss on a message of the"),
        ([ASK, GOOD | {"masked": True, "loss": True}], "record-loss-flag-not-valid: contradict each other"),
        *(
            ([ASK, GOOD | {key: value}], "record-loss-flag-not-valid: seems to say whether the message has")
            for key, value in (
                *(("is_trainable", False), ("isTrainable", True), ("mask", 1), ("no-loss", True)),
                *(("excluded", True), ("Weight", 0), ("token_mask", [0, 1])),
            )
        ),
        ([ASK, GOOD | {"loss_mask": [0, 1, 1]}], "record-loss-flag-not-valid: as a whole or not at all"),
        (
            [ASK, GOOD | {"train_detail": [{"begin_offset": 0, "end_offset": 2}]}],
            "record-loss-flag-not-valid: as a whole or not at all",
        ),
        (
            [ASK, GOOD | {"content": [{"type": "text", "text": "a", "weight": 0}]}],
            "record-loss-flag-not-valid: as a whole or not at all",
        ),
    ],
)
def test_flags_that_are_refused(messages, code):
    with refused(code, DataError):
        parse_row({"messages": messages})


def test_keys_that_only_sound_like_flags_are_no_flags():
    answer = GOOD | {"train_loss": 0.25, "mask_name": "a", "score": 0, "trained_on": None, "skip": [3]}
    record = {"messages": [ASK | {"ignore": True, "masked": True}, answer], "training": True, "mask": "User"}
    assert trained(record) == "The quick one.<|im_end|>"
    tokens = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    assert trained({"messages": [ASK, GOOD]} | tokens) == "The quick one.<|im_end|>"
    assert trained({"messages": [ASK, GOOD], "loss_mask": [0, 1, 1]}) == "The quick one.<|im_end|>"


@pytest.mark.parametrize(
    "key", [{"loss_mask": [0, 1]}, {"train_on_turn": [True]}, {"weights": [0.0, 1.0]}, {"mask_history": True}]
)
def test_masks_of_answers_beside_a_conversation_are_refused(key):
    for record in ({"messages": [ASK, GOOD]}, {"prompt": [ASK], "completion": [GOOD]}):
        with refused("record-key-not-supported: which answers have loss", DataError):
            parse_row(record | key)


NEMO = {
    "mask": "User",
    "system": "",
    "type": "VALUE_TO_TEXT",
    "conversations": [
        {"from": "User", "value": "Which fox?", "label": None},
        {"from": "Assistant", "value": "The quick one.", "label": None},
    ],
}


def test_records_of_nemo_have_loss_where_their_mask_is_not(tmp_path):
    plain = encode_record(parse_row({"messages": [ASK, GOOD]}), TOKENIZER, True)
    for mask in ("User", ["User", "System"], "user", "human"):
        record = parse_row(NEMO | {"mask": mask})
        assert encode_record(record, TOKENIZER, True).ids.tolist() == plain.ids.tolist()
        assert trained(NEMO | {"mask": mask}) == "The quick one.<|im_end|>"
        assert record.ignored == ("type",)  # mask is read
    assert parse_row(NEMO | {"mask": "a.png"}).ignored == ("mask", "type")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist([NEMO, NEMO | {"mask": "Assistant"}]), tmp_path / "a.parquet")
    (_, first), (_, second) = read_rows(tmp_path / "a.parquet")
    assert parse_row(first).ignored == ()
    with refused("record-key-not-supported: has mask 'Assistant'", DataError):
        parse_row(second)


@pytest.mark.parametrize("mask", ["Assistant", ["User", "Assistant"], "System", "gpt"])
def test_masks_of_other_roles_are_refused(mask):
    with refused("record-key-not-supported: beside its messages", DataError):
        parse_row(NEMO | {"mask": mask})


def test_a_prompt_cannot_have_loss():
    for record in (
        {"prompt": [ASK, GOOD | {"loss": True}, ASK], "completion": [GOOD]},
        {"prompt": [ASK, GOOD | {"loss": True}, ASK], "chosen": [GOOD], "rejected": [BAD]},
    ):
        with refused("record-loss-flag-not-valid: of the prompt asks for loss", DataError):
            parse_row(record)
