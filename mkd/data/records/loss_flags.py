"""Flags of a message that say whether it has loss, as several trainers name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT

LOSS_FLAGS = ("loss", "train", "trainable", "training", "weight", "loss_scale")
"""Keys of a message: ms-swift's loss and loss_scale, axolotl's train and training, OpenAI's weight."""
FINER_FLAGS = ("train_detail",)  # axolotl's, of parts of a text


def loss_flag(message: Mapping[str, Any], name: str) -> bool | None:
    """Return True or False if the message says that it has loss or none, None if it says nothing.

    A message that is not the assistant's never has loss: None. Raises DataError, which calls the message
    `name`, for flags that contradict each other, that are neither 0 nor 1, or that ask for loss on such a
    message.
    """
    finer = next((key for key in FINER_FLAGS if message.get(key) is not None), None)
    if finer is not None:
        raise _finer(f"{name} has {finer}")
    given = {key: message[key] for key in LOSS_FLAGS if message.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise DataError(
                f"{name}: {key} is {value!r}",
                "a message has loss (true or 1) or none (false or 0), with nothing between",
                "round it, or remove the key",
                code="record-loss-flag-not-valid",
            )
    if len({bool(value) for value in given.values()}) > 1:
        shown = " and ".join(f"{key} {value!r}" for key, value in given.items())
        raise DataError(
            f"{name}: {shown} contradict each other",
            "each says whether the message has loss",
            "keep one of them",
            code="record-loss-flag-not-valid",
        )
    flag = next((bool(value) for value in given.values()), None)
    if flag and message.get("role") != ASSISTANT:
        (key, *_) = given
        raise DataError(
            f"{name}: {key} asks for loss on a message of the role {message.get('role')}",
            "the model learns to write what the assistant says, and only reads the rest",
            "set it to false, or remove the key",
            code="record-loss-flag-not-valid",
        )
    return flag if message.get("role") == ASSISTANT else None


def refuse_part_flags(part: Mapping[str, Any], name: str) -> None:
    """Raise DataError if a part of a content has a flag of its own."""
    key = next((key for key in (*LOSS_FLAGS, *FINER_FLAGS) if part.get(key) is not None), None)
    if key is not None:
        raise _finer(f"{name} has {key}")


def _finer(what: str) -> DataError:
    return DataError(
        what,
        "a message has loss as a whole or not at all, and the key would be ignored",
        "give the flag to the message, or split the record",
        code="record-loss-flag-not-valid",
    )
