"""Held-out tasks, scored by likelihood: their prompts and continuations, and their metrics.

A model gives each continuation a log-probability, and the task turns these into metrics. Prompts are those of
the Language Model Evaluation Harness (tasks `mmlu` and `mmlu_continuation`), which follow Hendrycks et al.,
"Measuring Massive Multitask Language Understanding", ICLR 2021.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mkd.errors import DataError, ErrorList, MkdError, UsageError
from mkd.evaluation.records import (
    LETTERS,
    Completion,
    Images,
    Question,
    read_completions,
    read_questions,
    task_name,
)

STYLES = ("letter", "continuation")


@dataclass(frozen=True)
class Pair:
    """A pair to score: the log-probability of `continuation` after `prompt`."""

    prompt: str
    continuation: str
    place: str  # file and line, for errors
    images: Images = ()  # of a conversation: the images and the prompt, then the answer


class Task(Protocol):
    """A task of any kind."""

    @property
    def name(self) -> str:
        """Name in its metrics."""

    def pairs(self) -> list[Pair]:
        """Return everything to score, in a fixed order."""

    def metrics(self, log_likelihoods: np.ndarray, num_tokens: np.ndarray) -> dict[str, float]:
        """Return the metrics, from the log-probability (nats) and tokens of each continuation, [pairs]."""


@dataclass(frozen=True)
class MultipleChoice:
    """Questions whose answer is the option with the largest likelihood.

    Style `letter` lists all options in the prompt and compares their letters (`accuracy`). Style
    `continuation` shows no options and compares their texts by log-probability per UTF-8 byte
    (`accuracy_norm`).
    """

    name: str
    path: str
    questions: tuple[Question, ...]
    examples: tuple[tuple[Question, ...], ...]  # for each question, the answered ones before it
    styles: tuple[str, ...] = STYLES

    def pairs(self) -> list[Pair]:
        """Return the pairs ordered by style, question and option."""
        return [
            Pair(prompt, " " + option, f"{self.path}, line {question.line}", question.images)
            for style in self.styles
            for question, examples in zip(self.questions, self.examples, strict=True)
            for prompt in [few_shot_prompt(question, examples, style)]
            for option in _options(question, style)
        ]

    def metrics(self, log_likelihoods: np.ndarray, num_tokens: np.ndarray) -> dict[str, float]:
        """Return the proportions of right answers, as `accuracy` and `accuracy_norm`, and `num_questions`."""
        borders = np.cumsum([len(question.choices) for _ in self.styles for question in self.questions])[:-1]
        scores = iter(np.split(log_likelihoods, borders))
        metrics: dict[str, float] = {}
        for style in self.styles:
            right = [_best(question, next(scores), style) == question.answer for question in self.questions]
            metrics["accuracy" if style == "letter" else "accuracy_norm"] = sum(right) / len(right)
        return metrics | {"num_questions": len(self.questions)}


@dataclass(frozen=True)
class Completions:
    """Texts with a known continuation, to measure how well a model predicts it."""

    name: str
    path: str
    records: tuple[Completion, ...]

    def pairs(self) -> list[Pair]:
        return [Pair(r.prompt, r.completion, f"{self.path}, line {r.line}", r.images) for r in self.records]

    def metrics(self, log_likelihoods: np.ndarray, num_tokens: np.ndarray) -> dict[str, float]:
        """Return `ce` (nats/token), `perplexity` = exp(ce), `bits_per_byte`, and their counts.

        Bytes are those of the completions' UTF-8. All are ratios of sums over the file, so a long completion
        weighs more than a short one.
        """
        nats, tokens = -float(log_likelihoods.sum()), int(num_tokens.sum())
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(nats / tokens))
        num_bytes = sum(len(record.completion.encode("utf-8")) for record in self.records)
        return {
            "ce": nats / tokens,
            "perplexity": perplexity,
            "bits_per_byte": nats / math.log(2) / num_bytes,
            "num_completions": len(self.records),
            "num_tokens": tokens,
            "num_bytes": num_bytes,
        }


def read_tasks(
    multiple_choice: Sequence[str],
    completions: Sequence[str],
    num_fewshot: int = 0,
    styles: Sequence[str] = STYLES,
) -> list[Task]:
    """Return the tasks of all files, from text alone. Raises ErrorList, with one problem a file."""
    problems: list[MkdError] = []
    tasks: dict[str, Task] = {}
    paths = [(str(path), True) for path in multiple_choice] + [(str(path), False) for path in completions]
    for path, is_choice in paths:
        try:
            name = task_name(path)
            if name in tasks:
                why = "metrics carry the name of their file"
                what = f"two files of held-out tasks are named {name}"
                raise UsageError(what, why, "rename one of them", code="names-equal")
            if is_choice:
                tasks[name] = read_multiple_choice(path, num_fewshot, tuple(styles))
            else:
                tasks[name] = Completions(name, path, tuple(read_completions(path)))
        except MkdError as error:
            problems.append(error)
    if problems:
        raise ErrorList(problems)
    return list(tasks.values())


def read_multiple_choice(path: str, num_fewshot: int = 0, styles: tuple[str, ...] = STYLES) -> MultipleChoice:
    """Return the questions of `path`, each after up to `num_fewshot` examples of its subject.

    Examples come from the file `NAME_dev.SUFFIX` beside `NAME.SUFFIX`. Without that file they are the first
    records of each subject in `path` itself, which are then not asked. Raises DataError with file and line.
    """
    name, questions = task_name(path), read_questions(path)
    dev = Path(path).with_name(name + "_dev" + Path(path).name.removeprefix(name))
    has_dev = num_fewshot > 0 and dev.exists()
    pool: dict[str | None, list[Question]] = defaultdict(list)
    for example in read_questions(dev) if has_dev else questions:
        if len(pool[example.subject]) < num_fewshot:
            pool[example.subject].append(example)
    used = set() if has_dev else {example.line for examples in pool.values() for example in examples}
    asked = tuple(question for question in questions if question.line not in used)
    source = dev if has_dev else path
    for question in asked:
        found = len(pool[question.subject])
        if found < num_fewshot:
            of = "" if question.subject is None else f" of subject {question.subject}"
            what = f"{path}, line {question.line}: {source} has {found} examples{of}"
            why = f"each question follows {num_fewshot} answered examples"
            do = "lower --eval-num-fewshot, or add examples"
            raise DataError(what, why, do, code="too-little-data")
    if num_fewshot and any(question.images for question in asked):
        what, why = f"{path} has questions with images", f"--eval-num-fewshot is {num_fewshot}"
        do = "ask them without examples: 0"
        raise DataError(what, f"{why}, and examples are text alone", do, code="images-not-read")
    if not asked:
        what = f"{path} has no question left"
        why = f"the first {num_fewshot} are examples"
        raise DataError(what, why, f"put the examples into {dev}", code="too-little-data")
    examples = tuple(tuple(pool[question.subject]) for question in asked)
    return MultipleChoice(name, path, asked, examples, styles)


def few_shot_prompt(question: Question, examples: Sequence[Question], style: str) -> str:
    """Return the prompt: a line on the subject, answered examples, and the question up to "Answer:"."""
    header = ""
    if question.subject is not None:
        kind = "multiple choice questions" if style == "letter" else "questions"
        header = f"The following are {kind} (with answers) about {question.subject.replace('_', ' ')}.\n\n"
    answered = (f"{_ask(one, style)} {_options(one, style)[one.answer]}\n\n" for one in examples)
    return header + "".join(answered) + _ask(question, style)


def _ask(question: Question, style: str) -> str:
    if style == "continuation":
        return f"Question: {question.question}\nAnswer:"
    options = zip(LETTERS, question.choices, strict=False)
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in options)
    return f"{question.question}\n{listed}Answer:"


def _options(question: Question, style: str) -> Sequence[str]:
    return LETTERS[: len(question.choices)] if style == "letter" else question.choices


def _best(question: Question, scores: np.ndarray, style: str) -> int:
    """Return the option with the largest score; among equals, the first."""
    if style == "continuation":
        scores = scores / [len(choice.encode("utf-8")) for choice in question.choices]
    return int(np.argmax(scores))
