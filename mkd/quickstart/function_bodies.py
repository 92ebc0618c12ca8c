"""Bodies of held-out functions, written by all models with three seeds each; checked, but never run.

A model gets the head of a function and the lines before it. What it writes stops at the end of the body: at
the next line that is not indented further than the head. A body is right if Python can parse it; one that
is cut off by the number of tokens, if Python could parse it with more of it.
"""

from __future__ import annotations

import ast
import json
import textwrap
from codeop import compile_command
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.busy_machine import share_cores
from mkd.progress_bars import without_progress_bars
from mkd.quickstart.demo_text import function_heads

NUM_SEEDS = 3
NUM_FUNCTIONS = 8
TEMPERATURE = 0.5
NEW_TOKENS = 40
SHOWN = (0, 4)  # functions that are printed with their bodies


@dataclass(frozen=True)
class Body:
    """Text that a model writes behind the head of a function."""

    text: str  # whole lines, up to the end of the body
    parses: bool


@dataclass(frozen=True)
class Bodies:
    """Bodies by one model: one for each function and seed."""

    heads: tuple[str, ...]
    of_heads: tuple[tuple[Body, ...], ...]  # [heads][seeds]
    teacher_nll: float  # of all that was written, by the teacher, nats per token

    @property
    def num_right(self) -> int:
        """Number of bodies that Python can parse."""
        return sum(one.parses for bodies in self.of_heads for one in bodies)

    @property
    def num_all(self) -> int:
        """Number of all bodies."""
        return sum(map(len, self.of_heads))


def held_out_heads(text: Path) -> list[str]:
    """Return heads of functions from all parts of a file of records, without the end of their line."""
    documents = (json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines())
    return [one.rstrip() for one in evenly([*map(str, function_heads(documents))], NUM_FUNCTIONS)]


def evenly(texts: Sequence[str], count: int) -> list[str]:
    """Return at most `count` texts, from all parts of the list."""
    return [texts[place * len(texts) // count] for place in range(count)] if len(texts) > count else [*texts]


def write_bodies(models: Mapping[str, Path], teacher_dir: Path, heads: Sequence[str]) -> dict[str, Bodies]:
    """Let the models of Hugging Face folders write every body with every seed, by plain transformers."""
    share_cores()
    teacher = _load(teacher_dir)
    found = {}
    for name, folder in models.items():
        print(f"{name} ...", flush=True)  # it takes up to a minute
        model, tokenizer = teacher if folder == teacher_dir else _load(folder)
        found[name] = _write(model, tokenizer, teacher[0], heads)
    return found


def body_of(head: str, text: str) -> Body:
    """Return the body in the text behind `head`, which may have lines before it.

    A last line that the text leaves unfinished is not part of it.
    """
    first = head.splitlines()[-1]
    indent = len(first) - len(first.lstrip())
    lines: list[str | None] = []  # None: a line that is not whole
    is_cut = False
    for line in text.splitlines(keepends=True):
        if line.strip() and lines and len(line) - len(line.lstrip()) <= indent:
            break
        lines.append(line.rstrip() if line.endswith("\n") else None)
    else:
        is_cut = True
    whole = [line for line in lines if line is not None]
    body = "\n".join(whole).strip("\n")
    source = textwrap.dedent(first + "\n".join(whole))
    return Body(body, bool(body.strip()) and _parses(source, is_cut))


def _parses(source: str, is_cut: bool) -> bool:
    """Return True if Python can parse the source, or could if more of it came and it `is_cut`."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    else:
        return True
    try:
        return is_cut and compile_command(f"{source}\n", symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False


def bodies_table(models: Mapping[str, Bodies]) -> list[str]:
    """Return the number of right bodies of each model, and some functions with the first body of each."""
    name_width = max(map(len, models))
    lines = [
        f"{name:{name_width}}  {one.num_right:2} of {one.num_all} parse; to the teacher the text costs "
        f"{one.teacher_nll:.2f} nats a token"
        for name, one in models.items()
    ]
    heads = next(iter(models.values())).heads
    for number in (one for one in SHOWN if one < len(heads)):
        head = textwrap.dedent(heads[number].splitlines()[-1])
        lines += ["", f"  {head}"]
        for name, one in models.items():
            marks = " ".join(map(_mark, one.of_heads[number]))
            lines.append(f"  {name} ({marks}):")
            body = textwrap.dedent(one.of_heads[number][0].text)
            lines += [f"      {line}" for line in body.splitlines() if line.strip()]
    return lines


def write_samples(models: Mapping[str, Bodies], path: Path) -> None:
    """Write one JSON line for each function, for the report: the head, and every model's bodies."""
    heads = next(iter(models.values())).heads
    with open(path, "w", encoding="utf-8") as file:
        for number, head in enumerate(heads):
            texts = {
                name: "\n\n".join(
                    f"[{_mark(body)}, seed {seed}]\n{body.text}"
                    for seed, body in enumerate(one.of_heads[number])
                )
                for name, one in models.items()
            }
            file.write(json.dumps({"prompt": head, **texts}, ensure_ascii=False) + "\n")


def _mark(body: Body) -> str:
    return "parses" if body.parses else "broken"


@without_progress_bars()
def _load(model_dir: Path) -> tuple[Any, Any]:
    """Return (model, tokenizer that fills up on the left) of a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval(), tokenizer


def _write(model: Any, tokenizer: Any, teacher: Any, heads: Sequence[str]) -> Bodies:
    """Return the bodies of one model, all functions of a seed in one batch."""
    import torch

    inputs = tokenizer(list(heads), return_tensors="pt", padding=True)
    first, by_seed = inputs["input_ids"].shape[1], []
    settings = dict(do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS)
    nll, count = 0.0, 0
    for seed in range(NUM_SEEDS):
        torch.manual_seed(seed)
        with torch.no_grad():
            rows = model.generate(**inputs, **settings, pad_token_id=tokenizer.pad_token_id)
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(rows[:, first:])], dim=1)
            places = (mask.cumsum(1) - 1).clamp(min=0)
            logits = teacher(rows, attention_mask=mask, position_ids=places).logits[:, first - 1 : -1]
        scores = logits.log_softmax(-1).gather(2, rows[:, first:, None])[..., 0]
        is_real = (rows[:, first:] == tokenizer.eos_token_id).cumsum(1).roll(1, dims=1)
        is_real[:, 0] = 0
        is_real = is_real == 0  # up to the first EOS, which counts
        nll, count = nll - scores[is_real].sum().item(), count + int(is_real.sum())
        texts = [tokenizer.decode(row[first:], skip_special_tokens=True) for row in rows]
        by_seed.append([body_of(head, text) for head, text in zip(heads, texts, strict=True)])
    return Bodies(tuple(heads), tuple(zip(*by_seed, strict=True)), nll / count)
