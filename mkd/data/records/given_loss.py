"""Records whose loss the user gives: segments of rendered text, and token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mkd.data.records.values import check_string, json_name
from mkd.errors import DataError

Segments = tuple[tuple[str, bool], ...]  # (text, whether it has loss), in order
Tokens = tuple[tuple[int, ...], tuple[int, ...]]  # ids, and 1 for each that has loss

IGNORED_LABEL = -100  # of transformers and PyTorch: no loss
LARGEST_ID = 2**31 - 1
SEGMENT_KEYS = ("text", "loss", "label")  # `label` is axolotl's name


def are_segments(value: Any) -> bool:
    """Return True if `value` looks like segments. Transcripts of speech have another key `segments`."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and "text" in first and ("loss" in first or "label" in first)


def are_tokens(value: Any) -> bool:
    """Return True if `value` looks like tokens. In other files, `tokens` is the number of a text's tokens."""
    return isinstance(value, Mapping)


def read_segments(value: Any) -> tuple[Segments]:
    """Return the segments of a record. Raises DataError for anything else."""
    if not isinstance(value, list) or not value:
        raise _not_valid(
            f"segments is {'an empty list' if value == [] else 'a ' + json_name(value)}",
            "it is a list of texts, each with its loss",
            'write {"segments": [{"text": "...", "loss": false}, {"text": "...", "loss": true}]}',
        )
    return (tuple(_segment(one, f"segment {number}") for number, one in enumerate(value, 1)),)


def read_tokens(value: Any) -> tuple[Tokens]:
    """Return the ids and the loss of {"ids": [...], "loss": [...]}. Raises DataError for anything else."""
    if not isinstance(value, Mapping):
        do = 'write {"tokens": {"ids": [...], "loss": [...]}}'
        raise _not_valid(f"tokens is a {json_name(value)}", "it is an object of ids and their loss", do)
    absent = next((key for key in ("ids", "loss") if value.get(key) is None), None)
    if absent is not None:
        do = f"add {absent}, or remove the record"
        raise _not_valid(f"tokens has no {absent}", "it needs ids, and a loss for each", do)
    return read_masked_ids(value["ids"], value["loss"], "tokens: ids", "tokens: loss")


def read_masked_ids(
    ids: Any, mask: Any, ids_name: str = "input_ids", name: str = "the mask"
) -> tuple[Tokens]:
    """Return ids with a mask of 0 and 1, or false and true. Raises DataError for anything else."""
    known = _numbers(ids, ids_name)
    loss = _numbers(mask, name, booleans=True)
    _check_lengths(known, loss, ids_name, name)
    wrong = next((place for place, one in enumerate(loss) if one not in (0, 1)), None)
    if wrong is not None:
        what = f"{name}: {loss[wrong]} at token {wrong + 1}"
        raise _not_valid(what, "a token has loss (1) or none (0)", "round it, or remove the record")
    return ((known, tuple(map(int, loss))),)


def read_both_masks(ids: Any, completion: Any, assistant: Any) -> tuple[Tokens]:
    """Return ids with loss where both masks are 1. Raises DataError for anything else.

    TRL writes both masks for conversations of prompt and completion with `assistant_only_loss`. Its
    `DataCollatorForLanguageModeling.torch_call` (trl/trainer/sft_trainer.py) sets a label to -100 where the
    one mask is 0, and then where the other is.
    """
    ((known, completed),) = read_masked_ids(ids, completion, name="completion_mask")
    ((_, answered),) = read_masked_ids(ids, assistant, name="assistant_masks")
    return ((known, tuple(one & other for one, other in zip(completed, answered, strict=True))),)


def read_labelled_ids(ids: Any, labels: Any) -> tuple[Tokens]:
    """Return ids with labels, which are the same ids or -100. Raises DataError for anything else.

    Labels that are moved by one token, as some programs write them, are refused.
    """
    known, given = _numbers(ids, "input_ids"), _numbers(labels, "labels", least=IGNORED_LABEL)
    _check_lengths(known, given, "input_ids", "labels")
    pairs = enumerate(zip(known, given, strict=True), 1)
    wrong = next((place for place, (i, label) in pairs if label not in (i, IGNORED_LABEL)), None)
    if wrong is not None:
        what = f"labels has {given[wrong - 1]} at token {wrong}, and input_ids {known[wrong - 1]}"
        why = "a label is the id at its own place, or -100: mkd moves labels by one token itself"
        raise _not_valid(what, why, "write labels that are not moved")
    return ((known, tuple(int(label != IGNORED_LABEL) for label in given)),)


def other_segment_keys(values: Sequence[Any]) -> Iterator[str]:
    """Yield the keys of segments that nothing reads, as keys of their record, each once."""
    segments = values[0] if isinstance(values[0], list) else ()
    found = {key: None for one in segments if isinstance(one, Mapping) for key in one}
    return (f"segments.{key}" for key in found if key not in SEGMENT_KEYS)


def _segment(value: Any, name: str) -> tuple[str, bool]:
    if not isinstance(value, Mapping):
        do = 'write {"text": "...", "loss": true}'
        raise _not_valid(f"{name} is a {json_name(value)}", "a segment is a text with its loss", do)
    check_string(value.get("text"), f"{name}: text")
    given = {key: value[key] for key in ("loss", "label") if value.get(key) is not None}
    if len(given) != 1:
        what = f"{name} has {' and '.join(given) or 'no loss'}"
        raise _not_valid(what, "each segment says whether it has loss", "give `loss`, true or false")
    ((key, loss),) = given.items()
    if not isinstance(loss, bool | int | float) or loss not in (0, 1):
        what = f"{name}: {key} is {loss!r}"
        raise _not_valid(what, "a segment has loss (true) or none (false)", "split the segment, or round it")
    return value["text"], bool(loss)


def _numbers(value: Any, name: str, booleans: bool = False, least: int = 0) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _not_valid(f"{name} is a {json_name(value)}", "it is a list of numbers", "write a list")
    for place, one in enumerate(value, 1):
        is_flag = booleans and isinstance(one, bool | float) and one in (0, 1)
        if not is_flag and (isinstance(one, bool) or not isinstance(one, int)):
            what = f"{name}: a {json_name(one)} at token {place}"
            raise _not_valid(what, "it is a list of whole numbers", "repair or remove the record")
        if not least <= one <= LARGEST_ID:
            what = f"{name}: {one} at token {place}"
            raise _not_valid(what, "no tokenizer has such an id", "repair or remove the record")
    return tuple(value)


def _check_lengths(ids: tuple[Any, ...], loss: tuple[Any, ...], ids_name: str, name: str) -> None:
    if len(ids) != len(loss):
        what = f"{ids_name} has {len(ids)} numbers, and {name} {len(loss)}"
        raise _not_valid(what, "each token needs one of both", "repair or remove the record")


def _not_valid(what: str, why: str, do: str) -> DataError:
    return DataError(what, why, do, code="record-value-not-valid")
