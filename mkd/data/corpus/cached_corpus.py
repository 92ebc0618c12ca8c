"""The tokenised corpus of raw files in a run's cache folder: found by their content, or made now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mkd.data.corpus.known_files import KnownFiles
from mkd.data.corpus.store import StoreFiles, TokenStore
from mkd.data.corpus.store_builder import RECORDS_VERSION, build_store, cache_key
from mkd.data.images.conversation import ConversationImages
from mkd.data.quarantine import require_few
from mkd.data.records.wanted import WantedRecords
from mkd.errors import DataError
from mkd.tokenizers.tokenizer import Tokenizer


def cached_corpus(
    files: Sequence[str],
    name: str,  # beginning of the corpus's name
    *,
    tokenizer: Tokenizer,
    images: ConversationImages | None,
    append_eod: bool,
    cache_dir: str,
    workers: int,
    max_bad_records: int,
    wanted: WantedRecords,
    known: KnownFiles,
    progress: Callable[[], None],
) -> str:
    """Return the prefix of the corpus of `files`, in their order.

    They are tokenised unless the cache has them with this content, tokenizer and settings. For the arguments
    and errors see `build_store`.
    """
    key = cache_key(files, tokenizer, append_eod, progress, known, images, wanted)
    prefix = str(Path(cache_dir) / f"{name}-{key[:16]}")
    if not _is_complete(prefix, key, known, progress):
        build_store(
            files, prefix, tokenizer, append_eod, workers, key, max_bad_records, progress, images, wanted
        )
        # `build_store` has hashed the files; without this, the next start would read them again.
        for end, digest in TokenStore(prefix).meta["sha256"].items():
            known.keep(prefix + end, "sha256", digest)
    require_few(StoreFiles(prefix).quarantine, max_bad_records)
    return prefix


def _is_complete(prefix: str, key: str, known: KnownFiles, progress: Callable[[], None]) -> bool:
    try:
        store = TokenStore(prefix)
        store.check_content(known, progress)
        has_places = StoreFiles(prefix).places.exists() or not store.has_loss_mask
        is_of_today = store.meta.get("records_version") == RECORDS_VERSION
        return store.meta.get("cache_key") == key and is_of_today and has_places
    except DataError:
        return False
