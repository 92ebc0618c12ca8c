"""Score files of held-out tasks with transformers: one forward pass per continuation, unpacked, unsplit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from mkd.evaluation.tasks import Task

QUESTIONS = (
    {
        "question": "the fox?",
        "choices": ["brown", "lazy", "over the dog"],
        "answer": "A",
        "subject": "quick_animals",
    },
    {"question": "who jumps?", "choices": ["dog", "the quick fox"], "answer": 1},
    {
        "question": "the dog?",
        "choices": ["quick", "brown fox", "lazy", "fox", "dogs"],
        "answer": 2,
        "subject": "quick_animals",
    },
    {"question": "over?", "choices": ["the dog", "fox"], "answer": 0, "subject": "quick_animals"},
    {"question": "jumps over whom?", "choices": ["the lazy dog", "it", "\u00e9"], "answer": "C"},
)
COMPLETIONS = (
    {"prompt": "the quick ", "completion": "brown fox"},
    {
        "task_id": "HumanEval/0",
        "prompt": "def fox():\n",
        "canonical_solution": "    return 'jumps over the lazy dog'\n",
    },
    {"text": "Write a function that jumps.", "code": "def jump(dog):\n    return dog", "test_list": []},
    {"prompt": "the quick brown fox jumps over the lazy dog. " * 14, "completion": "a lazy dog"},
    {"prompt": "", "completion": "the lazy dog \u65e5\u672c"},
)


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Write the files (questions, completions) and return their paths."""
    paths = folder / "animals.jsonl", folder / "foxes.jsonl"
    for path, records in zip(paths, (QUESTIONS, COMPLETIONS), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return paths


@torch.no_grad()
def reference_scores(model: Path, tasks: Sequence[Task], seq_length: int) -> list[float]:
    """Return ln p of each continuation of all tasks after its prompt.

    Only the last `seq_length` + 1 ids of prompt and continuation are seen.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    scores = []
    for pair in (pair for task in tasks for pair in task.pairs()):
        prompt, whole = (
            tokenizer(text)["input_ids"] for text in (pair.prompt, pair.prompt + pair.continuation)
        )
        start = 0
        while start < min(len(prompt), len(whole)) and prompt[start] == whole[start]:
            start += 1
        if start == 0:
            whole, start = [tokenizer.eos_token_id, *whole], 1
        length, ids = len(whole) - start, torch.tensor(whole[-(seq_length + 1) :])
        log_p = network(ids[None, :-1]).logits[0].double().log_softmax(-1)
        scores.append(float(log_p[-length:].gather(1, ids[-length:, None]).sum()))
    return scores
