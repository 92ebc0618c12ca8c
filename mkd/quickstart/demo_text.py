"""Training text and prompts of the demonstrations, made of the sources of Python's standard library."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

HELD_OUT_EVERY = 10
CONTEXT_LINES = 4  # before the head of a function
PROMPTS_OF_FILE = 4


def write_text(folder: Path, max_characters: int = 6000) -> tuple[Path, Path]:
    """Write training and held-out JSONL, and return their paths."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    paths = folder / "train.jsonl", folder / "valid.jsonl"
    with open(paths[0], "w", encoding="utf-8") as train, open(paths[1], "w", encoding="utf-8") as valid:
        for index, source in enumerate(sources):
            text = source.read_text(encoding="utf-8", errors="replace")[:max_characters]
            out = valid if index % HELD_OUT_EVERY == 0 else train
            out.write(json.dumps({"text": text}) + "\n")
    return paths


def write_prompts(text: Path, out: Path) -> list[str]:
    """Write the beginnings of functions in the documents of `text` as prompts, and return them."""
    lines = text.read_text(encoding="utf-8").splitlines()
    prompts = [prompt for line in lines for prompt in _heads(json.loads(line)["text"])]
    with open(out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    return prompts


def function_heads(documents: Iterable[str]) -> Iterator[str]:
    """Yield the heads of functions in the sources, each with the lines before it and its line end."""
    for source in documents:
        yield from _heads(source)


def _heads(source: str) -> Iterator[str]:
    """Yield up to PROMPTS_OF_FILE heads of functions, each with the lines before it."""
    lines, found = source.splitlines(keepends=True), 0
    for number, line in enumerate(lines):
        if line.lstrip().startswith("def ") and line.rstrip().endswith(":") and found < PROMPTS_OF_FILE:
            found += 1
            yield "".join(lines[max(0, number - CONTEXT_LINES) : number + 1])
