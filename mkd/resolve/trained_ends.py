"""The tokens that end the texts of the training data: exports tell generation to stop there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mkd.checkpoint.hf.hf_changes import CONFIG_FILE, GENERATION_FILE, StopIds, listed_ids
from mkd.config.data_files import is_raw, parse_blend
from mkd.config.schema import Config
from mkd.data.corpus.sources import find_prefix
from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import ENDS, ends_with_loss
from mkd.data.dataset import BlendedDataset
from mkd.data.first_records import CONVERSATIONS, LOOKED_AT, WITHOUT_EOS, kinds_of_records
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.resolve.preflight import Tokenizers


def trained_ends(
    config: Config, tokenizers: Tokenizers | None, wanted: WantedRecords = ANY_RECORDS
) -> tuple[int, ...]:
    """Return the end of a turn, if there are conversations, and EOS, if there are other texts.

    Only the first records of files that are not tokenised yet are read; `ends_of_stores` knows them all.
    """
    if tokenizers is None or not config.data.data_path:
        return ()
    found: set[int] = set()
    for path in parse_blend(config.data.data_path, "--data-path").paths:
        if is_raw(path):
            found |= _ends_of_records(path, config, tokenizers, wanted)
        else:
            found |= _ends_of_store(TokenStore(find_prefix(path, "--data-path")), tokenizers)
    return _in_order(found, tokenizers)


def ends_of_stores(train_set: BlendedDataset, tokenizers: Tokenizers) -> tuple[int, ...]:
    """Return the ends of tokenised corpora, from their descriptions, which cover all records."""
    ends = (_ends_of_store(member.store, tokenizers) for member in train_set.members)
    return _in_order(set().union(*ends), tokenizers)


def _in_order(found: set[int], tokenizers: Tokenizers) -> tuple[int, ...]:
    roles = tokenizers.student.roles
    ends = [roles[name] for name in ENDS if name in roles]
    return tuple(dict.fromkeys(one for one in ends if one in found))


def _ends_of_records(path: str, config: Config, tokenizers: Tokenizers, wanted: WantedRecords) -> set[int]:
    kinds = kinds_of_records("--data-path", path, config.data.max_bad_records, wanted)
    roles = tokenizers.student.roles
    has_texts = bool(kinds - WITHOUT_EOS) and config.data.append_eod
    names = ["end_of_turn"] * bool(kinds & CONVERSATIONS) + ["eos"] * has_texts
    return {roles[name] for name in names if name in roles}


def _ends_of_store(store: TokenStore, tokenizers: Tokenizers) -> set[int]:
    """Return which of the two tokens have loss, in the first documents if other programs wrote the corpus."""
    if "trained_ends" in store.meta:
        return set(store.meta["trained_ends"])
    found: set[int] = set()
    for document in range(min(LOOKED_AT, len(store))):
        found |= ends_with_loss(*store.document(document), tokenizers.student)
    return found


def stop_notes(
    config: Config, tokenizers: Tokenizers | None, assets: Path, ends: tuple[int, ...]
) -> Iterator[str]:
    """Yield a note if exports stop at tokens at which the student's own files do not."""
    path = next((assets / one for one in (GENERATION_FILE, CONFIG_FILE) if (assets / one).is_file()), None)
    if path is None or tokenizers is None or not config.checkpoint.keeps_weights:
        return
    old = json.loads(path.read_text(encoding="utf-8"))
    new = StopIds(ends).added_to(old) if ends else old
    if listed_ids(new) != listed_ids(old):
        added = tokenizers.student.named([one for one in ends if one not in listed_ids(old)])
        yield (
            f"note: the training texts end with {added}, which {path} does not list as eos_token_id. Exports "
            f"list {list(listed_ids(new))} there, so that generation stops"
        )
