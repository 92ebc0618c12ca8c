"""Check that errors of commands besides `mkd train` name only flags that the command has."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import write_records

SEEN = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "Which?"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a model without a tokenizer, one whose tokenizer has more ids than it knows, and bad prompts."""
    folder = tmp_path_factory.mktemp("remedies")
    make_model(folder / "bare", "qwen3")
    add_tokenizer(make_model(folder / "small", "qwen3", vocab_size=20))
    add_tokenizer(make_model(folder / "model", "qwen3"))
    write_records(folder / "prompts.jsonl", {"messages": [{"role": "user", "content": SEEN}]})
    write_records(folder / "text.jsonl", {"prompt": "the quick brown fox"})
    write_records(folder / "broken.jsonl", "{")
    return folder


CASES = {  # command -> its words; files end in .jsonl, models have no other mark
    "generate without a tokenizer": "generate --teacher @bare --prompts @text.jsonl --out @a.jsonl",
    "generate for a picture": "generate --teacher @model --prompts @prompts.jsonl --out @b.jsonl",
    "generate from broken lines": "generate --teacher @model --prompts @broken.jsonl --out @c.jsonl",
    "generate with ids beyond": "generate --teacher @small --prompts @text.jsonl --out @d.jsonl",
    "sample without a tokenizer": "sample @bare --prompts @text.jsonl",
    "sample for a picture": "sample @model --prompts @prompts.jsonl",
    "sample with ids beyond": "sample @small --prompts @text.jsonl",
    "compare without a tokenizer": "compare @model @bare --data @text.jsonl",
    "compare on broken lines": "compare @model @model --data @broken.jsonl",
}


@pytest.mark.parametrize("name", CASES)
def test_a_remedy_names_flags_of_the_command(name, files, capsys):
    command, *words = CASES[name].split()
    main = importlib.import_module(f"mkd.commands.{command}").main
    with pytest.raises(SystemExit):
        main(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    code = main([str(files / word[1:]) if word.startswith("@") else word for word in words])
    said = capsys.readouterr().err
    assert code and "error[" in said, said
    remedies = "\n".join(line for line in said.splitlines() if line.lstrip().startswith("do:"))
    assert remedies and set(re.findall(r"--[a-z][a-z-]*", remedies)) <= known, said
