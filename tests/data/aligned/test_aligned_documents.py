"""Records and tokenised documents on both sides: the ids that each model reads, and chunks of equal text."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.data.aligned.aligned_documents import (
    DocumentRanges,
    Pair,
    RowAligner,
    StoreAligner,
    align_ids,
    align_record,
)
from mkd.data.corpus.documents import encode_record
from mkd.data.corpus.encoding import FileBatch, each_row
from mkd.data.records.kinds import Record
from mkd.data.records.parsing import parse_row
from mkd.data.records.wanted import WantedRecords
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.pairs import STUDENT, TEACHER, chat_tokenizer, texts
from tests.tokenizers.trained import train_hf_tokenizer
from tests.xtoken.small_tokenizers import JAPANESE

TEXT = texts(6)[4]
MESSAGES = [
    {"role": "user", "content": "The fox?"},
    {"role": "assistant", "content": "A lazy dog."},
    {"role": "user", "content": "Answers?"},
    {"role": "assistant", "content": "Reasons have questions."},
]
MARKS_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = chat_tokenizer(350), chat_tokenizer(290)


def pair_of(student=STUDENT, teacher=TEACHER, append_eod=True):
    return Pair(student, teacher, "byte_offset", True, append_eod)


def pieces(pair, aligned):
    """Return [(bytes of the student's tokens, bytes of the teacher's)] of the chunks.

    Tokens that are not text give None.
    """
    sides = []
    for ids, tokenizer, first in (
        (aligned.student_ids, pair.student, 0),
        (aligned.teacher_ids, pair.teacher, 2),
    ):
        chunks = [ids[start:end].tolist() for start, end in aligned.chunks[:, first : first + 2]]
        sides.append([_joined([tokenizer.token_bytes[i] for i in chunk]) for chunk in chunks])
    return list(zip(*sides, strict=True))


def _joined(parts):
    return None if None in parts else b"".join(parts)


@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize(
    ("record", "tokenizers"),
    [
        (Record("text", (TEXT,)), (STUDENT, TEACHER)),
        (Record("text", ("",)), (STUDENT, TEACHER)),
        (Record("prompt-completion", (JAPANESE, TEXT)), (STUDENT, TEACHER)),
        (Record("messages", (Conversation(MESSAGES),)), CHAT),
    ],
    ids=["text", "empty", "completion", "chat"],
)
def test_both_sides_have_the_ids_of_their_tokenizer(record, tokenizers, append_eod):
    pair = pair_of(*tokenizers, append_eod=append_eod)
    aligned = align_record(record, pair)
    for ids, tokenizer in ((aligned.student_ids, pair.student), (aligned.teacher_ids, pair.teacher)):
        assert ids.tolist() == encode_record(record, tokenizer, append_eod).ids.tolist()
    found = pieces(pair, aligned)
    assert all(ours == theirs for ours, theirs in found)
    loss = encode_record(record, pair.student, append_eod).loss
    covered = np.concatenate([np.zeros(0, int), *(np.arange(a, b) for a, b in aligned.chunks[:, :2])])
    expected = loss.sum() if record.kind != "messages" else sum(loss[i] for i in covered)
    assert len(covered) == expected, "chunks are where the student has loss"
    if record.kind == "messages":
        assert found.count((None, None)) == 2, "each turn ends"
        texts_ = b"".join(ours for ours, _ in found if ours)
        assert texts_ == b"A lazy dog.Reasons have questions."
    elif append_eod:
        ends = [
            len(aligned.student_ids) - 1,
            len(aligned.student_ids),
            len(aligned.teacher_ids) - 1,
            len(aligned.teacher_ids),
        ]
        assert aligned.chunks[-1].tolist() == ends


def test_a_teacher_without_eos_leaves_the_students_alone():
    teacher = HuggingFaceTokenizer(train_hf_tokenizer())
    teacher.eos_id = None
    aligned = align_record(Record("text", (TEXT,)), pair_of(teacher=teacher))
    assert aligned.student_ids[-1] == STUDENT.eos_id and aligned.teacher_ids.tolist() == teacher.encode(TEXT)
    assert aligned.chunks[-1, 1::2].tolist() == [len(aligned.student_ids) - 1, len(aligned.teacher_ids)]


def test_tokens_of_a_text_are_aligned_as_the_text():
    pair = pair_of()
    record = align_record(Record("text", (TEXT,)), pair)
    ids = align_ids(record.student_ids, pair)
    for name in ("student_ids", "teacher_ids", "chunks"):
        assert getattr(ids, name).tolist() == getattr(record, name).tolist()


def test_tokens_between_control_tokens_are_aligned():
    """Both know EOS; the student's padding token has no twin, and is in no chunk."""
    pair = pair_of()
    parts = [STUDENT.encode("The parser"), STUDENT.encode(JAPANESE), STUDENT.encode(" help")]
    ids = np.array([*parts[0], STUDENT.eos_id, STUDENT.roles["pad"], *parts[1], STUDENT.eos_id, *parts[2]])
    aligned = align_ids(ids, pair)
    texts_ = [TEACHER.encode(text) for text in ("The parser", JAPANESE, " help")]
    expected = [*texts_[0], TEACHER.eos_id, *texts_[1], TEACHER.eos_id, *texts_[2]]
    found = pieces(pair, aligned)
    assert aligned.teacher_ids.tolist() == expected and all(ours == theirs for ours, theirs in found)
    covered = np.concatenate([np.arange(a, b) for a, b in aligned.chunks[:, :2]])
    assert set(range(len(ids))) - set(covered.tolist()) == {len(parts[0]) + 1}


def test_tokens_of_half_a_character_are_left_out():
    pair = pair_of()
    half = [STUDENT.spell(bytes([byte]))[0] for byte in JAPANESE.encode()[:2]]
    before, after = STUDENT.encode("The parser"), STUDENT.encode(JAPANESE + " help")
    aligned = align_ids(np.array([*before, *half, *after, half[0]]), pair)
    assert aligned.teacher_ids.tolist() == [
        *TEACHER.encode("The parser"),
        *TEACHER.encode(JAPANESE + " help"),
    ]
    covered = np.concatenate([np.arange(a, b) for a, b in aligned.chunks[:, :2]]).tolist()
    assert covered == [*range(len(before)), *range(len(before) + 2, len(before) + 2 + len(after))]
    assert all(ours == theirs for ours, theirs in pieces(pair, aligned))
    assert align_ids(np.array(half), pair).chunks.shape == (0, 4)
    assert align_ids(np.zeros(0, np.int64), pair).chunks.shape == (0, 4)


def test_the_teachers_side_of_a_row_that_it_refuses_is_empty():
    rows = [(3, {"text": "fox"}), (4, {"messages": MESSAGES}), (5, {"text": "dog"})]
    chunk = RowAligner(pair_of(CHAT[0], TEACHER))(FileBatch("a.jsonl", rows))
    assert len(chunk.student_lengths) == 3 and chunk.student_lengths.sum() == len(chunk.student_ids) == len(
        chunk.student_marks
    )
    assert chunk.teacher_lengths.sum() == len(chunk.teacher_ids) == len(chunk.teacher_marks)
    assert chunk.refused.tolist() == [1] and chunk.teacher_lengths[1] == 0 < chunk.student_lengths[1]
    assert [str(error).splitlines()[0] for error in chunk.errors] == [
        "a.jsonl:4: the tokenizer has no chat template"
    ]


def test_rows_that_the_student_refuses_are_in_neither_corpus():
    rows = [(3, {"text": "fox"}), (4, {"messages": MESSAGES}), (5, b"{")]
    chunk = RowAligner(pair_of(TEACHER, CHAT[0]))(FileBatch("a.jsonl", rows))
    assert (
        len(chunk.student_lengths) == len(chunk.teacher_lengths) == 1
        and not chunk.refused.size
        and not chunk.errors
    )


def test_a_row_without_a_number_that_the_loss_reads_is_in_neither_corpus():
    rows = [(1, {"text": "fox", "weight": 2}), (2, {"text": "dog"}), (3, {"text": "dog", "weight": 1})]
    align = RowAligner(pair_of(TEACHER, CHAT[0]), WantedRecords(numbers=("weight",)))
    chunk = align(FileBatch("a.jsonl", rows))
    assert len(chunk.student_lengths) == len(chunk.teacher_lengths) == 2 and not chunk.errors


def test_a_row_whose_marks_the_student_refuses_is_in_neither_corpus():
    """Its template marks only the last turn, so a flag of loss on the first one cannot be obeyed."""
    student = HuggingFaceTokenizer(train_hf_tokenizer(MARKS_LAST))
    flagged = [MESSAGES[0], {**MESSAGES[1], "loss": True}, MESSAGES[2], {**MESSAGES[3], "loss": False}]
    rows = [(1, {"messages": MESSAGES}), (2, {"messages": flagged}), (3, {"messages": MESSAGES[2:]})]
    batch, pair = FileBatch("a.jsonl", rows), pair_of(student, CHAT[1])
    encoded, refused_rows = each_row(batch, lambda row: encode_record(parse_row(row), student, True))
    chunk = RowAligner(pair)(batch)
    assert [line for line, _ in encoded] == [1, 3] and len(refused_rows) == 1
    assert chunk.student_lengths.tolist() == [len(one.ids) for _, one in encoded]
    assert not chunk.refused.size and not chunk.errors


def test_documents_of_a_corpus(make_store):
    documents = [STUDENT.encode(text) for text in texts(70)]
    store = make_store(documents)
    ranges = list(DocumentRanges(70))
    assert [i for part in ranges for i in part] == list(range(70)) and len(ranges) > 1
    chunks = [StoreAligner(store, pair_of())(part) for part in ranges]
    assert np.concatenate([chunk.student_ids for chunk in chunks]).tolist() == sum(documents, [])
    assert np.concatenate([chunk.teacher_ids for chunk in chunks]).tolist() == sum(
        map(TEACHER.encode, texts(70)), []
    )
