"""Completions of prompts by one or two models: JSON lines for programs, or text for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from mkd.chat.answer import Answer, end_of
from mkd.chat.generation import Generation
from mkd.chat.interruption import Ranks
from mkd.chat.text_stream import TextStream
from mkd.chat.views import OneAfterTheOther, styled
from mkd.chat.wrapped_text import printable
from mkd.chat.writer import Reader, Writer, as_conversation, require_chat, with_system
from mkd.data.files.named_files import all_local
from mkd.data.prompts import parse_prompt
from mkd.data.records.rows import read_rows
from mkd.errors import DataError, UsageError
from mkd.kinds.sampled.sampler.rollouts import Request, Rollout
from mkd.tokenizers.chat_input import Conversation

SHOWN = 200  # characters of a prompt that people see, its end
OWN_KEYS = ("prompt", "messages", "sample", "seed")


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt, and the other keys of its record."""

    prompt: str | Conversation
    fields: Mapping[str, Any]

    @property
    def entry(self) -> dict[str, Any]:
        """The prompt as a record has it."""
        if isinstance(self.prompt, Conversation):
            return {"messages": [dict(one) for one in self.prompt.messages]}
        return {"prompt": self.prompt}

    @property
    def shown(self) -> str:
        """The prompt for people: the last message of a conversation, or the end of the text."""
        text = self.prompt if isinstance(self.prompt, str) else str(self.prompt.messages[-1].get("content"))
        return text if len(text) <= SHOWN else f"...{text[-SHOWN:]}"


def read_asked(
    texts: Sequence[str], files: Sequence[str], as_chat: bool, system: str | None
) -> list[AskedPrompt]:
    """Return the prompts of the command line and of files, in this order.

    `as_chat` makes a user's message of every text. Raises DataError for a record that is not a prompt, and
    UsageError for a system prompt that no conversation takes.
    """
    asked = [AskedPrompt(text, {}) for text in texts]
    for path in all_local(files, "--prompts"):
        for number, row in read_rows(path, whole=True):
            try:
                asked.append(AskedPrompt(*parse_prompt(row)))
            except DataError as error:
                raise error.located(f"{path}:{number}") from error
    if not asked:
        what = f"--prompts {' '.join(files)} has no prompt"
        raise DataError(what, "there is nothing to complete", "check how it was made", code="data-file-empty")
    read = [AskedPrompt(in_chat(one.prompt, as_chat, system), one.fields) for one in asked]
    if system and not any(isinstance(one.prompt, Conversation) for one in read):
        raise UsageError(
            "--system has no effect",
            "all prompts are plain texts, which have no system prompt",
            "add --chat to make messages of them, or leave out --system",
            code="remove-flag",
        )
    return read


def in_chat(prompt: str | Conversation, as_chat: bool, system: str | None) -> str | Conversation:
    """Return the prompt with the system message; `as_chat` makes a user's message of a text."""
    if isinstance(prompt, Conversation):
        return with_system(prompt, system)
    return as_conversation(prompt, system) if as_chat else prompt


def tokenised(
    readers: Sequence[Reader], asked: Sequence[AskedPrompt], num_samples: int
) -> list[list[Request]]:
    """Return the requests of each model: `num_samples` of every prompt.

    Raises DataError for a prompt that a model cannot read.
    """
    if any(isinstance(one.prompt, Conversation) for one in asked):
        require_chat(readers)
    found = []
    for reader in readers:
        of_reader = []
        for number, one in enumerate(asked):
            try:
                ids = reader.encode(one.prompt)
            except DataError as error:
                raise error.located(f"prompt {number + 1}") from error
            of_reader += [Request(number, sample, ids) for sample in range(num_samples)]
        found.append(of_reader)
    return found


def sample_prompts(
    writers: Sequence[Writer],
    asked: Sequence[AskedPrompt],
    requests: Sequence[Sequence[Request]],  # of each writer
    generation: Generation,
) -> Iterator[tuple[AskedPrompt, int, list[Rollout]]]:
    """Yield every prompt, the number of the sample, and its completion by each model, in order. Collective.

    The models take turns, so that finished completions are there early.
    """
    streams = [writer.stream(one, generation) for writer, one in zip(writers, requests, strict=True)]
    done: list[Mapping[int, Rollout]] = [{} for _ in writers]
    place = 0
    while place < len(requests[0]):
        for number, stream in enumerate(streams):
            row = next(stream, None)
            done[number] = done[number] if row is None else row.done
        while all(place in one for one in done):
            number, sample = divmod(place, generation.samples)
            yield asked[number], sample, [one[place] for one in done]
            place += 1


def write_samples(
    writers: Sequence[Writer],
    asked: Sequence[AskedPrompt],
    requests: Sequence[Sequence[Request]],  # of each writer
    generation: Generation,
    out: TextIO | None,  # None on other ranks than the first
) -> int:
    """Write one JSON line for every prompt and sample as soon as it is there. Return their number."""
    count = 0
    for one, sample, rollouts in sample_prompts(writers, asked, requests, generation):
        entry: dict[str, Any] = {
            **{key: value for key, value in one.fields.items() if key not in OWN_KEYS},
            **one.entry,
            "sample": sample,
            "seed": generation.seed,
        }
        for writer, rollout in zip(writers, rollouts, strict=True):
            entry[writer.role] = text_of(writer, rollout)
            entry[f"{writer.role}_end"] = end_of(writer, rollout.finish, rollout.request.ids, rollout.ids)
            entry[f"{writer.role}_tokens"] = len(rollout.ids)
            entry[f"{writer.role}_logp"] = round(float(rollout.logp.sum()), 4)
        count += 1
        if out is not None:
            out.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
            out.flush()
    return count


def show_samples(
    writers: Sequence[Writer],
    asked: Sequence[AskedPrompt],
    requests: Sequence[Sequence[Request]],  # of each writer
    generation: Generation,
    ranks: Ranks,
) -> None:
    """Print every prompt with its completions. A single prompt is shown while the models write."""
    out = sys.stdout
    if len(asked) == generation.samples == 1:
        answers = [Answer(writer, one, generation) for writer, (one,) in zip(writers, requests, strict=True)]
        with ranks.interruptible():
            OneAfterTheOther(out).show(answers, ranks)
        return
    for one, sample, rollouts in sample_prompts(writers, asked, requests, generation):
        if not ranks.is_first:
            continue
        if sample == 0:
            print(f"{styled('prompt>', 'you', out)} {_for_people(one.shown, out)}")
        for writer, rollout in zip(writers, rollouts, strict=True):
            number = f" {sample + 1}" if generation.samples > 1 else ""
            end = end_of(writer, rollout.finish, rollout.request.ids, rollout.ids)
            cut = "" if end == "stop" else styled(f" [{end}]", "note", out)
            label = styled(f"{writer.role}{number}>", writer.role, out)
            print(f"{label} {_for_people(text_of(writer, rollout), out)}{cut}", flush=True)


def _for_people(text: str, out: TextIO) -> str:
    return printable(text) if out.isatty() else text


def text_of(writer: Writer, rollout: Rollout) -> str:
    """Return the text of a completion, without the token that ends it."""
    stream = TextStream(writer.tokenizer, rollout.request.ids.tolist())
    pieces = [stream.push(one) for one in rollout.ids.tolist() if one not in writer.stops]
    return "".join(pieces) + stream.end()
