"""The tokens that end the texts of the training data: exports tell generation to stop there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mkd.checkpoint.hf.hf_changes import CONFIG_FILE, GENERATION_FILE, StopIds, listed_ids
from mkd.config.schema import Config
from mkd.data.sources import find_prefix, is_raw, parse_blend
from mkd.data.store import TokenStore
from mkd.rollout.stop_ids import named
from mkd.run.preflight import CONVERSATIONS, LOOKED_AT, Tokenizers, kinds_of_records


def trained_ends(config: Config, tokenizers: Tokenizers | None) -> tuple[int, ...]:
    """Return the end of a turn, if there are conversations, and EOS, if there are other texts.

    The first records of each corpus of --data-path tell.
    """
    if tokenizers is None or not config.data.data_path:
        return ()
    roles, found = tokenizers.student.roles, set()
    for path in parse_blend(config.data.data_path, "--data-path").paths:
        found |= _ends(path, config, roles.get("end_of_turn"), roles.get("eos"))
    ends = (roles.get("end_of_turn"), roles.get("eos"))
    return tuple(dict.fromkeys(one for one in ends if one is not None and one in found))


def _ends(path: str, config: Config, turn: int | None, eos: int | None) -> set[int | None]:
    """Return which of the two tokens end texts of a corpus."""
    if is_raw(path):
        kinds = kinds_of_records("--data-path", path, config.data.max_bad_records)
        has_texts = bool(kinds - CONVERSATIONS) and config.data.append_eod
        return ({turn} if kinds & CONVERSATIONS else set()) | ({eos} if has_texts else set())
    store = TokenStore(find_prefix(path, "--data-path"))
    found: set[int | None] = set()
    for document in range(min(LOOKED_AT, len(store))):
        ids, mask = store.document(document)
        found |= {turn, eos} & set(ids[mask == 1].tolist())
    return found


def stop_notes(
    config: Config, tokenizers: Tokenizers | None, assets: Path, ends: tuple[int, ...]
) -> Iterator[str]:
    """Yield a note if exports stop at tokens at which the student's own files do not."""
    path = next((assets / one for one in (GENERATION_FILE, CONFIG_FILE) if (assets / one).is_file()), None)
    if path is None or tokenizers is None or not (config.checkpoint.save or config.checkpoint.export_hf):
        return
    old = json.loads(path.read_text(encoding="utf-8"))
    new = StopIds(ends).added_to(old) if ends else old
    if listed_ids(new) != listed_ids(old):
        added = named([one for one in ends if one not in listed_ids(old)], tokenizers.student)
        yield (
            f"note: the training texts end with {added}, at which {path} does not stop: exports have "
            f"eos_token_id {list(listed_ids(new))}"
        )
