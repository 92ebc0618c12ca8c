"""Problems with a checker, code, and the figures of a model on both: the texts of `teacher_gain.py`.

A problem is a sum of a few numbers; its reference solution has the partial sums, a line each. The checker
compares the last number. transformers writes the solutions that are judged: no part of mkd judges mkd.
"""

from __future__ import annotations

import json
import math
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

CONTEXT = "Reference solution:\n{reference}\n\n{prompt}"
"""The prompt of a teacher that reads the reference: the template of `context.user`."""

PLAIN = "{prompt}"
HELD_OUT_EVERY = 10  # source files
LOADING = threading.Lock()  # transformers loads one model at a time


@dataclass(frozen=True)
class TextSizes:
    """Numbers of problems, and characters of code."""

    start: int  # problems that the start learns from
    arms: int  # problems with references for the arms
    expert: int  # problems of the arithmetic expert, and of the students that it teaches
    valid: int  # held-out problems that choose learning rates
    test: int  # held-out problems that are reported
    document: int = 40_000  # characters of a source file, at most
    characters: int = 12_000_000  # characters of all of them, at most
    held_out_files: int = 48
    held_out_document: int = 4_000


def problem(random: Random) -> dict[str, str]:
    """Return a problem of three to five numbers of one to three digits, with its reference solution."""
    terms = [str(random.randrange(10 ** random.randint(1, 3))) for _ in range(random.randint(3, 5))]
    signs = [random.choice("+-") for _ in terms[1:]]
    question, total, lines = terms[0], int(terms[0]), []
    for sign, term in zip(signs, terms[1:], strict=True):
        new = total + int(term) if sign == "+" else total - int(term)
        question += f" {sign} {term}"
        lines.append(f"{total} {sign} {term} = {new}")
        total = new
    reference = "\n".join(lines)
    prompt = f"Problem: {question}\nSolution:"
    return dict(prompt=prompt, completion=f" {reference}", reference=reference, answer=str(total))


def is_right(completion: str, answer: str) -> bool:
    """Compare the last number of a completion with the answer."""
    return completion.split()[-1:] == [answer]


def write_texts(folder: Path, sizes: TextSizes) -> None:
    """Write all files of problems, which have no problem in common, and of code."""
    random, seen = Random(1), set()

    def draw(count: int) -> Iterator[dict[str, str]]:
        while count:
            found = problem(random)
            if found["prompt"] not in seen:
                seen.add(found["prompt"])
                count -= 1
                yield found

    for name in ("valid", "test"):
        write_lines(folder / f"{name}.jsonl", list(draw(getattr(sizes, name))))
    arms, expert, start = (list(draw(count)) for count in (sizes.arms, sizes.expert, sizes.start))
    write_lines(folder / "arms.jsonl", [only(one, "prompt", "completion") for one in arms])
    write_lines(folder / "references.jsonl", [only(one, "prompt", "completion", "reference") for one in arms])
    write_lines(folder / "prompts.jsonl", [only(one, "prompt", "reference") for one in arms])
    write_lines(folder / "plain_prompts.jsonl", [only(one, "prompt") for one in arms])
    tag = {"domain": "sums"}
    write_lines(folder / "sums.jsonl", [only(one, "prompt", "completion") | tag for one in expert])
    for one in start[::2]:  # half of the problems of the start are read behind their reference
        one["prompt"] = CONTEXT.format(**one)
    write_lines(folder / "start.jsonl", [only(one, "prompt", "completion") for one in start])
    write_code(folder, sizes)


def write_code(folder: Path, sizes: TextSizes) -> None:
    """Write the standard library of this interpreter, a tenth of it as held-out text."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    sources = [one for one in sources if not skipped & set(one.parts)]
    Random(1).shuffle(sources)
    train: list[str] = []
    held_out: list[str] = []
    for index, source in enumerate(sources):
        text = source.read_text(encoding="utf-8", errors="replace")
        if index % HELD_OUT_EVERY == 0 and len(text) > 500:
            held_out.append(text[: sizes.held_out_document])
        elif text and sum(map(len, train)) < sizes.characters:
            train.append(text[: sizes.document])
    write_lines(folder / "code.jsonl", [{"text": text, "domain": "code"} for text in train])
    texts = held_out[: sizes.held_out_files]
    write_lines(folder / "held_out_code.jsonl", [{"text": text} for text in texts])


def only(record: dict[str, str], *keys: str) -> dict[str, str]:
    return {key: record[key] for key in keys}


def write_lines(path: Path, records: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def average_weights(first: Path, second: Path, out_dir: Path) -> None:
    """Write the model whose weights are the means of two models."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with LOADING:
        one, other = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (first, second)
        )
        weights = other.state_dict()
        one.load_state_dict({name: (value + weights[name]) / 2 for name, value in one.state_dict().items()})
        one.save_pretrained(out_dir)
        AutoTokenizer.from_pretrained(first).save_pretrained(out_dir)


def judge(model_dir: Path, folder: Path, new_tokens: int, prompt: str = PLAIN) -> dict[str, float]:
    """Return a model's figures: `valid` and `test`, the fractions of problems that it solves, and `code`.

    It reads each problem in the template `prompt`. Solutions are greedy. `code` are bits per byte of held-out
    code.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with LOADING:  # neither imports nor loads in several threads at a time
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging

        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval().to(device)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    problems = {name: read_lines(folder / f"{name}.jsonl") for name in ("valid", "test")}
    for one in (one for of in problems.values() for one in of):
        one["prompt"] = prompt.format(**one)
    right = iter(solve(model, tokenizer, [*problems["valid"], *problems["test"]], new_tokens))
    figures = {name: sum(next(right) for _ in of) / len(of) for name, of in problems.items()}
    figures["code"] = bits_per_byte(model, tokenizer, folder / "held_out_code.jsonl")
    del model
    return figures


def solve(model: Any, tokenizer: Any, problems: Sequence[dict[str, str]], new_tokens: int) -> list[bool]:
    """Return for each problem whether the greedy solution is right."""
    import torch

    prompts = [one["prompt"] for one in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    inputs = inputs.to(model.device)
    settings = dict(do_sample=False, max_new_tokens=new_tokens, pad_token_id=tokenizer.pad_token_id)
    with torch.no_grad():
        rows = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [is_right(text, one["answer"]) for text, one in zip(texts, problems, strict=True)]


def bits_per_byte(model: Any, tokenizer: Any, path: Path) -> float:
    """Return the bits per byte of texts; the first token of each has no prediction."""
    import torch
    from torch.nn.functional import cross_entropy

    nats, num_bytes = 0.0, 0
    with torch.no_grad():
        for record in read_lines(path):
            row = tokenizer(record["text"], return_tensors="pt")["input_ids"].to(model.device)
            logits = model(row).logits[0, :-1].float()
            nats += cross_entropy(logits, row[0, 1:], reduction="sum").item()
            num_bytes += len(record["text"].encode()) - len(tokenizer.decode(row[0, :1]).encode())
    return nats / math.log(2) / num_bytes
