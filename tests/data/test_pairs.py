"""Preference pairs: two documents that share a pack, loss on the answers alone, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mkd.data.batch import PAIR_NUMBER, collate
from mkd.data.corpus.documents import encode_documents
from mkd.data.packing.best_fit import pack_pieces
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import read_rows
from mkd.data.records.wanted import WantedRecords
from mkd.parallel.zigzag import RowShard
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.data.datasets import open_datasets
from tests.reported import refused
from tests.tokenizers.test_chat import DROPS_REASONING
from tests.tokenizers.trained import CHATML, train_hf_tokenizer

ASK = [{"role": "user", "content": "Which fox?"}]
EARLIER = [*ASK, {"role": "assistant", "content": "Any."}, {"role": "user", "content": "Which?"}]


def said(text):
    return [{"role": "assistant", "content": text}]


def encode(record, template=CHATML, append_eod=True):
    hf = train_hf_tokenizer(template)
    return hf, encode_documents(parse_row(record), HuggingFaceTokenizer(hf), append_eod)


def test_texts_and_conversations_become_two_documents_with_loss_on_the_answer():
    hf, found = encode({"prompt": "Which fox?", "chosen": " The quick one.", "rejected": " None."})
    prompt = hf("Which fox?")["input_ids"]
    for document, answer in zip(found, (" The quick one.", " None."), strict=True):
        answer = [*hf(answer)["input_ids"], hf.eos_token_id]
        assert document.ids.tolist() == [*prompt, *answer]
        assert document.loss.tolist() == [0] * len(prompt) + [1] * len(answer)
    hf, found = encode({"prompt": EARLIER, "chosen": said("The quick one."), "rejected": said("None.")})
    for document, answer in zip(found, ("The quick one.", "None."), strict=True):
        whole = hf.apply_chat_template([*EARLIER, *said(answer)])["input_ids"]
        assert document.ids.tolist() == whole
        assert hf.decode(document.ids[document.loss == 1]) == f"{answer}<|im_end|>"


@pytest.mark.parametrize(
    "record, code",
    [
        (dict(prompt="", chosen="a", rejected="b"), "record-empty: the prompt is empty"),
        (dict(prompt=[], chosen=said("a"), rejected=said("b")), "record-empty: the prompt is empty"),
        (
            dict(prompt=ASK, chosen=ASK + said("a"), rejected=said("b")),
            "pair-not-valid: an answer of the pair begins with",
        ),
        (
            dict(prompt="p", chosen="same", rejected="same"),
            "pair-not-valid: chosen and rejected are the same",
        ),
        (
            dict(prompt="p", chosen=said("a"), rejected="b"),
            "record-ambiguous: they are all texts, or all lists",
        ),
        (dict(prompt="p", chosen=3, rejected="b"), "record-field-not-text: it must be a string"),
        (dict(prompt="p", chosen=None, rejected="b"), "record-field-not-text: is null"),
        (
            dict(prompt=ASK, chosen=[{"role": "user", "content": "a"}], rejected=said("b")),
            "record-empty: an answer of the pair is empty",
        ),
        (dict(prompt="p", chosen="a", rejected="b", completion="c"), "record-ambiguous: the record is"),
        (dict(prompt="p", chosen="a"), "record-incomplete: the record has"),
        (
            dict(prompt="p", completion="c", images=["a.png"]),
            "record-images-not-valid: the record has images beside",
        ),
        (
            dict(prompt=[{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
            | dict(chosen=said("a"), rejected=said("b")),
            "images-not-read: the pair has images",
        ),
    ],
)
def test_bad_pairs_are_refused(record, code):
    with refused(code):
        encode(record)


def test_an_empty_answer_has_only_its_end():
    hf, (chosen, rejected) = encode({"prompt": "p", "chosen": "", "rejected": "b"})
    assert chosen.ids[chosen.loss == 1].tolist() == [hf.eos_token_id]
    with refused("record-empty: an answer of the pair is empty"):
        encode({"prompt": "p", "chosen": "", "rejected": "b"}, append_eod=False)


def test_a_template_may_rewrite_earlier_turns():
    template = DROPS_REASONING.replace("{{ answer }}", "{{ loop.length }}{{ answer }}")
    pair = {"prompt": EARLIER, "chosen": said("a"), "rejected": said("b")}
    hf, found = encode(pair, template)
    for document, answer in zip(found, "ab", strict=True):
        whole = hf.apply_chat_template([*EARLIER, *said(answer)])["input_ids"]
        assert document.ids.tolist() == whole
        trained = hf.decode(document.ids[document.loss == 1])
        assert trained.count(answer) == 1 and "Any" not in trained


def test_pairs_of_a_table_are_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["p"], "chosen": ["a"], "rejected": ["b"]}), tmp_path / "t.parquet")
    ((_, row),) = read_rows(tmp_path / "t.parquet")
    assert (parse_row(row).kind, parse_row(row).values) == ("pair", ("p", "a", "b"))


def test_pieces_that_belong_together_share_a_pack():
    lengths = np.random.default_rng(0).integers(1, 30, size=200)
    packs = pack_pieces(lengths, 64, "bfd", together=2)
    assert sorted(packs.piece_ids.tolist()) == list(range(200))
    for number in range(len(packs)):
        pieces = packs.pieces_of(number)
        assert lengths[pieces].sum() <= 64
        assert (pieces[::2] % 2 == 0).all() and (pieces[1::2] == pieces[::2] + 1).all()
    assert packs.offsets.tolist()[-1] == 200


def open_pairs(path, tokenizer, folder, **more):
    settings = dict(seq_length=48, vocab_size=tokenizer.vocab_size, cache_dir=str(folder)) | more
    return open_datasets(data_path=[path], tokenizer=tokenizer, **settings)


def test_packs_hold_whole_pairs_and_number_them(tmp_path, tokenizer, write_jsonl):
    words = [
        "The",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "the",
        "lazy",
        "dog.",
        "A",
        "model",
        "predicts",
        "the",
        "next",
        "token.",
    ]
    records = [
        {
            "prompt": f"{i}:",
            "chosen": " ".join(words[: i % 7 + 1]),
            "rejected": " ".join(words[-(i % 5) - 1 :]),
        }
        for i in range(21)
    ]
    path = write_jsonl("pairs.jsonl", *records)
    train, held_out = open_pairs(path, tokenizer, tmp_path / "c", split="80,20", document_multiple=4)
    assert (train.num_documents, held_out.num_documents) == (34, 8)
    seen = []
    for dataset in (train, held_out):
        batch = collate([*(dataset[i] for i in range(len(dataset))), dataset.empty_pack()])
        pair, starts = batch.row_values[PAIR_NUMBER][0], batch.cu_seqlens_padded.tolist()
        assert batch.num_pairs == dataset.num_documents // 2
        numbers = [pair[start].item() for start in starts[:-2]]
        assert numbers == [sign * (i + 1) for i in range(batch.num_pairs) for sign in (1, -1)]
        for i, start in enumerate(starts[:-2]):
            length = batch.cu_seqlens.diff()[i].item()
            assert (pair[start : start + length] == numbers[i]).all()
            seen.append(tokenizer.decode(batch.tokens[0, start : start + length].tolist()))
        shards = [batch.shard(RowShard(rank, 2)) for rank in range(2)]
        together = np.concatenate([one.row_values[PAIR_NUMBER][0, one.loss_rows] for one in shards])
        assert sorted(together) == sorted(pair[batch.loss_rows].tolist())
    expected = [record["prompt"] + record[key] for record in records for key in ("chosen", "rejected")]
    assert sorted(seen) == sorted(f"{text}<|endoftext|>" for text in expected)


def test_pairs_that_do_not_fit_a_pack_are_refused_or_dropped(tmp_path, tokenizer, write_jsonl):
    long = {"prompt": "p", "chosen": "the dog " * 12, "rejected": "a fox " * 12}
    path = write_jsonl("pairs.jsonl", {"prompt": "p", "chosen": "a", "rejected": "b"}, long)
    with refused("longer-than-seq-length: the pair does not fit --seq-length") as caught:
        open_pairs(path, tokenizer, tmp_path / "c")
    assert caught.value.what.startswith(f"{path}:2: ") and "1 of 2" in caught.value.what
    listed = tmp_path / "quarantine.jsonl"
    dataset, _ = open_pairs(path, tokenizer, tmp_path / "c", overlong="drop", quarantine=str(listed))
    assert len(dataset) == 1 and dataset[0].num_pairs == 1
    (entry,) = map(json.loads, listed.read_text().splitlines())
    assert (entry["file"], entry["line"]) == (path, 2) and entry["reason"].startswith("the pair has ")


def test_pairs_and_other_records_are_told_apart(tmp_path, tokenizer, write_jsonl):
    pair, text = {"prompt": "p", "chosen": "a", "rejected": "b"}, {"text": "a fox"}
    for records, wanted, code in (
        ((pair, text), True, "pairs-and-others: has preference pairs and other"),
        ((pair,), False, "pairs-and-others: a cross entropy with rejected answers"),
        ((text,), True, "pairs-and-others: has no preference pairs"),
    ):
        path = write_jsonl(f"{len(records)} {wanted}.jsonl", *records)
        with refused(code):
            open_pairs(path, tokenizer, tmp_path / "c", records=WantedRecords(pairs=wanted))
