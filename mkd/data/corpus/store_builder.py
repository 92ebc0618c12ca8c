"""Build a tokenised corpus from raw files, for `mkd preprocess` and for the token cache."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from mkd.data.corpus.drafts import draft_name, remove_left_behind
from mkd.data.corpus.encoding import EncodedBatch, encode_files
from mkd.data.corpus.known_files import KnownFiles, sha256_of_file
from mkd.data.corpus.store import FORGETFUL, FORMAT_VERSION, PLACE, TAG, StoreFiles
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_table import ImageTableWriter
from mkd.data.progress_lines import ProgressLines, total_megabytes
from mkd.data.quarantine import Quarantine, first_of
from mkd.data.records.file_notes import file_notes
from mkd.data.records.ignored_keys import IgnoredKeys
from mkd.data.records.kinds import MESSAGES, PAIR
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.errors import DataError, ErrorList
from mkd.tokenizers.tokenizer import Tokenizer

F = TypeVar("F", bound=StoreFiles)
ENDS = ("end_of_turn", "eos")  # roles of tokens that end a turn or a text
LATER = ("notes", "numbers", "tags")
MOST_TAGS = 1000
RECORDS_VERSION = 6  # raise it when the same records become other tokens
KEY_VERSION = 4  # stays: runs that resume compare keys, and whether tokens are the same


@dataclass(frozen=True)
class StoreSummary:
    """The contents of a corpus, in numbers."""

    documents: int
    tokens: int
    loss_tokens: int  # labels that count: the first token of a document is never one
    max_token_id: int
    bad_records: int = 0  # records that were skipped
    kinds: tuple[str, ...] = ()  # kinds of the records
    trained_ends: tuple[int, ...] = ()  # which of EOS and the end of a turn have loss somewhere
    images: int = 0
    image_patches: int = 0
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # file -> what every start says of it
    numbers: tuple[str, ...] = ()  # keys of the records' numbers
    tags: tuple[str, ...] = ()  # of records, the first is "", that of no tag; (): tags were not read

    def described(self) -> dict[str, Any]:
        """Return the entries of the corpus's description; those of later versions only if there are some."""
        found = {key: value for key, value in asdict(self).items() if key not in LATER or value}
        return found if self.images else {k: v for k, v in found.items() if not k.startswith("image")}

    @property
    def has_conversations(self) -> bool:
        """True if records may be conversations."""
        return not {MESSAGES, PAIR}.isdisjoint(self.kinds)

    def note_lines(self) -> list[str]:
        """Return the notes, each with its file."""
        return [f"{path}: {note}" for path, notes in self.notes.items() for note in notes]


def build_store(
    inputs: Sequence[str],
    prefix: str,
    tokenizer: Tokenizer,
    append_eod: bool,
    workers: int = 0,
    key: str | None = None,
    max_bad_records: int = 0,
    progress: Callable[[], None] = lambda: None,
    images: ConversationImages | None = None,
    wanted: WantedRecords = ANY_RECORDS,
) -> StoreSummary:
    """Tokenise raw files into the corpus PREFIX, and replace an existing one.

    The bytes do not depend on `workers` (processes; 0: this one).

    The files get their names only when all are complete; the description, with `key` (see `cache_key`), comes
    last. Up to `max_bad_records` bad records are skipped and listed in PREFIX.quarantine.jsonl. Raises
    DataError for one more, or ErrorList with the first ten. `progress` is called for every batch of records,
    and may raise. The corpus keeps the `wanted` numbers and tags of the records.
    """
    inputs = [str(path) for path in inputs]
    files = StoreFiles(prefix)
    with replaced_when_complete(files) as partial:
        encoded = encode_files(inputs, tokenizer, append_eod, workers, progress, images, wanted)
        with closing(encoded) as batches:
            summary = _write_tokens(batches, inputs, partial, tokenizer, max_bad_records, wanted)
        if not summary.tokens:
            bad = first_of(partial.quarantine)
            skipped = f"{summary.bad_records} bad records were skipped, from these on"
            why = skipped if bad else "there is nothing to train on"
            empty = DataError(
                f"no tokens in {named_shortly(inputs)}", why, "check the input files", code="data-file-empty"
            )
            raise ErrorList([*bad, empty]) if bad else empty
        meta = {
            "format_version": FORMAT_VERSION,
            "cache_key": key,
            "records_version": RECORDS_VERSION,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "vocabulary_fingerprint": tokenizer.vocabulary_fingerprint,
            "append_eod": append_eod,
            "characters_per_sample": None,  # a former setting: runs that resume compare descriptions
            "loss_mask": partial.loss_mask.exists(),
            "sources": [{"path": path, "bytes": os.path.getsize(path)} for path in inputs],
            **summary.described(),
            **({} if wanted.tag is None else {"tag_key": wanted.tag}),
            **(tokenizer.chat_description if summary.has_conversations else {}),
            **({"image_processor_fingerprint": images.processor.fingerprint} if images else {}),
            "sha256": _content_hashes(partial, progress),
        }
        partial.meta.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return summary


def named_shortly(paths: Sequence[str]) -> str:
    """Return the names of files, of many only the first."""
    return ", ".join(paths) if len(paths) <= 3 else f"{paths[0]} and {len(paths) - 1} others"


def cache_key(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    append_eod: bool,
    progress: Callable[[], None] = lambda: None,
    known: KnownFiles = FORGETFUL,
    images: ConversationImages | None = None,
    wanted: WantedRecords = ANY_RECORDS,
) -> str:
    """Return the SHA-256 over the content of raw files, in order, and the settings that decide their corpus.

    The same in every version of mkd; a corpus says by which RECORDS_VERSION it was made. None stands where a
    former setting had its default.
    """
    settings = [KEY_VERSION, tokenizer.chat_fingerprint, append_eod, None]
    settings += images.settings if images else []
    settings += wanted.settings
    return known.content_hash(settings, paths, progress)


def _write_tokens(
    batches: Iterable[EncodedBatch],
    inputs: Sequence[str],
    files: StoreFiles,
    tokenizer: Tokenizer,
    max_bad_records: int,
    wanted: WantedRecords,
) -> StoreSummary:
    """Write .bin, .idx, numbers, tags and, unless it is all ones, the loss mask with places of records."""
    builder = IndexedDatasetBuilder(str(files.bin), dtype=DType.optimal_dtype(tokenizer.vocab_size))
    documents = tokens = loss_tokens = unpredicted = 0
    max_token_id, kinds, quarantine = -1, set(), Quarantine(files.quarantine, max_bad_records)
    ends: set[int] = set()
    images = ImageTableWriter(files.images, files.image_sources)
    ignored = defaultdict[str, IgnoredKeys](IgnoredKeys)
    lines = ProgressLines(f"tokenising {named_shortly(inputs)}", total_megabytes(inputs), "MB", "records")
    tags = TagNumbers()
    with builder.data_file, _opened(files) as (mask_file, place_file, number_file, tag_file):
        for batch in batches:
            quarantine.add(batch.errors)
            if quarantine.is_full:
                break
            stops = np.cumsum(batch.lengths)
            for start, stop in zip(stops - batch.lengths, stops, strict=True):
                builder.add_document(batch.ids[start:stop], [int(stop - start)])
            lines.at(batch.megabytes_read, batch.num_rows)
            mask_file.write(batch.loss.tobytes())
            place_file.write(places_of(batch, inputs).tobytes())
            number_file.write(batch.numbers.tobytes())
            tag_file.write(tags.of(batch.tags).tobytes())
            images.append(batch.images, batch.image_sources, documents)
            ignored[batch.path].add(batch.ignored)
            documents += len(stops)
            tokens += batch.ids.size
            kinds |= batch.kinds
            ends |= ends_with_loss(batch.ids, batch.loss, tokenizer)
            starts = (stops - batch.lengths)[batch.lengths > 0]
            loss_tokens += int(batch.loss.sum(dtype=np.int64)) - int(batch.loss[starts].sum(dtype=np.int64))
            unpredicted += int((batch.loss == 0).sum())
            max_token_id = max(max_token_id, int(batch.ids.max(initial=-1)))
    lines.end()
    quarantine.close()
    images.close()
    builder.finalize(str(files.idx))
    _remove_needless(files, bool(unpredicted), bool(wanted.numbers), wanted.tag is not None)
    notes = ((path, file_notes(path, keys, tokenizer, wanted.keys)) for path, keys in ignored.items() if path)
    return StoreSummary(
        documents,
        tokens,
        loss_tokens,
        max_token_id,
        bad_records=quarantine.count,
        kinds=tuple(sorted(kinds)),
        trained_ends=tuple(sorted(ends)),
        images=images.count,
        image_patches=images.patches,
        notes={path: said for path, said in notes if said},
        numbers=wanted.numbers,
        tags=() if wanted.tag is None else tuple(tags),
    )


@contextmanager
def _opened(files: StoreFiles) -> Iterator[tuple[IO[bytes], IO[bytes], IO[bytes], IO[bytes]]]:
    """Open the files of the loss mask, and of the records' places, numbers and tags for writing."""
    paths = (files.loss_mask, files.places, files.numbers, files.tags)
    with ExitStack() as stack:
        mask, places, numbers, tags = (stack.enter_context(path.open("wb")) for path in paths)
        yield mask, places, numbers, tags


def _content_hashes(files: StoreFiles, progress: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Return suffix -> SHA-256 of the content, for the files of a corpus."""
    paths = {
        path.name.removeprefix(Path(files.prefix).name): path
        for path in (
            *(files.bin, files.idx, files.loss_mask, files.images, files.image_sources),
            *(files.numbers, files.tags),
        )
    }
    return {end: sha256_of_file(path, progress) for end, path in paths.items() if path.exists()}


def _remove_needless(files: StoreFiles, has_mask: bool, has_numbers: bool, has_tags: bool) -> None:
    """Remove the files that hold nothing. Errors about masks, numbers and tags name places."""
    if not has_mask:
        files.loss_mask.unlink()
    if not has_numbers:
        files.numbers.unlink()
    if not has_tags:
        files.tags.unlink()
    if not (has_mask or has_numbers or has_tags):
        files.places.unlink()


class TagNumbers(dict[str, int]):
    """Tags of a corpus with their numbers. Number 0 is that of records without a tag."""

    def __init__(self) -> None:
        super().__init__({"": 0})

    def of(self, tags: Iterable[str]) -> np.ndarray:
        """Return the numbers of these tags, [n] of TAG. Raises DataError if there are too many."""
        numbers = [self.setdefault(tag, len(self)) for tag in tags]
        if len(self) > MOST_TAGS:
            what, why = f"the records have more than {MOST_TAGS} tags", "each has its own packs and metrics"
            raise DataError(what, why, "name a key with few values", code="record-value-not-valid")
        return np.array(numbers, dtype=TAG)


def ends_with_loss(ids: np.ndarray, loss: np.ndarray, tokenizer: Tokenizer) -> set[int]:
    """Return which of EOS and the end of a turn are among the ids, [tokens], whose loss is not 0."""
    ends = {tokenizer.roles[name] for name in ENDS if name in tokenizer.roles}
    trained = ids[loss != 0]
    return {one for one in ends if (trained == one).any()}


def places_of(batch: EncodedBatch, inputs: Sequence[str]) -> np.ndarray:
    """Return the places of a batch's documents, [documents] of PLACE."""
    places = np.empty(len(batch.lines), PLACE)
    places["source"], places["line"] = inputs.index(batch.path) if batch.path else 0, batch.lines
    return places


@contextmanager
def replaced_when_complete(files: F) -> Iterator[F]:
    """Give the block temporary file names; rename the files if it succeeds, remove them if it fails.

    The old description and index are removed first and the new ones come last. So readers never see parts of
    two corpora as one, nor a corpus without its mask. Drafts of killed builders are removed too.
    """
    partial = replace(files, prefix=draft_name(files.prefix))
    try:
        files.bin.parent.mkdir(parents=True, exist_ok=True)
        remove_left_behind(files.prefix)
        yield partial
        for path in reversed(files.in_order):
            path.unlink(missing_ok=True)
        for source, target in zip(partial.in_order, files.in_order, strict=True):
            if source.exists():
                source.replace(target)
    except OSError as error:
        raise DataError(
            f"{files.prefix}: the corpus cannot be written",
            str(error),
            "check free space and permissions of the folder",
            code="data-not-writable",
        ) from error
    finally:
        with suppress(OSError):  # the folder may not be there
            for path in partial.in_order:
                path.unlink(missing_ok=True)
