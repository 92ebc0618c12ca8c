"""Check completions as sampled in a teacher's tokens: stops by role, cut ends, and bytes that are no text."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.data.aligned.aligned_ids import Pair, align_sampled
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.pairs import STUDENT, TEACHER, chat_tokenizer
from tests.tokenizers.trained import CHATML, train_hf_tokenizer
from tests.xtoken.small_tokenizers import JAPANESE

CHAT = chat_tokenizer(350)
TEXT = f"def parse(args):  # {JAPANESE}\n"


def aligned(ids, *, is_stopped, is_chat=False, student=STUDENT, teacher=TEACHER):
    pair = Pair(student, teacher, "byte_offset", True, True)
    return align_sampled(np.array(ids), pair, is_stopped=is_stopped, is_chat=is_chat)


def bytes_of(tokenizer, ids) -> bytes:
    return b"".join(tokenizer.token_bytes[i] or b"" for i in ids)


def test_chunks_spell_the_same_bytes_and_the_stop_is_a_chunk():
    ids = [*STUDENT.encode_continuation(TEXT), STUDENT.roles["eos"]]
    found = aligned(ids, is_stopped=True)
    assert found.student_ids.tolist() == ids
    assert found.teacher_ids.tolist() == [*TEACHER.encode_continuation(TEXT), TEACHER.roles["eos"]]
    for first, last, start, end in found.chunks.tolist():
        assert bytes_of(STUDENT, ids[first:last]) == bytes_of(TEACHER, found.teacher_ids[start:end])
    assert found.chunks[-1].tolist() == [
        len(ids) - 1,
        len(ids),
        *(len(found.teacher_ids) + np.array([-1, 0])),
    ]
    assert np.diff(found.chunks[:, :2]).sum() == len(ids), "every sampled token is in a chunk"


def test_the_last_chunk_of_a_cut_completion_is_left_out():
    """Another continuation may give the teacher other tokens there."""
    ids = STUDENT.encode_continuation(TEXT)
    whole, cut = (aligned([*ids, *stop], is_stopped=bool(stop)) for stop in ([STUDENT.roles["eos"]], []))
    assert cut.chunks.tolist() == whole.chunks[:-2].tolist()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_half_a_character_is_left_out(is_stopped):
    tokens = STUDENT.encode_continuation("def \u732b")  # a character of three bytes, and of as many tokens
    assert bytes_of(STUDENT, tokens[-3:]) == "\u732b".encode()
    ids = tokens[:-1] + is_stopped * [STUDENT.roles["eos"]]
    found = aligned(ids, is_stopped=is_stopped)
    assert bytes_of(TEACHER, found.teacher_ids) == b"def "
    in_chunks = {place for first, last in found.chunks[:, :2].tolist() for place in range(first, last)}
    assert in_chunks.isdisjoint(range(len(tokens) - 3, len(tokens) - 1))
    assert (len(ids) - 1 in in_chunks) == is_stopped


@pytest.mark.parametrize("is_chat, role", [(True, "end_of_turn"), (False, "eos")])
def test_a_stop_becomes_the_teachers_by_role(is_chat, role):
    """A student that ends turns and texts with one token; a teacher with two."""
    assert CHAT.roles["end_of_turn"] != CHAT.roles["eos"]
    template = CHATML.replace("<|im_end|>", "<|endoftext|>")
    one_token = HuggingFaceTokenizer(train_hf_tokenizer(template, vocab_size=340))
    stop = one_token.roles["end_of_turn"]
    assert stop == one_token.roles["eos"]
    found = aligned([5, stop], is_stopped=True, is_chat=is_chat, student=one_token, teacher=CHAT)
    assert found.teacher_ids[-1] == CHAT.roles[role]
    back = aligned([5, CHAT.roles[role]], is_stopped=True, is_chat=is_chat, student=CHAT)
    assert back.teacher_ids[-1] == TEACHER.roles["eos"]
    other = "eos" if is_chat else "end_of_turn"  # the student ended the text in the other way
    both = chat_tokenizer(330)
    found = aligned([5, CHAT.roles[other]], is_stopped=True, is_chat=is_chat, student=CHAT, teacher=both)
    assert found.teacher_ids[-1] == both.roles[other]


def test_rows_of_the_embedding_without_a_token_are_in_no_chunk():
    ids = [*STUDENT.encode_continuation("def"), STUDENT.vocab_size + 3, STUDENT.roles["eos"]]
    found = aligned(ids, is_stopped=True)
    assert STUDENT.token_bytes and len(ids) - 2 not in found.chunks[:, 0]


def test_an_empty_completion_is_its_stop():
    found = aligned([STUDENT.roles["eos"]], is_stopped=True)
    assert found.chunks.tolist() == [[0, 1, 0, 1]]
