"""The data sets of a run, from the paths of its data flags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mkd.config.data_files import Blend, is_raw, parse_blend
from mkd.config.split import parse_split
from mkd.config.tag_rules import TagRules
from mkd.data.aligned.teacher_pieces import TeacherPieces, teacher_pieces_file
from mkd.data.aligned.teacher_side import SharedSide, TeacherSide, TeacherText, check_teacher_length
from mkd.data.aligned.teacher_store import TeacherStore, image_tables
from mkd.data.aligned.teacher_store_builder import cached_teacher_store, refused_documents
from mkd.data.corpus.cached_corpus import cached_corpus
from mkd.data.corpus.documents import require_numbers, require_pairs, require_pairs_fit, require_records
from mkd.data.corpus.encoding import useful_workers
from mkd.data.corpus.known_files import KnownFiles
from mkd.data.corpus.sources import find_prefix, require_image_processor, require_text, require_vocabulary
from mkd.data.corpus.store import StoreFiles, TokenStore
from mkd.data.dataset import BlendedDataset, PackedDataset, require_contexts
from mkd.data.files.named_files import named_files
from mkd.data.files.opened import text_bytes
from mkd.data.images.conversation import ConversationImages
from mkd.data.packing.array_file import ArrayFile
from mkd.data.packing.kept_documents import left_out_records
from mkd.data.packing.pack_index import PackIndex, is_small, pack_into_file
from mkd.data.packing.pack_settings import PackSettings
from mkd.data.quarantine import collect, list_left_out
from mkd.data.records.file_notes import log_notes
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.data.tags import CorpusTags, TaggedDocuments, tags_of_run
from mkd.data.teacher_input import SharedTokens
from mkd.errors import DataError, MkdError
from mkd.tokenizers.tokenizer import Tokenizer

LOG = logging.getLogger("mkd")
BYTES_OF_IMAGES = 100  # a record with images takes as long to tokenise as one of so many times its bytes
SCAN_LIMIT_TOKENS = 1 << 31  # larger corpora are checked pack by pack, as they are read


@dataclass(frozen=True)
class _Member:
    """A corpus of a data set, as the builder leaves it to all processes."""

    prefix: str
    weight: float
    packing: PackSettings
    packs: ArrayFile | None  # None: a small one, which every process packs
    teachers: Mapping[int, tuple[str, ArrayFile | None]]  # number -> its corpus, and its side of the packs
    tags: CorpusTags | None = None


@dataclass(frozen=True)
class DataBuilder:
    """Makes data sets: one process tokenises, aligns and packs the corpora, then all processes open them."""

    tokenizer: Tokenizer
    vocab_size: int  # token ids that every model of the run knows
    packing: PackSettings
    cache_dir: str  # folder for the tokens of raw files; all processes must see it
    append_eod: bool = True
    workers: int = 0  # most processes that tokenise; 0: this one. Small files start none
    max_bad_records: int = 0  # bad records of a raw file that may be skipped
    quarantine: str | None = None  # file that lists the skipped records; None: no file
    teachers: Sequence[TeacherText | SharedTokens] = ()  # one for every teacher that runs
    images: ConversationImages | None = None  # reads the images of conversations; None: there may be none
    records: WantedRecords = ANY_RECORDS  # what the loss reads of them
    tags: TagRules | None = None  # the teachers of each tag; None: tags do not matter
    progress: Callable[[], None] = lambda: None  # called often by the process that builds; it may raise

    @cached_property
    def known(self) -> KnownFiles:
        """Facts about files, kept from earlier runs."""
        return KnownFiles(self.cache_dir)

    def open(
        self,
        data_path: Sequence[str],
        valid_data_path: Sequence[str] | None = None,
        split: str | None = None,
        is_builder: bool = True,
        share: Callable[[Any], Any] = lambda value: value,
    ) -> tuple[BlendedDataset, BlendedDataset | None]:
        """Return the (training, validation) data sets; validation is None if it has no document.

        The process with `is_builder` tokenises raw files into `cache_dir`, unless they are there. Every
        process calls `share(value)` once; it waits for the builder and returns the builder's value
        (picklable), or raises its error.

        With `valid_data_path`, all of `data_path` is for training. For cross-tokenizer `teachers` the corpora
        are tokenised and aligned in the same way, and packs get their part. A record that one refuses is a
        bad one.
        """
        train, valid, parts = _parts(data_path, valid_data_path, split)
        prepared = _prepare_once(partial(self._members, train, valid, parts), is_builder, share)
        if not prepared[0]:
            raise _no_training_documents(split)
        train_data, valid_data = _open(prepared, [one[0].weights is not None for one in parts], self)
        assert train_data is not None
        return train_data, valid_data

    def _members(
        self, train: Blend, valid: Blend | None, parts: Sequence[tuple[Blend, float, float]]
    ) -> list[list[_Member]]:
        """Return the corpora of each data set, tokenised and packed.

        A data set has the documents [begin, end) of each corpus of its blend; corpora without any are left
        out. The borders are fractions, rounded as Megatron does.
        """
        paths = {"--valid-data-path": valid.paths if valid else (), "--data-path": train.paths}
        # Before any is packed: packs leave out the documents that some teacher refuses.
        prefixes = self._all_prefixes({path: flag for flag, named in paths.items() for path in named})
        found: list[list[tuple[TaggedDocuments, float]]] = []
        for blend, begin, end in parts:
            found.append([])
            for path, weight in zip(blend.paths, blend.weights or [1.0] * len(blend.paths), strict=True):
                store = TokenStore(prefixes[path][0])
                file_tag = None if self.tags is None else self.tags.files.get(path)
                documents = _documents_between(store, begin, end)
                if documents[0] < documents[1]:
                    found[-1].append((TaggedDocuments(store, documents, path, file_tag), weight))
        names = None
        if self.tags is not None:  # before any is packed, too: a tag may have no teacher
            names = tags_of_run(self.tags, (part for of_blend in found for part, _ in of_blend))
        return [
            [self._member(part, prefixes[part.path][1], weight, names) for part, weight in of_blend]
            for of_blend in found
        ]

    def _member(
        self, part: TaggedDocuments, teachers: Mapping[int, str], weight: float, tags: Sequence[str] | None
    ) -> _Member:
        store, documents = part.store, part.documents
        own_tags = None if tags is None else part.numbered(tags)
        refused = {document for prefix in teachers.values() for document in refused_documents(prefix)}
        here = sorted(document for document in refused if documents[0] <= document < documents[1])
        tables = image_tables(teachers.values())
        if store.documents_per_record > 1:
            packing = self.packing
            require_pairs_fit(
                store, packing.seq_length, packing.document_multiple, packing.overlong, documents
            )
        packing = replace(self.packing, documents=documents, left_out=tuple(here), teacher_images=tables)
        packing = replace(packing, by_tag=tags is not None)
        if not store.has_loss_mask:  # no conversation, so the rule for them changes nothing
            packing = replace(packing, overlong_conversations=None)
        if is_small(store, packing):
            self._list_left_out(store, packing)
            nothing = {n: (one, None) for n, one in teachers.items()}
            return _Member(store.prefix, weight, packing, None, nothing, own_tags)
        packs = pack_into_file(store, packing, self.cache_dir, self.known, self.workers, self.progress)
        index = PackIndex.in_file(packs)
        if index.dropped is None or index.dropped.has_whole_ones:  # to find them takes as long as to pack
            self._list_left_out(store, packing)
        sides = {
            number: (prefix, self._side(store, prefix, index, packing)) for number, prefix in teachers.items()
        }
        return _Member(store.prefix, weight, packing, packs, sides, own_tags)

    def _side(self, store: TokenStore, prefix: str, index: PackIndex, packing: PackSettings) -> ArrayFile:
        """Return the packs in the tokens of the teacher whose corpus is at `prefix`."""
        teacher, multiple = TeacherStore(prefix, store), packing.document_multiple
        return teacher_pieces_file(teacher, index, multiple, self.cache_dir, self.known, self.progress)

    def _list_left_out(self, store: TokenStore, packing: PackSettings) -> None:
        if self.quarantine is not None:
            list_left_out(left_out_records(store, packing, self.progress), Path(self.quarantine))

    def _all_prefixes(self, flags: Mapping[str, str]) -> dict[str, tuple[str, dict[int, str]]]:
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
            # Writes the list anew, so it runs before `_list_left_out` adds what the packs leave out.
            collect([StoreFiles(prefix).quarantine for prefix in prefixes], Path(self.quarantine))
        return found

    def _prefixes(self, path: str, flag: str) -> tuple[str, dict[int, str]]:
        named = named_files(path, flag) if is_raw(path) else None
        if named is not None and named.describe():
            LOG.info(named.describe())
        files = () if named is None else named.local(self.progress)
        settings: dict[str, Any] = dict(
            tokenizer=self.tokenizer,
            images=self.images,
            append_eod=self.append_eod,
            cache_dir=self.cache_dir,
            max_bad_records=self.max_bad_records,
            wanted=self.records,
            known=self.known,
            progress=self.progress,
        )
        if named is None:
            student = find_prefix(path, flag)
            settings["workers"] = self._workers(StoreFiles(student).bin.stat().st_size)
        else:
            settings["workers"] = self._workers(text_bytes(files))
            student = cached_corpus(files, named.cache_name, **settings)
        self._check(student, path, flag)  # first: a teacher's corpus is aligned with it
        file_tag = "" if self.tags is None else self.tags.files.get(path, "")
        return student, {
            number: cached_teacher_store(path, files, student, text, file_tag=file_tag, **settings)
            for number, text in enumerate(self.teachers)
            if isinstance(text, TeacherText)
        }

    def _check(self, prefix: str, path: str, flag: str) -> None:
        """Check the tokenised corpus of `path` against the models, and log the notes in its description."""
        store = TokenStore(prefix)
        log_notes(store.meta, path if is_raw(path) else None)
        store.check_layout(self.known, self.progress)  # first: other reads trust the layout
        # From the description alone, so that a wrong corpus is refused before all its tokens are read.
        require_vocabulary(store, self.tokenizer, f"{flag} {path}")
        require_pairs(store.meta.get("kinds", ()), self.records.pairs, f"{flag} {path}")
        require_numbers(store, self.records, f"{flag} {path}")
        require_image_processor(store, self.images, f"{flag} {path}")
        if any(isinstance(text, TeacherText) for text in self.teachers) and not is_raw(path):
            require_records(self.records, f"{flag} {path}")
            require_text(store, f"{flag} {path}")
        if store.num_tokens <= SCAN_LIMIT_TOKENS:
            if not is_raw(path):  # `cached_corpus` has checked or written the tokens of raw files
                store.check_content(self.known, self.progress)
            store.check_token_range(self.vocab_size, self.known, self.progress)

    def _workers(self, num_bytes: int) -> int:
        return useful_workers(num_bytes * (BYTES_OF_IMAGES if self.images else 1), self.workers)


def _parts(
    data_path: Sequence[str], valid_data_path: Sequence[str] | None, split: str | None
) -> tuple[Blend, Blend | None, list[tuple[Blend, float, float]]]:
    """Return both blends, and (blend, begin, end) of the training and the held-out documents as fractions."""
    train, (train_end, valid_end) = parse_blend(data_path), parse_split(split or "1").ends
    if not valid_data_path:
        return train, None, [(train, 0.0, train_end), (train, train_end, valid_end)]
    valid = parse_blend(valid_data_path, "--valid-data-path")
    return train, valid, [(train, 0.0, 1.0), (valid, 0.0, 1.0)]


def _no_training_documents(split: str | None) -> DataError:
    what, do = f"--split {split} leaves no document for training", "give training a larger part"
    return DataError(what, do=f"{do}, or more documents", code="split-leaves-nothing")


def _open(
    prepared: Sequence[Sequence[_Member]],  # of each data set
    is_weighted: Sequence[bool],
    builder: DataBuilder,  # of any process
) -> list[BlendedDataset | None]:
    """Return the data sets, None for one without a corpus."""
    members = [member for of_data_set in prepared for member in of_data_set]
    datasets, vocab_size = [], builder.vocab_size
    pad_id = builder.tokenizer.padding_id(vocab_size)
    known = dict(vocab_size=vocab_size, pad_id=pad_id, images=builder.images)
    for member in members:
        index = PackIndex.in_file(member.packs) if member.packs else None
        settings = asdict(member.packing) | {"index": index, "tags": member.tags} | known
        datasets.append(PackedDataset(TokenStore(member.prefix), **settings))
    # Training and held-out sets together: the packs of a teacher have one length in all of them.
    _attach_teachers(datasets, members, builder.teachers)
    for dataset in datasets:
        dataset.taught = tuple(_taught(text, dataset, builder.tags) for text in builder.teachers)
    opened, found = iter(datasets), []
    for of_data_set, weighted in zip(prepared, is_weighted, strict=True):
        weights = [member.weight for member in of_data_set] if weighted else None
        own = [next(opened) for _ in of_data_set]
        found.append(BlendedDataset(own, weights) if own else None)
        require_contexts(own)
    return found


def _documents_between(store: TokenStore, begin: float, end: float) -> tuple[int, int]:
    """Return [first, last) of the documents between two fractions of a corpus, records whole."""
    together = store.documents_per_record
    first, last = (together * round(border * (len(store) // together)) for border in (begin, end))
    return first, last


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


def _attach_teachers(
    datasets: Sequence[PackedDataset],  # the members of all data sets of one run
    members: Sequence[_Member],
    teachers: Sequence[TeacherText | SharedTokens],
) -> None:
    """Give every data set its `teachers`; the packs of one teacher have the same length in all data sets.

    Raises UsageError if documents cannot be padded to the length of a teacher's packs.
    """
    document_multiple = members[0].packing.document_multiple
    sides: list[list[TeacherSide] | list[SharedSide]] = []
    for number, text in enumerate(teachers):
        if isinstance(text, SharedTokens):
            sides.append([SharedSide(dataset.seq_length) for dataset in datasets])
            continue
        found = []
        for dataset, member in zip(datasets, members, strict=True):
            prefix, file = member.teachers[number]
            store = TeacherStore(prefix, dataset.store)
            found.append(
                (store, TeacherPieces.in_file(file))
                if file
                else (store, TeacherPieces.in_memory(store, dataset.index, document_multiple))
            )
        needed = max(pieces.pack_length(document_multiple) for _, pieces in found)
        seq_length = text.seq_length or max(needed, text.least_seq_length)
        check_teacher_length(text, seq_length, document_multiple)
        sides.append(
            [TeacherSide(store, text, pieces, seq_length, document_multiple) for store, pieces in found]
        )
    for dataset, dataset_sides in zip(datasets, zip(*sides, strict=True), strict=bool(sides)):
        dataset.teachers = dataset_sides


def _taught(
    text: TeacherText | SharedTokens, dataset: PackedDataset, rules: TagRules | None
) -> frozenset[int] | None:
    """Return the tags of a teacher with its own tokens; None: it reads all packs, or the student's tokens."""
    if rules is None or isinstance(text, SharedTokens):
        return None
    return rules.numbers_of(text.name, dataset.tag_names)
