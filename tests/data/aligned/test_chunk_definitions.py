"""The definitions of docs/chunk-definitions.md, recomputed from its text alone.

They cover bytes, spellings, candidates and pack lengths.
"""

from __future__ import annotations

import numpy as np
import pytest

from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken import align
from mkd.xtoken.chunks import MANY_TO_MANY, MANY_TO_ONE, ONE_TO_MANY, ONE_TO_ONE
from tests.data.pairs import COARSE, STUDENT, TEACHER, open_pair, relation, teacher_text, texts
from tests.xtoken.small_tokenizers import JAPANESE, byte_level

Ids = tuple[int, ...]
BYTES = byte_level(262, reverse=True)


def test_candidates_of_every_chunk(write_jsonl, tmp_path):
    """Three teachers, so that 1-N chunks, M-1 chunks and parts of characters have several candidates."""
    spaced = " ".join(JAPANESE)  # characters that only a vocabulary of bytes cuts
    path = write_jsonl("texts.jsonl", *({"text": text} for text in [*texts(12), spaced]))
    seen = set()
    for name, teacher in (("bytes", BYTES), ("fine", TEACHER), ("coarse", COARSE)):
        settings = {"spellings": relation(teacher).spellings, "twins": relation(teacher).twins()}
        dataset, _ = open_pair(path, tmp_path / name, teacher_text(teacher, **settings))
        student_spellings, teacher_spellings = (
            all_spellings(STUDENT, teacher),
            all_spellings(teacher, STUDENT),
        )
        teacher_bytes = vocabulary_bytes(teacher)
        for pack in (dataset[index] for index in range(len(dataset))):
            side = pack.teacher_inputs[0]
            for kind, ours, theirs, pairs in kept_chunks(side.chunks, pack.labels, side.labels):
                expected = candidates(kind, ours, theirs, student_spellings, teacher_spellings)
                assert pairs == expected and len(pairs) == len(set(pairs))
                seen.add((kind, len(pairs) > 1, is_part_of_character(teacher_bytes, theirs)))
    assert {(ONE_TO_MANY, True), (MANY_TO_ONE, True), (MANY_TO_MANY, False)} <= {one[:2] for one in seen}
    assert any(part and more for _, more, part in seen), (
        "prefixes that end inside a character have candidates"
    )


def candidates(
    kind: int, ours: Ids, theirs: Ids, student_spellings: dict[int, Ids], teacher_spellings: dict[int, Ids]
) -> list[tuple[int, int]]:
    """Return (student token, teacher token) pairs, the realised pair first.

    The others are sorted by their first member, as the library lists them.
    """
    realised = (ours[-1], theirs[-1])
    if kind == ONE_TO_ONE:
        return []
    found = []
    if kind == ONE_TO_MANY:
        found = [(u, way[-1]) for u, way in student_spellings.items() if way[:-1] == theirs[:-1]]
    elif kind == MANY_TO_ONE:
        found = [(way[-1], v) for v, way in teacher_spellings.items() if way[:-1] == ours[:-1]]
    return [realised, *(pair for pair in found if pair[0] != realised[0] and pair[1] != realised[1])]


def kept_chunks(chunks, student_labels: np.ndarray, teacher_labels: np.ndarray):
    """(kind, student tokens, teacher tokens, pairs) of every chunk of a pack."""
    stops = np.cumsum(chunks.support_counts)
    for i in range(len(chunks)):
        sides = (
            (student_labels, chunks.student_rows[i], chunks.student_counts[i]),
            (teacher_labels, chunks.teacher_rows[i], chunks.teacher_counts[i]),
        )
        tokens = [tuple(labels[row : row + count].tolist()) for labels, row, count in sides]
        listed = slice(stops[i] - chunks.support_counts[i], stops[i])
        pairs = zip(
            chunks.support_student[listed].tolist(), chunks.support_teacher[listed].tolist(), strict=True
        )
        yield int(chunks.kinds[i]), *tokens, list(pairs)


def all_spellings(tokenizer: Tokenizer, other: Tokenizer) -> dict[int, Ids]:
    """Return token -> its spelling in `other`, for tokens with bytes that `other` writes as several.

    Of ids with equal bytes only one is included.
    """
    pieces = vocabulary_bytes(tokenizer)
    unique: dict[bytes, int] = {}
    for token, piece in sorted(pieces.items()):
        if piece not in unique or spelling(tokenizer, piece, pieces) == (token,):
            unique[piece] = token
    theirs = vocabulary_bytes(other)
    found = {token: spelling(other, piece, theirs) for piece, token in unique.items()}
    return {token: found[token] for token in sorted(found) if len(found[token]) > 1}


def spelling(tokenizer: Tokenizer, piece: bytes, pieces: dict[int, bytes]) -> Ids:
    """Return the encoding as text if it has exactly these bytes, else the merges of the bytes themselves."""
    backend = tokenizer._hf.backend_tokenizer
    table = {byte: character for character, byte in gpt2_table().items()}
    ways = [[token.id for token in backend.model.tokenize("".join(table[byte] for byte in piece))]]
    if is_text(piece):
        ways.insert(0, backend.encode(piece.decode(), add_special_tokens=False).ids)
    exact = [way for way in ways if all(i in pieces for i in way) and b"".join(map(pieces.get, way)) == piece]
    return tuple(exact[0]) if exact else ()


def vocabulary_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Id -> bytes by GPT-2's table, special tokens left out; nothing is decoded."""
    hf, table = tokenizer._hf, gpt2_table()
    special = set(hf.all_special_ids)
    return {i: bytes(table[c] for c in string) for string, i in hf.get_vocab().items() if i not in special}


def gpt2_table() -> dict[str, int]:
    """Character -> byte; source: encoder.py of openai/gpt-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


def is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_part_of_character(pieces: dict[int, bytes], tokens: Ids) -> bool:
    return not is_text(b"".join(pieces.get(i, b"") for i in tokens[:-1]))


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_a_pack_of_n_teacher_tokens_has_n_predictors(beside, write_jsonl, tmp_path):
    """Chunks within the first N + 1 teacher tokens of a document are kept.

    The last of these tokens is only predicted.
    """
    text = "\n".join(texts(12)[3:9])
    whole = align(STUDENT, TEACHER, text)
    length = int(whole.chunks[8, 3]) - 1 + beside  # at 0 chunk 8 just fits
    inside = (whole.chunks[:, 3] <= length + 1) & (whole.chunks[:, 0] > 0) & (whole.chunks[:, 2] > 0)
    path = write_jsonl("one.jsonl", {"text": text})
    settings = {"seq_length": length, "spellings": relation(TEACHER).spellings}
    dataset, _ = open_pair(path, tmp_path / "cache", teacher_text(TEACHER, **settings), seq_length=2048)
    assert len(dataset) == 1
    chunks = dataset[0].teacher_inputs[0].chunks
    rows = np.stack([chunks.student_rows + 1, chunks.teacher_rows + 1], axis=1)
    assert rows.tolist() == whole.chunks[inside][:, [0, 2]].tolist()
    assert 0 < (chunks.teacher_rows + chunks.teacher_counts).max() <= length
