"""A conversation of a person with a student, and its teacher beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from mkd.chat.answer import Answer
from mkd.chat.generation import Generation
from mkd.chat.interruption import Ranks
from mkd.chat.views import View, styled
from mkd.chat.writer import Writer
from mkd.errors import EXIT_DONE, EXIT_INTERRUPTED, DataError
from mkd.kinds.sampled.sampler.rollouts import Request
from mkd.tokenizers.chat_input import ASSISTANT, Conversation

COMMANDS = {
    "/new": "forget the conversation",
    "/retry": "answer the last message again, with other random numbers",
    "/system TEXT": "start a new conversation with this system prompt; without a text, with none",
    "/help": "show this",
    "/exit": "leave, as Ctrl-D",
}
LEAVE_HINT = "press Ctrl-C again to leave, or Ctrl-D"


class Person:
    """Reads the messages of a person from a terminal, or a line each from a pipe."""

    def __init__(self, out: TextIO | None = None):
        self._out = out or sys.stdout
        self.is_at_terminal = sys.stdin.isatty()
        if self.is_at_terminal:
            import readline  # noqa: F401  # input() then edits lines and has a history

    def read(self) -> str | int:
        """Return the next message, or the exit code at the end: 0 after Ctrl-D, 130 after Ctrl-C twice."""
        is_warned = False
        while True:
            try:
                if self.is_at_terminal:
                    return input("you> ")
                line = sys.stdin.readline()
                if not line:
                    return EXIT_DONE
                print(f"you> {line.rstrip()}", file=self._out, flush=True)
                return line.rstrip("\n")
            except EOFError:
                print(file=self._out)
                return EXIT_DONE
            except KeyboardInterrupt:
                print(file=self._out)
                if is_warned or not self.is_at_terminal:
                    return EXIT_INTERRUPTED
                print(LEAVE_HINT, file=self._out, flush=True)
                is_warned = True


@dataclass
class Dialogue:
    """The messages so far: those of the person are shared, each model sees its own answers."""

    writers: Sequence[Writer]
    generation: Generation
    view: View
    ranks: Ranks
    system: str | None = None
    _turns: list[tuple[str, list[str]]] = field(default_factory=list)  # (message, the answer of each model)
    _tries: int = 0  # answers to the last message

    def run(self, person: Person) -> int:
        """Answer messages until the person leaves, and return the exit code. Collective."""
        while True:
            said = self.ranks.share(person.read() if self.ranks.is_first else "")
            if isinstance(said, int):
                return said
            word, _, rest = said.strip().partition(" ")
            if word in ("/exit", "/quit", "/bye"):
                return EXIT_DONE
            if word.startswith("/") and word[1:].isalpha():
                self._obey(word, rest.strip())
            elif said.strip():
                self._tries = 0
                self._answer(said)

    def _obey(self, word: str, rest: str) -> None:
        if word == "/new":
            self._turns = []
            self._say("a new conversation")
        elif word == "/system":
            self.system, self._turns = rest or None, []
            self._say("a new conversation with this system prompt" if rest else "without a system prompt")
        elif word == "/retry" and self._turns:
            message, _ = self._turns.pop()
            self._tries += 1
            self._answer(message)
        elif word == "/retry":
            self._say("there is no message yet")
        else:
            lines = [f"  {name:14} {text}" for name, text in COMMANDS.items()]
            self._say("\n".join([*([] if word == "/help" else [f"{word} is not a command"]), *lines]))

    def _answer(self, message: str) -> None:
        """Let the models answer. A message that they cannot read is not kept."""
        try:
            answers = [self._begin(place, message) for place in range(len(self.writers))]
        except DataError as error:
            self._say(error.report())
            return
        with self.ranks.interruptible():
            self.view.show(answers, self.ranks)
        self._turns.append((message, [one.text for one in answers]))

    def _begin(self, place: int, message: str) -> Answer:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for said, answers in self._turns:
            messages += [{"role": "user", "content": said}, {"role": ASSISTANT, "content": answers[place]}]
        writer = self.writers[place]
        ids = writer.encode(Conversation([*messages, {"role": "user", "content": message}]))
        return Answer(writer, Request(len(self._turns), self._tries, ids), self.generation)

    def _say(self, text: str) -> None:
        if self.ranks.is_first:
            print(styled(text, "note", sys.stdout), flush=True)
