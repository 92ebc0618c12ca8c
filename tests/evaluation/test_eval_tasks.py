"""Check held-out tasks: files, prompts, token ids, packs and metrics."""

from __future__ import annotations

import gzip
import json
import logging
import math

import numpy as np
import pytest
import torch

from mkd.errors import ErrorList
from mkd.evaluation.records import read_completions, read_questions, task_name
from mkd.evaluation.requests import Request, RequestPacks, collate_requests, encode_pairs
from mkd.evaluation.tasks import Completions, Pair, read_multiple_choice, read_tasks
from mkd.parallel.zigzag import RowShard
from tests.reported import refused, reports

QUESTION = {"question": "Which?", "choices": ["this", "that"], "answer": 1}


def question(text, answer=0, subject=None, choices=("yes", "no")):
    return {"question": text, "choices": list(choices), "answer": answer} | (
        {"subject": subject} if subject else {}
    )


def test_answers_are_indices_or_letters(write_jsonl):
    path = write_jsonl("q.jsonl", QUESTION, b"", QUESTION | {"answer": "A", "subject": "x", "id": 3})
    first, second = read_questions(path)
    assert (first.question, first.choices, first.answer, first.subject, first.line) == (
        "Which?",
        ("this", "that"),
        1,
        None,
        1,
    )
    assert (second.answer, second.subject, second.line) == (0, "x", 3)


def test_completions_of_three_forms_and_gzip(tmp_path, caplog):
    caplog.set_level(logging.INFO, "mkd")
    records = (
        {"prompt": "", "completion": "b"},
        {"prompt": "def f():\n", "canonical_solution": "  return 1\n", "test": "..."},
        {"text": "Write f.", "code": "def f(): pass"},
    )
    path = tmp_path / "many.v2.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    found = [(r.prompt, r.completion, r.line) for r in read_completions(path)]
    assert found == [("", "b", 1), ("def f():\n", "  return 1\n", 2), ("Write f.\n", "def f(): pass", 3)]
    assert task_name(path) == "many.v2" and caplog.messages == [f"{path}: ignored keys: test (1)"]


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (b'{"question": ', "record-not-json: not valid JSON"),
        (b"[1]", "record-not-json: not a JSON object"),
        (b'"\xff"', "record-not-json: not valid JSON"),
        (QUESTION | {"question": " "}, "record-field-not-text: question is missing, empty or not"),
        (QUESTION | {"choices": ["one"]}, "record-value-not-valid: choices is not a list of 2 to"),
        (QUESTION | {"choices": ["one", 2]}, "record-value-not-valid: choices is not a list of 2 to"),
        *(
            (QUESTION | {"answer": answer}, "record-value-not-valid: answer is")
            for answer in (2, "C", True, "", None)
        ),
        (QUESTION | {"subject": 5}, "record-field-not-text: subject is empty or not a text"),
        (QUESTION | {"question": "\ud800"}, "record-field-not-text: question is missing, empty or not"),
    ],
)
def test_a_bad_question_is_named_with_its_line(record, code, write_jsonl):
    path = write_jsonl("q.jsonl", QUESTION, record)
    with refused(code) as caught:
        read_questions(path)
    assert caught.value.what.startswith(f"{path}, line 2: ")


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"prompt": "a"}, "record-without-known-keys: no known keys (found"),
        ({"prompt": 1, "completion": "b"}, "record-field-not-text: is not a text"),
        ({"prompt": "a", "completion": ""}, "record-field-not-text: is empty or not a text"),
        ({"text": "a", "code": None}, "record-field-not-text: is empty or not a text"),
    ],
)
def test_a_bad_completion_is_named_with_its_line(record, code, write_jsonl):
    path = write_jsonl("c.jsonl", record)
    with refused(code) as caught:
        read_completions(path)
    assert caught.value.what.startswith(f"{path}, line 1: ")


def test_every_bad_file_is_named_at_once(write_jsonl, tmp_path):
    good, empty, broken = (
        write_jsonl("q.jsonl", QUESTION),
        write_jsonl("empty.jsonl", b""),
        tmp_path / "broken.jsonl.gz",
    )
    broken.write_bytes(gzip.compress(b'{"prompt": "a", "completion": "b"}\n' * 50)[:-20])
    with pytest.raises(ErrorList) as caught:
        read_tasks([good, empty, str(tmp_path / "none.jsonl"), str(tmp_path / "q.csv")], [good, broken])
    unreadable = "data-file-unreadable: cannot be read"
    codes = [
        "data-file-empty: has no records",
        unreadable,
        "data-file-kind-unknown: is not a known kind of file",
        "names-equal: two files of held-out tasks are",
        unreadable,
    ]
    assert reports(caught.value) == codes and caught.value.on_all_ranks


def test_prompts_of_both_styles(write_jsonl):
    subject = "high_school_math"
    records = question(" 2+2? ", 1, subject, ("3", " 4")), question("1+1?", "B", subject, ("1", "2"))
    path = write_jsonl("q.jsonl", *records)
    pairs = read_multiple_choice(path, num_fewshot=1).pairs()
    assert [pair.prompt for pair in pairs[:2]] == [
        "The following are multiple choice questions (with answers) about high school math.\n\n"
        "2+2?\nA. 3\nB. 4\nAnswer: B\n\n1+1?\nA. 1\nB. 2\nAnswer:"
    ] * 2
    assert [pair.prompt for pair in pairs[2:]] == [
        "The following are questions (with answers) about high school math.\n\n"
        "Question: 2+2?\nAnswer: 4\n\nQuestion: 1+1?\nAnswer:"
    ] * 2
    assert [pair.continuation for pair in pairs] == [" A", " B", " 1", " 2"]
    assert pairs[0].place == f"{path}, line 2"


def test_examples_are_of_the_subject_and_not_asked(write_jsonl):
    records = [question(f"{subject}{i}", subject=subject) for i in range(3) for subject in ("x", "y")]
    path = write_jsonl("q.jsonl", *records, question("none0"), question("none1"), question("none2"))
    task = read_multiple_choice(path, num_fewshot=2)
    examples = [[example.question for example in examples] for examples in task.examples]
    asked = dict(zip([one.question for one in task.questions], examples, strict=True))
    assert asked == {"x2": ["x0", "x1"], "y2": ["y0", "y1"], "none2": ["none0", "none1"]}
    assert len(read_multiple_choice(path, num_fewshot=0).questions) == 9


def test_examples_of_a_dev_file(write_jsonl):
    path = write_jsonl("q.jsonl", question("asked", subject="x"))
    write_jsonl(
        "q_dev.jsonl",
        question("other", subject="y"),
        question("first", subject="x"),
        question("second", subject="x"),
    )
    task = read_multiple_choice(path, num_fewshot=1)
    assert [[example.question for example in examples] for examples in task.examples] == [["first"]]
    with refused("too-little-data: answered examples") as caught:
        read_multiple_choice(path, num_fewshot=3)
    assert caught.value.what.startswith(f"{path}, line 1: ")


def test_a_file_of_examples_alone_is_refused(write_jsonl):
    with refused("too-little-data: has no question left"):
        read_multiple_choice(write_jsonl("q.jsonl", QUESTION, QUESTION), num_fewshot=2)


def test_accuracy_and_its_normalised_form(write_jsonl):
    """Compare with values by hand. By letters, one of two is right.

    By bytes, "ab" (-4/2) beats "c" (-3/1), and "\u00e9", which has two bytes, (-4/2) beats "d" (-3/1).
    """
    path = write_jsonl(
        "q.jsonl", question("1", 0, choices=("ab", "c")), question("2", 1, choices=("c", "\u00e9", "d"))
    )
    scores = np.array([-1.0, -2.0, -1.0, -2.0, -3.0, -4.0, -3.0, -3.0, -4.0, -3.5])
    metrics = read_multiple_choice(path).metrics(scores, np.ones(10))
    assert metrics == {"accuracy": 0.5, "accuracy_norm": 1.0, "num_questions": 2}
    letters = read_multiple_choice(path, styles=("letter",))
    assert letters.metrics(scores[:5], np.ones(5)) == {"accuracy": 0.5, "num_questions": 2}


def test_completion_metrics_are_ratios_of_sums(write_jsonl):
    path = write_jsonl(
        "c.jsonl", {"prompt": "a", "completion": "bcd"}, {"prompt": "", "completion": "\u00e9"}
    )
    metrics = Completions("c", path, tuple(read_completions(path))).metrics(
        np.array([-2.0, -1.0]), np.array([2, 4])
    )
    assert metrics == {
        "ce": 0.5,
        "perplexity": math.exp(0.5),
        "bits_per_byte": pytest.approx(3 / math.log(2) / 5),
        "num_completions": 2,
        "num_tokens": 6,
        "num_bytes": 5,
    }


class Letters:
    """One id per letter, "th" merged; `before` and `after` are put around every text."""

    pad_id = eos_id = 99

    def __init__(self, before=(), after=()):
        self.before, self.after = list(before), list(after)

    def encode(self, text):
        merged = text.replace("th", "\x01")
        return self.before + [ord(c) - 96 if c != "\x01" else 30 for c in merged] + self.after


def ids(request):
    return request.inputs.tolist(), request.labels.tolist()


def encode(prompt, continuation, tokenizer=None, seq_length=8, vocab_size=100):
    (request,) = encode_pairs(
        [Pair(prompt, continuation, "f.jsonl, line 7")], tokenizer or Letters(), seq_length, vocab_size
    )
    return request


def test_continuation_starts_where_ids_differ():
    assert ids(encode("ab", "cd")) == ([1, 2, 3], [3, 4])
    assert ids(encode("at", "he")) == ([1, 30], [30, 5]), "t and h are one token: it is the continuation's"
    assert ids(encode("", "ab")) == ([99, 1], [1, 2]), "end of text stands before a document"
    assert ids(encode("t", "ha")) == ([99, 30], [30, 1])
    assert ids(encode("ab", "c", Letters(before=[50]))) == ([50, 1, 2], [3])
    assert ids(encode("", "c", Letters(before=[50]))) == ([50], [3])
    assert ids(encode("", "c", Letters(before=[99]))) == ([99], [3])
    assert ids(encode("ab", "c", Letters(after=[99]))) == ([1, 2], [3]), "EOS behind a text is no part of it"


def test_long_prompts_lose_their_beginning():
    kept = encode("abcdefgh", "ij", seq_length=4)
    assert (ids(kept), kept.is_truncated) == (([6, 7, 8, 9], [9, 10]), True)
    exact = encode("abc", "ij", seq_length=4)
    assert (ids(exact), exact.is_truncated) == (([1, 2, 3, 9], [9, 10]), False)
    assert ids(encode("abcdefgh", "ij", Letters(before=[50]), seq_length=4)) == ([50, 7, 8, 9], [9, 10])
    assert ids(encode("abcdefgh", "ijkl", Letters(before=[50]), seq_length=4)) == (
        [50, 9, 10, 11],
        [9, 10, 11, 12],
    )


def test_what_cannot_be_scored_is_named():
    with refused("longer-than-seq-length: the continuation has") as caught:
        encode("ab", "cdefg", seq_length=4)
    assert caught.value.what.startswith("f.jsonl, line 7: ")
    with refused("token-beyond-vocabulary: token id"):
        encode("ab", "z", vocab_size=26)
    with refused("continuation-not-scorable: the continuation cannot be scored"):
        encode("ab", "")
    no_eos = Letters()
    no_eos.eos_id = None
    with refused("continuation-not-scorable: the continuation cannot be scored"):
        encode("", "ab", no_eos)


def random_requests(count=40, seq_length=32):
    """Return requests of all lengths; every third repeats the inputs before it, with another last label."""
    random, requests = np.random.default_rng(0), []
    for number in range(count):
        inputs = random.integers(1, 90, size=random.integers(1, seq_length + 1)).astype(np.int32)
        length = random.integers(1, len(inputs) + 1)
        last = random.integers(1, 90, size=1).astype(np.int32)
        if number % 3 == 2:
            inputs, length = requests[-1].inputs, len(requests[-1].labels)
        requests.append(Request(inputs, np.concatenate([inputs[len(inputs) - length + 1 :], last]), False))
    return requests


@pytest.mark.parametrize("multiple", [1, 4])
def test_every_label_of_every_request_is_in_one_pack(multiple):
    requests = random_requests()
    packs = RequestPacks(requests, 32, multiple, pad_id=0)
    seen = {number: [] for number in range(len(requests))}
    documents = 0
    for index in range(len(packs)):
        scored = packs[index]
        assert (scored.pack.spans % multiple == 0).all() and scored.pack.spans.sum() == 32
        assert (scored.pack.lengths <= scored.pack.spans).all()
        documents += len(scored.pack.lengths)
        starts = np.cumsum(scored.pack.spans) - scored.pack.spans
        for row, label, number in zip(scored.rows, scored.labels, scored.requests, strict=True):
            document = np.searchsorted(starts, row, side="right") - 1
            place = row - starts[document]
            request = requests[number]
            assert (
                scored.pack.tokens[starts[document] : row + 1].tolist()
                == request.inputs[: place + 1].tolist()
            )
            seen[number].append((len(request.inputs) - 1 - place, label))
    for number, request in enumerate(requests):
        assert [label for _, label in sorted(seen[number], reverse=True)] == request.labels.tolist()
        assert sorted(place for place, _ in seen[number]) == list(range(len(request.labels)))
    assert documents == len({request.inputs.tobytes() for request in requests}) < len(requests)


def test_context_parallel_shards_share_the_rows_out():
    packs = RequestPacks(random_requests(), 32, 4, pad_id=0)
    batch = collate_requests([packs[0], packs[1], packs[len(packs)]])
    assert batch.tokens.shape == (1, 96) and batch.num_loss_tokens == 0
    whole = {(int(batch.tokens[0, row]), int(label), int(number)) for row, label, number in scored(batch)}
    parts = [batch.shard(RowShard(rank, 2)) for rank in range(2)]
    found = [
        (int(part.tokens[0, row]), int(label), int(number))
        for part in parts
        for row, label, number in scored(part)
    ]
    assert len(found) == len(batch.score_rows) and set(found) == whole
    assert all(part.to("cpu").score_rows.dtype == torch.int64 for part in parts)


def scored(batch):
    return zip(batch.score_rows, batch.score_labels, batch.score_requests, strict=True)
