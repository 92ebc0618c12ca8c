"""The conversations of a record: of its messages, of a prompt with its completion, of a pair of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mkd.data.records.format_hints import PAIR_HINT
from mkd.data.records.messages import Images, read_messages
from mkd.data.records.tool_calls import DOCUMENTS, are_documents, cleaner, read_template_kwargs, read_tools
from mkd.data.records.values import check_string, json_name
from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT, Conversation

CONVERSATION_KEYS = ("tools", "chat_template_kwargs", DOCUMENTS)
"""Keys beside messages, beside a prompt with a completion, or beside a pair."""
MESSAGE_KEYS = (*CONVERSATION_KEYS, "images", "system")  # beside messages
PROMPTED_KEYS = (*CONVERSATION_KEYS, "images")  # beside a prompt and a completion of messages


@dataclass(frozen=True)
class ConversationReader:
    """Reads the conversations of one record. Raises DataError for anything that is none."""

    fields: Mapping[str, Any]  # the whole record
    is_table: bool  # a row of a table, whose keys may be null

    def of_messages(self, messages: Any) -> tuple[Conversation, Images]:
        """Return the conversation of a list of messages, and its images."""
        system, images = self.fields.get("system"), self.fields.get("images")
        found, images = read_messages(messages, images, system=system, is_table=self.is_table)
        return self._with_tools(found), images

    def of_completion(self, prompt: Any, completion: Any) -> tuple[Conversation, Images]:
        """Return the conversation of a prompt with its completion, both lists of messages, and its images.

        Only messages of the completion may have loss.
        """
        _check_lists({"prompt": prompt, "completion": completion})
        images = self.fields.get("images")
        found, images = read_messages([*prompt, *completion], images, is_table=self.is_table)
        return self._with_tools(without_loss(found, len(prompt))), images

    def of_pair(self, prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
        """Return a prompt with two answers: three texts, or three conversations.

        Raises DataError for other values, an empty prompt, and images.
        """
        given = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if prompt in ("", []):
            what, why = "the prompt is empty", "both answers are judged as answers to it"
            raise DataError(what, why, "repair or remove the record", code="record-empty")
        if not any(isinstance(value, list) for value in given.values()):
            for name, value in given.items():
                check_string(value, name)
            return prompt, chosen, rejected
        _check_lists(given)
        read = [read_messages(value, name=name, is_table=self.is_table) for name, value in given.items()]
        if any(images for _, images in read):
            what, why = "the pair has images", "mkd learns preferences from text only"
            raise DataError(what, why, "remove the record", code="images-not-read")
        (first, _), (second, _), (third, _) = read
        return self._with_tools(without_loss(first, len(first.messages))), second, third

    def _with_tools(self, conversation: Conversation) -> Conversation:
        clean = cleaner(self.is_table)
        tools = read_tools(self.fields.get("tools"), clean)
        variables = read_template_kwargs(self.fields.get("chat_template_kwargs"), clean)
        documents = self.fields.get(DOCUMENTS)
        if are_documents(documents):
            variables = {DOCUMENTS: clean(documents), **variables}
        return replace(conversation, tools=tools, template_kwargs=variables)


def without_loss(conversation: Conversation, count: int) -> Conversation:
    """Return the conversation with no loss on its first `count` messages, which are a prompt."""
    flags = list(conversation.loss) or [None] * len(conversation.messages)
    asking = next((number for number, flag in enumerate(flags[:count], 1) if flag), None)
    if asking is not None:
        raise DataError(
            f"message {asking} of the prompt asks for loss",
            "the model learns to write the answer, and only reads the prompt",
            "remove the flag, or write the record as messages",
            code="record-loss-flag-not-valid",
        )
    roles = [message["role"] for message in conversation.messages[:count]]
    prompt = [False if role == ASSISTANT else None for role in roles]
    return replace(conversation, loss=[*prompt, *flags[count:]])


def _check_lists(given: Mapping[str, Any]) -> None:
    """Raise DataError unless all values are lists of messages."""
    if not all(isinstance(value, list) for value in given.values()):
        kinds = ", ".join(f"{key} is a {json_name(value)}" for key, value in given.items())
        whole = isinstance(given["prompt"], str) and isinstance(given.get("chosen"), list)
        raise DataError(
            kinds,
            "they are all texts, or all lists of messages",
            "write all of them in one form"
            + (f"; if both answers hold the prompt too, {PAIR_HINT}" if whole else ""),
            code="record-ambiguous",
        )
    empty = next((key for key, value in given.items() if not value), None)
    if empty is not None:
        what = f"{empty} is an empty list"
        why = "a conversation is a list of at least one message"
        raise DataError(what, why, "repair or remove the record", code="record-value-not-valid")
