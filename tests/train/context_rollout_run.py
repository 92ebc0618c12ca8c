"""Run steps whose teacher reads another prompt than the student, and compute them with transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import torch

from tests.train.command import write_records
from tests.train.context_run import HINT, WORDS, make_files, said

SEQ_LENGTH, NEW_TOKENS, NUM_PROMPTS = 72, 14, 5
TEMPERATURE, BETA = 2.0, 0.3


def make_rollout_files(folder: Path) -> Path:
    """Make a student, a teacher of another family, and prompts of all forms."""
    make_files(folder)
    stops = {"eos_token_id": [0, *range(60, 80)]}  # so that some completions end early
    (folder / "student" / "generation_config.json").write_text(json.dumps(stops))
    write_records(folder / "prompts.jsonl", *(prompt_of(i) for i in range(NUM_PROMPTS)))
    return folder


def prompt_of(i: int) -> dict[str, Any]:
    """Return a prompt: a text, a chat with or without earlier turns, without a context, or with its own."""
    question, solution = f"{i} {WORDS[i % 4]}?", {"solution": " ".join(WORDS[: i % 4 + 1])}
    asked = [said("user", question)]
    earlier = [said("system", "lazy"), said("user", "fox"), said("assistant", "the dog")]
    return [
        {"prompt": question} | solution,
        {"messages": [*earlier, *asked]} | solution,
        {"messages": asked},
        {"messages": asked, "teacher_prompt": "brown lazy dog"},
        {"messages": asked, "teacher_messages": [said("system", "the fox"), said("user", "over")]},
    ][i]


def prompts_of(
    record: dict[str, Any], hf, hints: Sequence[str] = (HINT,), values: dict[str, str] | None = None
) -> tuple[list[int], list[int] | None]:
    """Return the ids of both prompts from the documentation alone; None: the teacher has none.

    The first of `hints` whose values are there counts; None: they are those of the record.
    """

    def encode(text):
        return hf(text)["input_ids"]

    def chat(messages):
        return encode(hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def hinted(question):
        known = (record if values is None else values) | {"prompt": question}
        names = [[one[1] for one in Formatter().parse(hint) if one[1]] for hint in hints]
        fit = [hint for hint, own in zip(hints, names, strict=True) if set(own) <= known.keys()]
        return fit[0].format(**known) if fit else None

    if "prompt" in record:
        text = hinted(record["prompt"])
        return encode(record["prompt"]), None if text is None else encode(text)
    *before, last = record["messages"]
    own = chat(record["messages"])
    if "teacher_messages" in record:
        return own, chat(record["teacher_messages"])
    text = record.get("teacher_prompt") or hinted(last["content"])
    return own, None if text is None else chat([*before, said("user", text)])


def write_teachers(path: Path, *teachers: dict[str, Any], **sections: Any) -> Path:
    path.write_text(json.dumps({"teachers": list(teachers)} | sections))
    return path


def knowing(model: dict[str, Any], **context: Any) -> dict[str, Any]:
    """Return the settings of a teacher with the context of the tests."""
    return model | {"name": "knows", "context": {"user": HINT, "missing": "skip"} | context}


def argv(files: Path, run: str, config: Path, *more: object) -> list[str]:
    """Return the command line of a run whose steps have all prompts, 2 samples each."""
    words: list[object] = ["--student-hf", files / "student", "--config", config]
    words += ["--on-policy-fraction", 1, "--prompt-data-path", files / "prompts.jsonl", "--no-shuffle"]
    words += ["--rollout-prompts", NUM_PROMPTS, "--samples-per-prompt", 2, "--max-new-tokens", NEW_TOKENS]
    words += ["--rollout-slots", 4, "--kd-ratio", 1, "--kd-divergence", "jsd", "--kd-jsd-beta", BETA]
    words += ["--kd-temperature", TEMPERATURE, "--seq-length", SEQ_LENGTH, "--global-batch-size", 4]
    words += ["--train-iters", 4, "--lr", 1e-3, "--log-dir", files / run]
    words += ["--data-cache-path", files / "cache"]
    return [str(word) for word in (*words, *more)]


@dataclass(frozen=True)
class Taught:
    """One completion: ids of both prompts, and of what was sampled."""

    own: np.ndarray
    theirs: list[int] | None
    ids: np.ndarray
    loss: np.ndarray | None = None  # None: all were sampled


def taught_of(rollouts: dict, files: Path) -> list[Taught]:
    """Return the completions of a step, of `one_step`, with the prompts that the documentation says."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(files / "student")
    found = []
    for (prompt, _), (own, ids, _) in sorted(rollouts.items()):
        expected, theirs = prompts_of(prompt_of(prompt), hf)
        assert own.tolist() == expected
        found.append(Taught(own, theirs, ids))
    return found


@dataclass(frozen=True)
class Term:
    """A mean over the tokens that a teacher teaches."""

    teacher: Path | None  # None: the student
    completions: list[Taught]
    weight: float = 1.0


def reference(
    student_dir: Path, terms: list[Term], out_dir: Path, settings: dict[str, Any] | None = None
) -> float:
    """Write float64 gradients of transformers as a folder; return the loss. Every completion runs alone.

    `settings` are those of `objective_of`.
    """
    from mkd.losses.dense_reference import dense_kd
    from tests.losses.objectives import objective_of
    from tests.train.hf_gradients import load

    student, total = load(student_dir), 0.0
    settings = settings or dict(temperature=TEMPERATURE, divergence="jsd", jsd_beta=BETA)
    for term in terms:
        teacher = student if term.teacher is None else load(term.teacher).requires_grad_(False)
        known = [one for one in term.completions if one.theirs is not None]
        masks = [
            torch.tensor(np.ones(len(one.ids)) if one.loss is None else one.loss).double() for one in known
        ]
        count = float(sum(mask.sum() for mask in masks))
        for one, mask in zip(known, masks, strict=True):
            ids, theirs = (torch.tensor([*before, *one.ids]) for before in (one.own, one.theirs))
            logits = student(ids[None]).logits[0]
            with torch.no_grad():
                of_teacher = teacher(theirs[None]).logits[0, len(one.theirs) - 1 : -1]
            rows = torch.arange(len(one.own) - 1, len(ids) - 1)
            sizes = dict(student_vocab_size=logits.shape[1], teacher_vocab_size=of_teacher.shape[1])
            objective = objective_of(**sizes, kd_ratio=1.0, **settings)
            loss = dense_kd(logits[rows], of_teacher, ids[rows + 1], mask, objective).loss
            loss = loss * term.weight / count
            loss.backward()
            total += loss.item()
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return total
