"""Flags of a message that say whether it has loss, as several trainers name them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from mkd.data.records.sharegpt import KNOWN_SPEAKERS, SPEAKERS, in_lower_case
from mkd.errors import DataError
from mkd.tokenizers.chat_input import ASSISTANT

MASKED = "masked"  # torchtune's: true means no loss
LOSS_FLAGS = (
    *("loss", "train", "trainable", "training", "weight", "loss_scale"),
    *("loss_mask", "step_loss_mask", "loss_weight", MASKED),
)
"""Keys of a message: ms-swift's loss and loss_scale, axolotl's train and training, OpenAI's weight, slime's
step_loss_mask, torchtune's masked."""
MASKED_ROLES = "mask"  # beside the messages, in NeMo's form: roles without loss
FINER_FLAGS = ("train_detail",)  # axolotl's, of parts of a text
MASK_WORDS = frozenset(("loss", "mask", "masks", "masked", "train", "trained", "trainable", "training"))
FLAG_WORDS = MASK_WORDS | {"learn", "learned", "ignore", "ignored", "exclude", "excluded", "skip", "skipped"}
"""Words in names of keys that say whether something is learnt."""


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
        if _are_flags(value):
            raise _finer(f"{name}: {key} is a list")
        if not _is_flag(value):
            raise DataError(
                f"{name}: {key} is {value!r}",
                "a message has loss (true or 1) or none (false or 0), with nothing between",
                "round it, or remove the key",
                code="record-loss-flag-not-valid",
            )
    has_loss = {key: bool(value) != (key == MASKED) for key, value in given.items()}
    if len(set(has_loss.values())) > 1:
        shown = " and ".join(f"{key} {value!r}" for key, value in given.items())
        raise DataError(
            f"{name}: {shown} contradict each other",
            "each says whether the message has loss",
            "keep one of them",
            code="record-loss-flag-not-valid",
        )
    _refuse_unknown(message, name)
    flag = next(iter(has_loss.values()), None)
    if flag and message.get("role") != ASSISTANT:
        (key, *_) = given
        raise DataError(
            f"{name}: {key} asks for loss on a message of the role {message.get('role')}",
            "the model learns to write what the assistant says, and only reads the rest",
            "set it to false, or remove the key",
            code="record-loss-flag-not-valid",
        )
    return flag if message.get("role") == ASSISTANT else None


def words_of(key: str) -> frozenset[str]:
    """Return the words of a key: those of isTrainable and is_trainable are the same."""
    return frozenset(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower().replace("-", "_").split("_"))


def refuse_masks_of_turns(fields: Mapping[str, Any], used: Collection[str], num_messages: int) -> None:
    """Raise DataError if a key of a conversation's record that is not `used` says which answers are learnt.

    It is true, or a list of 0 and 1. Longer lists than that of the messages are masks of tokens.
    """
    for key, value in fields.items() if fields.get("input_ids") is None else ():
        words = words_of(key)
        is_list = _are_flags(value) and len(value) <= num_messages and words & (MASK_WORDS | {"weights"})
        if key not in used and (is_list or (value is True and words & {"loss", "mask", "masked"})):
            raise DataError(
                f"the record has {key} beside its messages",
                "it seems to say which answers have loss, and would be ignored",
                "give each message a flag: loss, true or false; for the last answer alone: --chat-loss last",
                code="record-key-not-supported",
            )


def are_masked_roles(mask: Any) -> bool:
    """Return True if `mask` beside a conversation names roles without loss, as NeMo writes it.

    Raises DataError if answers are among them, or questions are not. Values of other meanings: False.
    """
    given = mask if isinstance(mask, list) else [mask]
    named = [in_lower_case(one, KNOWN_SPEAKERS) for one in given]
    if not named or any(one not in KNOWN_SPEAKERS for one in named):
        return False
    roles = {SPEAKERS.get(one, one) for one in named}
    if "user" in roles and ASSISTANT not in roles:
        return True
    raise DataError(
        f"the record has mask {mask!r} beside its messages",
        "in NeMo's form these roles have no loss and all others have; mkd learns what the assistant writes",
        "remove mask; to choose among the answers, give each a flag: loss, true or false",
        code="record-key-not-supported",
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | int | float) and value in (0, 1)


def _are_flags(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_flag, value))


def _refuse_unknown(message: Mapping[str, Any], name: str) -> None:
    """Raise DataError if a message of the assistant's has a flag under a name that is not known."""
    for key, value in message.items() if message.get("role") == ASSISTANT else ():
        is_named_so = words_of(key) & FLAG_WORDS or key.lower() in LOSS_FLAGS
        if key not in LOSS_FLAGS and is_named_so and (_is_flag(value) or _are_flags(value)):
            raise DataError(
                f"{name}: {key} is {value!r}",
                "it seems to say whether the message has loss, and would be ignored",
                "call it loss (true: it is learnt, false: it is only read), or remove the key",
                code="record-loss-flag-not-valid",
            )


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
