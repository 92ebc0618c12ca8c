"""From the data flags to the data sets of a run; one process prepares, all open the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mkd.config.split import parse_split
from mkd.data.aligned.attach_teachers import attach_teachers
from mkd.data.aligned.teacher_store_builder import cached_teacher_store, refused_documents
from mkd.data.aligned.teacher_text import TeacherText
from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.encoding import useful_workers
from mkd.data.quarantine import collect, require_few
from mkd.data.sources import Blend, find_prefix, is_raw, parse_blend
from mkd.data.store import StoreFiles, TokenStore
from mkd.data.store_builder import build_store, cache_key
from mkd.errors import DataError, MkdError
from mkd.tokenizers.tokenizer import Tokenizer

SCAN_LIMIT_TOKENS = 1 << 31  # larger corpora are only checked pack by pack, as they are read


def open_datasets(
    *,
    data_path: Sequence[str],
    valid_data_path: Sequence[str] | None = None,
    split: str | None = None,
    tokenizer: Tokenizer,
    seq_length: int,  # tokens of a pack
    vocab_size: int,  # token ids that every model of the run knows
    pack: str = "bfd",
    overlong: str = "split",
    append_eod: bool = True,
    cache_dir: str,  # for raw files as tokens; all processes must see it
    document_multiple: int = 1,  # documents are padded to a multiple of it
    workers: int = 0,  # processes that may tokenise; 0: this one does. Small files are not worth the start of others
    characters_per_sample: int
    | None = None,  # text records are joined until they have so many; None: each is a document
    max_bad_records: int = 0,  # of a raw file, that may be left out
    quarantine: str
    | None = None,  # file that lists what was left out of this run's corpora; None: none is written
    teachers: Sequence[
        TeacherText | None
    ] = (),  # one for every teacher, None for one that reads the student's tokens
    is_builder: bool = True,
    share: Callable[[Any], Any] = lambda value: value,
    progress: Callable[[], None] = lambda: None,
) -> tuple[BlendedDataset, BlendedDataset | None]:
    """(training, validation) data sets; validation is None when neither the flags nor the split give it a document.

    Raw files are tokenised into `cache_dir`, once for every content, tokenizer and setting, by the process with
    `is_builder`. `share(value)` is called once by every process, waits for the builder and returns the builder's value
    (picklable): an error of the builder is raised by all. The builder calls `progress` often; it may raise. With
    `valid_data_path` all of `data_path` is for training. For `teachers` with a tokenizer of their own the corpora are
    tokenised and aligned likewise, and packs have their part; a record that one of them refuses is a bad record, which the
    student does not train on either.
    """
    train, valid = parse_blend(data_path), None
    train_end, valid_end = parse_split(split or "1").ends
    if valid_data_path:
        valid, train_end = parse_blend(valid_data_path, "--valid-data-path"), 1.0
    flags = dict.fromkeys(valid.paths if valid else (), "--valid-data-path") | dict.fromkeys(
        train.paths, "--data-path"
    )
    text = (tokenizer, vocab_size, append_eod, cache_dir, workers, characters_per_sample)
    preparation = _Preparation(*text, teachers, max_bad_records, quarantine, progress)
    prepared = _prepare_once(partial(preparation.all_prefixes, flags), is_builder, share)
    open_packed = partial(
        PackedDataset,
        seq_length=seq_length,
        vocab_size=vocab_size,
        pad_id=tokenizer.pad_id,
        pack=pack,
        overlong=overlong,
        document_multiple=document_multiple,
    )
    train_data = _open_blend(train, prepared, 0.0, train_end, open_packed)
    if train_data is None:
        raise DataError(
            f"--split {split} leaves no document for training",
            f"{' '.join(train.paths)} has too few documents",
            "give training a larger part",
            code="split-leaves-no-training",
        )
    begin, end = (0.0, 1.0) if valid else (train_end, valid_end)
    valid_data = _open_blend(valid or train, prepared, begin, end, open_packed)
    if teachers:
        attach_teachers((train_data, valid_data), teachers, dict(prepared.values()), document_multiple)
    return train_data, valid_data


@dataclass(frozen=True)
class _Preparation:
    """What the builder does with every path before the others may open it."""

    tokenizer: Tokenizer
    vocab_size: int
    append_eod: bool
    cache_dir: str
    workers: int
    characters_per_sample: int | None
    teachers: Sequence[TeacherText | None]
    max_bad_records: int
    quarantine: str | None
    progress: Callable[[], None]

    def all_prefixes(self, flags: Mapping[str, str]) -> dict[str, tuple[str, list[str | None]]]:
        """Path -> (prefix of its tokenised corpus, prefixes of the same in the tokens of each teacher that has its own).

        `flags` says which flag named each path.
        """
        found = {path: self._prefixes(path, flag) for path, flag in flags.items()}
        if self.quarantine is not None:
            prefixes = [
                prefix
                for student, of_teachers in found.values()
                for prefix in (student, *of_teachers)
                if prefix
            ]
            collect([StoreFiles(prefix).quarantine for prefix in prefixes], Path(self.quarantine))
        return found

    def _prefixes(self, path: str, flag: str) -> tuple[str, list[str | None]]:
        student = self._student_prefix(path, flag)
        settings = dict(
            tokenizer=self.tokenizer,
            append_eod=self.append_eod,
            characters_per_sample=self.characters_per_sample,
            cache_dir=self.cache_dir,
            workers=self._workers(path if is_raw(path) else StoreFiles(student).bin),
            max_bad_records=self.max_bad_records,
            progress=self.progress,
        )
        return student, [
            text and cached_teacher_store(path, student, text, **settings) for text in self.teachers
        ]

    def _student_prefix(self, path: str, flag: str) -> str:
        """Prefix of the tokenised corpus of `path`, tokenised now unless the cache has it, and checked against the model."""
        prefix = self._cached(path, flag) if is_raw(path) else find_prefix(path, flag)
        store = TokenStore.open(prefix)
        require_vocabulary(store, self.tokenizer, f"{flag} {path}")
        if any(self.teachers) and not is_raw(path):
            require_text(store, f"{flag} {path}")
        if store.num_tokens <= SCAN_LIMIT_TOKENS:
            if not is_raw(path):
                store.check_content(self.progress)
            store.check_token_range(self.vocab_size)
        return prefix

    def _cached(self, path: str, flag: str) -> str:
        require_file(path, flag)
        key = cache_key(path, self.tokenizer, self.append_eod, self.characters_per_sample, self.progress)
        prefix = str(Path(self.cache_dir) / f"{Path(path).stem}-{key[:16]}")
        if not _is_complete(prefix, key, self.progress):
            build_store(
                [path],
                prefix,
                self.tokenizer,
                self.append_eod,
                self._workers(path),
                key,
                self.characters_per_sample,
                self.max_bad_records,
                self.progress,
            )
        require_few(
            StoreFiles(prefix).quarantine, TokenStore.open(prefix).meta["bad_records"], self.max_bad_records
        )
        return prefix

    def _workers(self, path: str | Path) -> int:
        return useful_workers(Path(path).stat().st_size, self.workers)


def _is_complete(prefix: str, key: str, progress: Callable[[], None]) -> bool:
    try:
        store = TokenStore.open(prefix)
        store.check_content(progress)
        return store.meta.get("cache_key") == key
    except DataError:
        return False


def require_vocabulary(store: TokenStore, tokenizer: Tokenizer, name: str) -> None:
    """Raises DataError, which calls the corpus `name`, where its ids are known to be those of another tokenizer."""
    known = store.meta.get("vocabulary_fingerprint", tokenizer.vocabulary_fingerprint)
    if known != tokenizer.vocabulary_fingerprint:
        raise DataError(
            f"{name} was tokenised with another tokenizer",
            f"{store.prefix}.meta.json describes another vocabulary, so the ids stand for other strings",
            "tokenise the raw files with this run's tokenizer: tools/preprocess_data.py",
            code="corpus-of-another-tokenizer",
        )


def require_text(store: TokenStore, name: str) -> None:
    """Raises DataError, which calls the corpus `name`, where a teacher with its own tokens cannot read what it holds."""
    if "messages" in store.meta.get("kinds", ()):
        raise DataError(
            f"{name} is a tokenised corpus of conversations, and a teacher has tokens of its own",
            "they are in the student's chat template, which is not what this teacher was trained on",
            "name the raw file of the conversations instead: each model then reads them in its own template",
            code="corpus-of-conversations-for-teacher",
        )


def require_file(path: str, flag: str) -> None:
    """Raises DataError where there is no file of that name."""
    if not Path(path).is_file():
        raise DataError(
            f"{flag} {path}: nothing found",
            "looked for a file of this name",
            "check the path",
            code="data-path-not-found",
        )


def _prepare_once(prepare: Callable[[], Any], is_builder: bool, share: Callable[[Any], Any]) -> Any:
    """The builder's result of `prepare()`, or its error, in every process: whatever goes wrong, nobody waits for ever."""
    outcome = cause = None
    if is_builder:
        try:
            outcome = prepare()
        except MkdError as error:
            outcome = error
        except Exception as error:
            outcome, cause = (
                DataError(
                    f"preparing the data failed: {type(error).__name__}: {error}",
                    code="data-preparation-failed",
                ),
                error,
            )
    outcome = share(outcome)
    if isinstance(outcome, MkdError):
        outcome.on_all_ranks = True
        raise outcome from cause
    return outcome


def _open_blend(
    blend: Blend,
    prepared: Mapping[str, tuple[str, list[str | None]]],
    begin: float,
    end: float,
    open_packed: Callable[..., PackedDataset],
) -> BlendedDataset | None:
    """The documents [begin, end) (fractions, rounded as Megatron does) of each corpus; None if that is not a document."""
    members, weights = [], []
    for path, weight in zip(blend.paths, blend.weights or [1.0] * len(blend.paths), strict=True):
        prefix, of_teachers = prepared[path]
        store, refused = (
            TokenStore.open(prefix),
            {i for own in of_teachers if own for i in refused_documents(own)},
        )
        documents = (round(begin * len(store)), round(end * len(store)))
        if documents[0] < documents[1]:
            members.append(open_packed(store, documents=documents, left_out=sorted(refused)))
            weights.append(weight)
    if not members:
        return None
    return BlendedDataset(members, weights if blend.weights else None)
