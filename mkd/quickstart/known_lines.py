"""Beginnings of code whose line has one obvious end, completed by models with three seeds each.

A completion stops at the end of its line. It is right if it is the expected text, so that what models write
can be checked without running it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_SEEDS = 3
TEMPERATURE = 0.5
NEW_TOKENS = 8
SHOWN = (0, 8, 3)  # prompts that are printed in full

PROMPTS = (  # beginning -> expected end of its last line
    (
        "class Box:\n    def __init__(self, width, height, depth):\n        self.width = width\n"
        "        self.height = height\n        self.depth =",
        " depth",
    ),
    (
        'def show(table):\n    """Print all keys and values."""\n    for key, value in table.items():\n'
        "        print(key,",
        " value)",
    ),
    (
        'def greeting(name=None):\n    """Return the name, or a default."""\n    if name is None:\n'
        '        name = "nobody"\n    return',
        " name",
    ),
    (
        'def read_text(path):\n    """Return the text of a file."""\n    with open(path) as file:\n'
        "        return",
        " file.read()",
    ),
    (
        'def total(numbers):\n    """Return the sum of all numbers."""\n    result = 0\n'
        "    for number in numbers:\n        result +=",
        " number",
    ),
    ('def swap(first, second):\n    """Return both in the other order."""\n    return second,', " first"),
    ("try:\n    import json\nexcept ImportError:\n    json =", " None"),
    ('def is_empty(items):\n    """Return True if there are no items."""\n    return len(items) ==', " 0"),
    (
        "class Counter:\n    def __init__(self):\n        self.count = 0\n\n    def increase(self):\n"
        "        self.count +=",
        " 1",
    ),
    ('def area(width, height):\n    """Return width times height."""\n    return width *', " height"),
    (
        'def find(items, wanted):\n    """Return the index of wanted, or None."""\n'
        "    for index, item in enumerate(items):\n        if item == wanted:\n            return",
        " index",
    ),
    (
        'def double_all(numbers):\n    """Return a list of all numbers times two."""\n'
        "    return [2 * number for number in",
        " numbers]",
    ),
)


@dataclass(frozen=True)
class KnownLines:
    """Ends of lines by one model: one for each prompt and seed."""

    ends: tuple[tuple[str, ...], ...]  # [prompts][seeds]
    probability: float  # of an expected end, geometric mean over the prompts

    @property
    def num_right(self) -> int:
        """Number of ends that are right."""
        pairs = zip(self.ends, PROMPTS, strict=True)
        return sum(end == expected for ends, (_, expected) in pairs for end in ends)

    @property
    def num_all(self) -> int:
        """Number of all ends."""
        return sum(map(len, self.ends))


def complete(model_dir: Path) -> KnownLines:
    """Let the model of a Hugging Face folder complete every prompt with every seed, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    inputs = tokenizer([prompt for prompt, _ in PROMPTS], return_tensors="pt", padding=True)
    first, by_seed = inputs["input_ids"].shape[1], []
    settings = dict(do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS)
    with torch.no_grad():
        for seed in range(NUM_SEEDS):
            torch.manual_seed(seed)
            rows = model.generate(**inputs, **settings, pad_token_id=tokenizer.pad_token_id)
            by_seed.append(
                [line_end(tokenizer.decode(row[first:], skip_special_tokens=True)) for row in rows]
            )
    return KnownLines(tuple(zip(*by_seed, strict=True)), expected_probability(model, tokenizer))


def expected_probability(model: Any, tokenizer: Any) -> float:
    """Return the geometric mean over prompts of the probability that a model gives the expected end."""
    import torch

    logs = []
    for prompt, expected in PROMPTS:
        ids = tokenizer(prompt + expected, return_tensors="pt")["input_ids"]
        first = len(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            predicted = model(ids).logits[0, first - 1 : -1].log_softmax(-1)
        logs.append(predicted.gather(1, ids[0, first:, None]).sum().item())
    return math.exp(sum(logs) / len(logs))


def line_end(text: str) -> str:
    """Return what a completion adds to its line."""
    return text.partition("\n")[0].rstrip()


def lines_table(models: Mapping[str, KnownLines]) -> list[str]:
    """Return the number of right ends of each model, and some prompts with every end."""
    name_width = max(map(len, models))
    lines = [
        f"{name:{name_width}}  {one.num_right:2} of {one.num_all} right; probability of the expected end "
        f"{one.probability:.3f}"
        for name, one in models.items()
    ]
    for number in SHOWN:
        prompt, expected = PROMPTS[number]
        lines += ["", *(f"    {line}" for line in prompt.splitlines())]
        lines[-1] += "..."
        for name, one in models.items():
            ends = (f"{'ok' if end == expected else '--'} {end.strip()!r}" for end in one.ends[number])
            lines.append(f"  {name:{name_width}}  {'   '.join(ends)}")
    return lines


def write_samples(models: Mapping[str, KnownLines], path: Path) -> None:
    """Write one JSON line a prompt, for the report: prompt, expected end, and every model's ends."""
    with open(path, "w", encoding="utf-8") as file:
        for number, (prompt, expected) in enumerate(PROMPTS):
            ends = {name: _marked(one.ends[number], expected) for name, one in models.items()}
            file.write(json.dumps({"prompt": prompt, "expected": expected.strip(), **ends}) + "\n")


def _marked(ends: Sequence[str], expected: str) -> str:
    return "\n".join(f"{'right' if end == expected else 'wrong'}: {end.strip()}" for end in ends)
