"""A student's and a teacher's tokenizer, texts in which they differ, and corpora that both read."""

from __future__ import annotations

from functools import cache

from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.teacher_input import SharedTokens
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken.vocabulary.relation import VocabularyRelation, build_relation
from tests.data.datasets import open_datasets
from tests.tokenizers.trained import train_hf_tokenizer
from tests.xtoken.small_tokenizers import JAPANESE, SOURCE, byte_level

STUDENT = byte_level(900)
TEACHER = byte_level(500, reverse=True)
COARSE = byte_level(1200, reverse=True)  # longer tokens than the student's: M-1 chunks
LINES = [line for line in SOURCE.splitlines() if line.strip()]


@cache
def relation(teacher: Tokenizer) -> VocabularyRelation:
    return build_relation(STUDENT, teacher)


def chat_tokenizer(vocab_size: int) -> Tokenizer:
    return HuggingFaceTokenizer(train_hf_tokenizer(vocab_size=vocab_size))


def texts(count: int = 40) -> list[str]:
    """Return texts of about 10 to 200 tokens, with characters of several bytes."""
    return ["\n".join([JAPANESE, *LINES[5 * i : 5 * i + 1 + 3 * (i % 5)]]) for i in range(count)]


def teacher_text(teacher: Tokenizer = TEACHER, **options) -> TeacherText:
    return TeacherText(**{"tokenizer": teacher, "vocab_size": teacher.vocab_size, **options})


def open_pair(path: str, cache_dir, *teachers: TeacherText | SharedTokens, **options):
    """Return the (training, validation) data sets of the file or corpus at `path`."""
    options = {"tokenizer": STUDENT, "seq_length": 64, "vocab_size": STUDENT.vocab_size, **options}
    return open_datasets(data_path=[path], cache_dir=str(cache_dir), teachers=teachers, **options)
