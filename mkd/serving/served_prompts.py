"""The prompts of a check: texts as token ids, or random ids for a folder without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mkd.errors import UsageError
from mkd.tokenizers.hugging_face import not_loadable
from mkd.tokenizers.tokenizer_files import has_tokenizer

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 2, 4, 8, 16,",
)
QUESTION = "Name three colours of the rainbow."
RANDOM_PROMPTS, RANDOM_TOKENS = 4, 12


@dataclass(frozen=True)
class ServedPrompts:
    """Token ids of each prompt, and the texts that they were made from; no text without a tokenizer."""

    ids: list[list[int]]
    texts: list[str]


def prompts_of(folder: Path, vocab_size: int, file: Path | None = None) -> ServedPrompts:
    """Return the prompts for a model: the lines of `file`, else TEXTS and a question in its chat template.

    Raises UsageError for a file without text, or for texts without a tokenizer.
    """
    if not has_tokenizer(folder):
        if file is not None:
            what, why = f"{folder} has no tokenizer", "the prompts of --prompts are texts"
            raise UsageError(what, why, "leave out --prompts to use random ids", code="remove-flag")
        generator = torch.Generator().manual_seed(0)
        shape = RANDOM_PROMPTS, RANDOM_TOKENS
        return ServedPrompts(torch.randint(vocab_size, shape, generator=generator).tolist(), [])
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise not_loadable(str(folder), error) from error
    texts = [*TEXTS] if file is None else _lines(file)
    ids = [[*tokenizer(text)["input_ids"]] for text in texts]
    if file is None and tokenizer.chat_template:
        messages = [{"role": "user", "content": QUESTION}]
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids.append([*tokenizer(chat, add_special_tokens=False)["input_ids"]])
    return ServedPrompts(ids, texts)


def _lines(file: Path) -> list[str]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        what, do = f"--prompts {file} has no text", "give a file with one prompt a line"
        raise UsageError(what, "there is nothing to compare", do, code="value-not-valid")
    return lines
