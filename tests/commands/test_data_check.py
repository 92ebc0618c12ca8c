"""`mkd data check` reads everything, `mkd init` the first records; `mkd distill` checks before it cuts."""

from __future__ import annotations

import gzip
import json

import pytest

from mkd.commands import data, distill, init
from mkd.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE
from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.tokenizers.trained import train_hf_tokenizer

GOOD = json.dumps({"text": "The fox."}).encode() + b"\n"
CHAT = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    train_hf_tokenizer().save_pretrained(folder)
    return str(folder)


def test_every_record_of_every_file_is_read(model, tmp_path, capsys):
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(GOOD * 300 + b"{broken\n" + GOOD)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(CHAT.encode() + b"\n"))
    words = ["check", "--data-path", str(folder), "--student-hf", model]
    assert data.main(words) == EXIT_DATA
    assert reported_codes(capsys.readouterr().err) == [f"record-not-json: {folder}/a.jsonl:301: not valid"]
    assert data.main([*words, "--max-bad-records", "1"]) == EXIT_DONE
    assert capsys.readouterr().out == f"{folder}: 2 files, 1 messages, 301 text; 1 bad record skipped\n"
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(40_000)))
    (folder / "b.jsonl.gz").write_bytes(whole[:-20])
    assert data.main([*words, "--max-bad-records", "1"]) == EXIT_DATA
    assert reported_codes(capsys.readouterr().err) == ["data-file-unreadable: b.jsonl.gz"]
    assert data.main(["check", "--data-path", str(folder)]) != EXIT_DONE
    assert reported_codes(capsys.readouterr().err) == ["add-flag: no model is named"]


def test_bad_text_ends_a_distillation_before_the_student_is_cut(tmp_path, capfd):
    add_tokenizer(make_model(tmp_path / "teacher", "llama", seed=1, num_hidden_layers=3))
    text, out = tmp_path / "text.jsonl", tmp_path / "out"
    words = [str(tmp_path / "teacher"), "layers:2", str(text), "--gpus", "0", "--out", str(out)]
    text.write_bytes(b'{"texts": "x"}\n')
    assert init.main(words) == EXIT_DATA and not (out / "run.yaml").exists()
    assert reported_codes(capfd.readouterr().err) == [f"record-without-known-keys: data {text}:1: "]
    text.write_bytes(GOOD * 200 + b"{broken\n" + GOOD * 200)
    assert distill.main(words) == EXIT_DATA
    said = capfd.readouterr()
    assert "[1/" in said.out and "the stage data ended with 65" in said.out
    assert reported_codes(said.err) == [f"record-not-json: {text}:201: not valid JSON"]
    assert not list((out / "student").glob("*.safetensors"))


def test_mkd_data_alone_names_its_parts(capsys):
    assert data.main([]) == EXIT_USAGE
    assert "required: preview, check or convert-records" in capsys.readouterr().err
