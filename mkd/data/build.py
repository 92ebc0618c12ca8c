"""The data sets of a run, from its data flags: one process prepares the corpora, then all open them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mkd.config.split import parse_split
from mkd.data.aligned.teacher_pieces import longest_pack, teacher_pieces
from mkd.data.aligned.teacher_side import SharedSide, TeacherSide, TeacherText
from mkd.data.aligned.teacher_store import TeacherStore
from mkd.data.aligned.teacher_store_builder import cached_teacher_store, refused_documents
from mkd.data.dataset import BlendedDataset, PackedDataset
from mkd.data.encoding import useful_workers
from mkd.data.quarantine import collect, require_few
from mkd.data.sources import Blend, find_prefix, is_raw, parse_blend
from mkd.data.store import StoreFiles, TokenStore
from mkd.data.store_builder import build_store, cache_key
from mkd.data.teacher_input import SharedTokens
from mkd.errors import DataError, MkdError, UsageError
from mkd.tokenizers.tokenizer import Tokenizer

SCAN_LIMIT_TOKENS = 1 << 31  # larger corpora are checked pack by pack, as they are read


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
    cache_dir: str,  # folder for the tokens of raw files; all processes must see it
    document_multiple: int = 1,  # documents are padded to a multiple of it
    workers: int = 0,  # most processes that tokenise; 0: this one. Small files start none
    characters_per_sample: int | None = None,  # join text records to this many characters; default: no join
    max_bad_records: int = 0,  # bad records of a raw file that may be skipped
    quarantine: str | None = None,  # file that lists the skipped records; default: no file
    teachers: Sequence[TeacherText | SharedTokens] = (),  # one for every teacher that runs
    is_builder: bool = True,
    share: Callable[[Any], Any] = lambda value: value,
    progress: Callable[[], None] = lambda: None,
) -> tuple[BlendedDataset, BlendedDataset | None]:
    """Return the (training, validation) data sets; validation is None if it has no document.

    The process with `is_builder` tokenises raw files into `cache_dir`, once for every content, tokenizer and
    setting. Every process calls `share(value)` once; it waits for the builder and returns the builder's value
    (picklable), or raises its error. The builder calls `progress` often; it may raise.

    With `valid_data_path`, all of `data_path` is for training. For cross-tokenizer `teachers` the corpora are
    tokenised and aligned in the same way, and packs get their part. A record that one of them refuses is a
    bad record, and the student skips it too.
    """
    train, (train_end, valid_end) = parse_blend(data_path), parse_split(split or "1").ends
    valid = parse_blend(valid_data_path, "--valid-data-path") if valid_data_path else None
    train_end = 1.0 if valid else train_end
    paths = {"--valid-data-path": valid.paths if valid else (), "--data-path": train.paths}
    flags = {path: flag for flag, named in paths.items() for path in named}
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
    if (train_data := _open_blend(train, prepared, 0.0, train_end, open_packed)) is None:
        raise DataError(
            f"--split {split} leaves no document for training",
            do="give training a larger part, or more documents",
            code="split-leaves-no-training",
        )
    held_out = (valid, prepared, 0.0, 1.0) if valid else (train, prepared, train_end, valid_end)
    valid_data = _open_blend(*held_out, open_packed)
    if teachers:
        attach_teachers((train_data, valid_data), teachers, dict(prepared.values()), document_multiple)
    return train_data, valid_data


@dataclass(frozen=True)
class _Preparation:
    """The builder's work on every path, before the other processes may open it."""

    tokenizer: Tokenizer
    vocab_size: int
    append_eod: bool
    cache_dir: str
    workers: int
    characters_per_sample: int | None
    teachers: Sequence[TeacherText | SharedTokens]
    max_bad_records: int
    quarantine: str | None
    progress: Callable[[], None]

    def all_prefixes(self, flags: Mapping[str, str]) -> dict[str, tuple[str, dict[int, str]]]:
        """Return path -> (prefix of its tokenised corpus, cross-tokenizer teacher's number -> its prefix).

        `flags` maps each path to the flag that named it.
        """
        found = {path: self._prefixes(path, flag) for path, flag in flags.items()}
        if self.quarantine is not None:
            prefixes = [
                prefix
                for student, of_teachers in found.values()
                for prefix in (student, *of_teachers.values())
            ]
            collect([StoreFiles(prefix).quarantine for prefix in prefixes], Path(self.quarantine))
        return found

    def _prefixes(self, path: str, flag: str) -> tuple[str, dict[int, str]]:
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
        return student, {
            number: cached_teacher_store(path, student, text, **settings)
            for number, text in enumerate(self.teachers)
            if isinstance(text, TeacherText)
        }

    def _student_prefix(self, path: str, flag: str) -> str:
        """Return the prefix of the tokenised corpus of `path`, checked against the model.

        The corpus is tokenised unless it is cached.
        """
        prefix = self._cached(path, flag) if is_raw(path) else find_prefix(path, flag)
        store = TokenStore.open(prefix)
        require_vocabulary(store, self.tokenizer, f"{flag} {path}")
        if any(isinstance(text, TeacherText) for text in self.teachers) and not is_raw(path):
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
    """Raise DataError if the corpus, called `name`, is known to come from another tokenizer."""
    known = store.meta.get("vocabulary_fingerprint", tokenizer.vocabulary_fingerprint)
    if known != tokenizer.vocabulary_fingerprint:
        raise DataError(
            f"{name} was tokenised with another tokenizer",
            f"{store.prefix}.meta.json describes another vocabulary, so the ids mean other strings",
            "tokenise the raw files with this run's tokenizer: `mkd preprocess`",
            code="corpus-of-another-tokenizer",
        )


def require_text(store: TokenStore, name: str) -> None:
    """Raise DataError if the corpus, called `name`, holds conversations.

    No cross-tokenizer teacher can read them from tokens: they are in the student's chat template.
    """
    if "messages" in store.meta.get("kinds", ()):
        raise DataError(
            f"{name} is a tokenised corpus of conversations, and a teacher has another tokenizer",
            "the conversations are in the student's chat template, "
            "and this teacher was trained on another one",
            "name the raw file of the conversations instead: each model then reads them in its own template",
            code="corpus-of-conversations-for-teacher",
        )


def require_file(path: str, flag: str) -> None:
    """Raise DataError if `path` is not a file."""
    if not Path(path).is_file():
        raise DataError(
            f"{flag} {path}: nothing found",
            "looked for a file of this name",
            "check the path",
            code="data-path-not-found",
        )


def _prepare_once(prepare: Callable[[], Any], is_builder: bool, share: Callable[[Any], Any]) -> Any:
    """Return the builder's result of `prepare()`, or raise its error, in every process.

    Every error of the builder is shared, so that no process waits forever.
    """
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
    prepared: Mapping[str, tuple[str, Mapping[int, str]]],
    begin: float,
    end: float,
    open_packed: Callable[..., PackedDataset],
) -> BlendedDataset | None:
    """Return the documents [begin, end) of each corpus; None if there are none.

    The borders are fractions, rounded as Megatron does.
    """
    members, weights = [], []
    for path, weight in zip(blend.paths, blend.weights or [1.0] * len(blend.paths), strict=True):
        prefix, of_teachers = prepared[path]
        store = TokenStore.open(prefix)
        refused = {document for own in of_teachers.values() for document in refused_documents(own)}
        documents = (round(begin * len(store)), round(end * len(store)))
        if documents[0] < documents[1]:
            members.append(open_packed(store, documents=documents, left_out=sorted(refused)))
            weights.append(weight)
    if not members:
        return None
    return BlendedDataset(members, weights if blend.weights else None)


def attach_teachers(
    blends: Sequence[BlendedDataset | None],  # training and validation data of one run
    teachers: Sequence[TeacherText | SharedTokens],
    prefixes: Mapping[str, Mapping[int, str]],  # student's corpus -> teacher's number -> teacher's corpus
    document_multiple: int,
) -> None:
    """Give every data set its `teachers`; the packs of one teacher have the same length in all data sets.

    Raises UsageError if documents cannot be padded to the length of a teacher's packs.
    """
    members = [member for blend in blends if blend for member in blend.members]
    sides = []
    for number, text in enumerate(teachers):
        if isinstance(text, SharedTokens):
            sides.append([SharedSide(member.seq_length) for member in members])
            continue
        stores = [TeacherStore(prefixes[member.store.prefix][number], member.store) for member in members]
        pieces = [teacher_pieces(store, member.pieces) for store, member in zip(stores, members, strict=True)]
        needs = (
            longest_pack(member_pieces, member.packs, document_multiple)
            for member_pieces, member in zip(pieces, members, strict=True)
        )
        seq_length = text.seq_length or max(needs)
        _check_length(text, seq_length, document_multiple)
        parts = zip(stores, members, pieces, strict=True)
        sides.append(
            [TeacherSide(s, text, m.pieces, found, seq_length, document_multiple) for s, m, found in parts]
        )
    for member, member_sides in zip(members, zip(*sides, strict=True), strict=True):
        member.teachers = member_sides


def _check_length(text: TeacherText, seq_length: int, document_multiple: int) -> None:
    if seq_length % document_multiple:
        raise UsageError(
            f"xtoken.seq_length {seq_length} of {text.name} is not a multiple of {document_multiple}",
            "the layout of this run pads documents to it, and a pack is made of whole documents",
            f"use {-(-seq_length // document_multiple) * document_multiple}",
            code="xtoken-seq-length-not-divisible",
        )
