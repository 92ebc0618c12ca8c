"""Hints for files of other formats: how their keys become those of mkd."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_QUESTIONS = {
    ("instruction", "output"): '([.instruction, .input // ""] | map(select(. != "")) | join("\\n"))',
    ("instruction", "response"): ".instruction",
    ("question", "answer"): ".question",
    ("query", "response"): ".query",
    ("prompt", "response"): ".prompt",
    ("input", "output"): ".input",
}
"""The question's and the answer's key in formats of one turn -> the question in jq's language."""
_OTHERS = {
    ("input", "preferred_output", "non_preferred_output"): (
        "{prompt: .input.messages, tools: .input.tools, "
        "chosen: .preferred_output, rejected: .non_preferred_output}"
    ),
    ("chosen", "rejected"): "{prompt: .chosen[:-1], chosen: .chosen[-1:], rejected: .rejected[-1:]}",
    ("content",): "{text: .content}",
}
"""Keys of other formats -> the jq program that turns their records into those of mkd."""
_SYSTEM = '[.system // "" | select(. != "") | {role: "system", content: .}]'
_HISTORY = '[(.history // [])[] | {role: "user", content: .[0]}, {role: "assistant", content: .[1]}]'
_TABLE = (
    'python -c "import json, sys, pyarrow.parquet as p; '
    '[print(json.dumps(r)) for r in p.read_table(sys.argv[1]).to_pylist()]" FILE.parquet > FILE.jsonl'
)


def format_hint(keys: Collection[str], is_table: bool = False) -> str | None:
    """Return how a file of records with these keys is converted, None for an unknown format."""
    if "input_ids" in keys:
        do = "add labels (-100: no loss), completion_mask or assistant_masks beside input_ids"
        return f"{do}, or give the text that the ids come from, or the tokens as .bin/.idx of Megatron"
    programs = [program for known, program in _OTHERS.items() if set(known) <= set(keys)]
    programs += [_turns(known, keys) for known in _QUESTIONS if set(known) <= set(keys)]
    if not programs:
        return None
    convert = f"jq -c '{programs[0]}' FILE.jsonl > NEW.jsonl"
    return f"write it as lines first: {_TABLE}; then {convert}" if is_table else f"convert it: {convert}"


def shape_hint(fields: Mapping[str, Any]) -> str | None:
    """Return how a record of unknown keys is converted, by its one value that is records, turns or a text."""
    programs = []
    for key, value in fields.items():
        is_list = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
        if is_list and all({"role", "from"} & one.keys() for one in value):
            programs.append(f"{{messages: .{key}}} + del(.{key})")
        elif is_list:
            programs.append(f".{key}[]")
        elif isinstance(value, str) and len(fields) == 1:
            programs.append(f"{{text: .{key}}}")
    names_fit = all(key.isidentifier() for key in fields)  # else jq needs quotes
    return (
        f"convert it: jq -c '{programs[0]}' FILE.jsonl > NEW.jsonl"
        if len(programs) == 1 and names_fit
        else None
    )


def _turns(known: tuple[str, str], keys: Collection[str]) -> str:
    """Return the program for records with the `known` keys, and maybe a system text and earlier turns."""
    last = f'[{{role: "user", content: {_QUESTIONS[known]}}}, {{role: "assistant", content: .{known[1]}}}]'
    before = [part for key, part in (("system", _SYSTEM), ("history", _HISTORY)) if key in keys]
    return f"{{messages: ({' + '.join([*before, last])})}}" if before else f"{{messages: {last}}}"


PAIR_HINT = format_hint(("chosen", "rejected"))
