"""The dynamic programme equals the exact alignment, and its search equals a search over all paths."""

from __future__ import annotations

import random
import sys
from functools import cache

import numpy as np
import pytest

from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.xtoken import align, align_spans
from mkd.xtoken.published.align_dp import COMBINED, GAP, MATCH, MAX_COMBINATION, align_dp, best_path, compiled
from tests.tokenizers.trained import SENTENCES, train_hf_tokenizer
from tests.xtoken.brute_force import check_chunks

PROSE = (
    "When the committee met again in October, nobody expected the report to be finished. "
    "It was, however, and it ran to "
    "almost four hundred pages. The chair, who had read every one of them, "
    "asked whether anyone else had done the same; the "
    "silence that followed was answer enough. "
    "They agreed to publish a summary first and the full text a month later.\n\n"
)


def numbered(tokens, numbers):
    rows = np.full((MAX_COMBINATION, len(tokens)), -1, dtype=np.int64)
    for k in range(1, MAX_COMBINATION + 1):
        for end in range(k, len(tokens) + 1):
            rows[k - 1, end - 1] = numbers.get("".join(tokens[end - k : end]), -1)
    return rows


def score(blocks, ours, theirs):
    """Return the score of a path by its definition."""
    total = 0.0
    for i0, i1, j0, j1 in blocks:
        same = "".join(ours[i0:i1]) == "".join(theirs[j0:j1])
        if i0 == i1 or j0 == j1:
            assert i1 - i0 + j1 - j0 == 1
            total += GAP
        elif (i1 - i0, j1 - j0) == (1, 1):
            total += MATCH if same else -MATCH
        else:
            assert same and 1 in (i1 - i0, j1 - j0)
            total += COMBINED * max(i1 - i0, j1 - j0)
    return total


def best_score(ours, theirs):
    """Return the best score over all paths, by recursion over the possible last blocks."""

    @cache
    def best(i, j):
        if i == 0 or j == 0:
            return GAP * (i + j)
        options = [best(i - 1, j) + GAP, best(i, j - 1) + GAP]
        options.append(best(i - 1, j - 1) + (MATCH if ours[i - 1] == theirs[j - 1] else -MATCH))
        for k in range(2, MAX_COMBINATION + 1):
            if k <= j and "".join(theirs[j - k : j]) == ours[i - 1]:
                options.append(best(i - 1, j - k) + COMBINED * k)
            if k <= i and "".join(ours[i - k : i]) == theirs[j - 1]:
                options.append(best(i - k, j - 1) + COMBINED * k)
        return max(options)

    return best(len(ours), len(theirs))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kernel", [best_path, compiled()], ids=["plain", "compiled"])
def test_the_path_is_a_best_one(seed, kernel):
    generator = random.Random(seed)
    ours, theirs = (
        ["".join(generator.choices("ab", k=generator.randint(1, 4))) for _ in range(generator.randint(1, 9))]
        for _ in "ab"
    )
    numbers = {text: i for i, text in enumerate({*ours, *theirs})}
    blocks = kernel(numbered(ours, numbers), numbered(theirs, numbers)).tolist()
    assert blocks[0][0] == blocks[0][2] == 0 and (blocks[-1][1], blocks[-1][3]) == (len(ours), len(theirs))
    assert all(
        before[1] == after[0] and before[3] == after[2]
        for before, after in zip(blocks, blocks[1:], strict=False)
    )
    assert score(blocks, ours, theirs) == best_score(ours, theirs)


def test_without_numba_the_same_code_runs_uncompiled(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled.__wrapped__() is best_path


@pytest.fixture(scope="module")
def pair():
    return [HuggingFaceTokenizer(train_hf_tokenizer(vocab_size=size)) for size in (270, 350)]


@pytest.mark.parametrize("compile", [True, False])
def test_both_modes_agree_on_sentences(pair, compile):
    text = " ".join(SENTENCES)
    ours, theirs = (tokenizer.encode_spans(text) for tokenizer in pair)
    assert np.array_equal(align_dp(ours, theirs, text.encode(), compile=compile), align_spans(ours, theirs))
    assert np.array_equal(align(*pair, text, mode="dp").chunks, align(*pair, text).chunks)


def test_texts_without_tokens_on_a_side(pair):
    empty, some = pair[0].encode_spans(""), pair[1].encode_spans("fox")
    for sides in ((empty, some), (some, empty), (empty, empty)):
        assert align_dp(*sides, b"fox").shape == (0, 4)


def test_a_stretch_beyond_the_bound_is_cut_by_its_bytes(pair):
    text = "the quick " * 40  # no trigram is unique: one stretch
    ours, theirs = (tokenizer.encode_spans(text) for tokenizer in pair)
    bounded = align_dp(ours, theirs, text.encode(), max_cells=100)
    assert np.array_equal(bounded, align_spans(ours, theirs)) and len(bounded) > 50


@pytest.mark.download
@pytest.mark.parametrize(
    ("student", "teacher"), [("qwen3", "mistral"), ("smollm2", "gpt2"), ("gpt2", "qwen3")]
)
def test_both_modes_agree_on_prose(real_tokenizers, student, teacher):
    ours, theirs = (real_tokenizers[name].encode_spans(PROSE) for name in (student, teacher))
    exact, found = align_spans(ours, theirs).tolist(), align_dp(ours, theirs, PROSE.encode()).tolist()
    check_chunks(found, ours, theirs)
    single = [chunk for chunk in exact if chunk[1] - chunk[0] == chunk[3] - chunk[2] == 1]
    assert len(single) > 60 and all(chunk in found for chunk in single)
