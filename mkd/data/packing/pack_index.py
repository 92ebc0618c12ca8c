"""The packs of a data set: made in memory if it is small, else read from a file that all processes share.

A large data set is packed in windows of documents, so that memory does not grow with it, in several
processes. Each window has many packs: packing them apart costs less than 0.1 % of the places.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from mkd.data.corpus.encoding import in_workers
from mkd.data.corpus.known_files import KnownFiles
from mkd.data.corpus.store import StoreFiles, TokenStore
from mkd.data.packing.array_file import ArrayFile, ArrayFileWriter
from mkd.data.packing.best_fit import pack_pieces
from mkd.data.packing.cutting import Pieces, cut_documents, padded_lengths
from mkd.data.packing.kept_documents import DocumentKeeper, Dropped
from mkd.data.packing.pack_settings import WINDOW_PIECES, PackSettings
from mkd.data.progress_lines import ProgressLines
from mkd.errors import DataError

LOG = logging.getLogger("mkd")
VERSION = 1  # raise it when the same documents become other packs
SMALL_PIECES = 1 << 16  # a data set with no more is packed by every process: 50 ms, and no file
WINDOWS_PER_WORKER = 4  # so many are worth the start of another process
WHOLE = "whole"  # fact about a file: it has the content that was written
BLOCK_PACKS = 1 << 16  # most packs that are read at a time


@dataclass(frozen=True)
class PackedWindow:
    """The packs of consecutive documents: records as PackIndex has them, stops counted from the first one."""

    pieces: np.ndarray  # in the order of the packs
    packs: np.ndarray
    dropped: Dropped


class PackIndex:
    """The pieces of every pack. Picklable: a file is mapped again."""

    def __init__(
        self, pieces: np.ndarray, packs: np.ndarray, totals: dict[str, int], file: ArrayFile | None = None
    ):
        self._pieces, self._packs, self._totals, self.file = pieces, packs, totals, file
        self.key = file.key if file else ""
        self.num_tokens = totals["tokens"]
        self.num_loss_tokens = totals["loss_tokens"]
        self.num_windows = totals["windows"]
        names = {one.name for one in fields(Dropped)}
        is_counted = names <= totals.keys()  # files of earlier versions are not
        self.dropped = Dropped(**{name: totals[name] for name in names}) if is_counted else None
        self.num_pieces = len(pieces)

    @classmethod
    def in_file(cls, file: ArrayFile) -> PackIndex:
        return cls(file.arrays["pieces"], file.arrays["packs"], file.values, file)

    def __reduce__(self) -> tuple[Callable[..., PackIndex], tuple[object, ...]]:
        if self.file is not None:
            return PackIndex.in_file, (self.file,)
        return PackIndex, (self._pieces, self._packs, self._totals)

    def __len__(self) -> int:
        return len(self._packs)

    def piece_range(self, pack: int) -> tuple[int, int]:
        """Return [first, last) of the numbers of a pack's pieces."""
        return int(self._packs["stop"][pack - 1]) if pack else 0, int(self._packs["stop"][pack])

    def longest_piece(self) -> int:
        """Return the tokens of the longest piece."""
        blocks = range(0, self.num_pieces, BLOCK_PACKS)
        return max((int(self._pieces["length"][one : one + BLOCK_PACKS].max()) for one in blocks), default=0)

    def pieces(self, first: int, last: int) -> Pieces:
        """Return the pieces [first, last), counted over all packs."""
        part = self._pieces[first:last]
        return Pieces(*(part[field].astype(np.int64) for field in part.dtype.names))

    def pieces_of(self, pack: int) -> Pieces:
        """Return the pieces of a pack, in the order of the corpus."""
        return self.pieces(*self.piece_range(pack))

    def first_documents(self) -> np.ndarray:
        """Return the document of each pack's first piece, int64 [packs]."""
        firsts = np.concatenate([np.zeros(1, np.int64), self._packs["stop"][:-1]])
        return self._pieces["document"][firsts].astype(np.int64)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first piece, stops of the packs, int64 [n]) for consecutive packs of some million pieces."""
        first = piece = 0
        while first < len(self):
            stops = self._packs["stop"][first : first + BLOCK_PACKS].astype(np.int64)
            count = max(1, int(np.searchsorted(stops, piece + WINDOW_PIECES, side="right")))
            yield piece, stops[:count]
            first, piece = first + count, int(stops[count - 1])

    def loss_tokens(self, pack: int) -> int:
        """Return the loss tokens of a pack."""
        return int(self._packs["loss_tokens"][pack])


@dataclass(frozen=True)
class Windows:
    """The ranges of documents that are packed together; picklable, for workers."""

    store: TokenStore
    settings: PackSettings

    def __iter__(self) -> Iterator[tuple[int, int]]:
        first, end = self.settings.document_range(self.store)
        most, together = self.settings.window_pieces, self.store.documents_per_record
        while first < end:
            last = min(first + most, end)
            lengths = self.store.lengths_between(first, last)
            if self.settings.overlong != "split":
                lengths = np.minimum(lengths, self.settings.seq_length)
            pieces = np.cumsum(-(-lengths // self.settings.seq_length))
            last = first + max(1, int(np.searchsorted(pieces, most, side="right")) // together) * together
            yield first, min(last, end)
            first = last


@dataclass(frozen=True)
class WindowPacker:
    """Packs the documents of one window; picklable, for workers."""

    store: TokenStore
    settings: PackSettings

    def __call__(self, window: tuple[int, int]) -> PackedWindow:
        store, settings, together = self.store, self.settings, self.store.documents_per_record
        keeper = DocumentKeeper(store, settings)
        kept, room = keeper.kept(*window), keeper.room
        pieces = cut_documents(kept.lengths, window[0], settings.seq_length, starts=kept.starts)
        starts = store.starts(pieces.document) + pieces.offset + 1
        loss_tokens = store.count_loss(starts, pieces.num_labels)
        # Skip pieces without loss: they would cost a forward and a backward pass for nothing.
        pieces, loss_tokens = pieces.select(loss_tokens > 0), loss_tokens[loss_tokens > 0]
        spans = padded_lengths(pieces.length, settings.document_multiple)
        taken = room.taken_by(pieces, spans)
        tags = store.tags_of(pieces.document) if settings.by_tag else None
        packs = pack_pieces(taken, settings.seq_length, settings.pack, together, tags)
        kinds = self.kinds()
        found = PackedWindow(
            pieces=np.empty(len(pieces), kinds["pieces"]),
            packs=np.empty(len(packs), kinds["packs"]),
            dropped=kept.dropped,
        )
        for name in found.pieces.dtype.names:
            found.pieces[name] = getattr(pieces, name)[packs.piece_ids]
        if len(packs):
            found.packs["stop"] = packs.offsets[1:]
            found.packs["loss_tokens"] = np.add.reduceat(loss_tokens[packs.piece_ids], packs.offsets[:-1])
        return found

    def kinds(self) -> dict[str, np.dtype]:
        """Return the types of a piece and of a pack, with the smallest integers that hold all values."""
        document, in_document = (np.min_scalar_type(n) for n in (len(self.store), self.store.num_tokens))
        in_pack = np.min_scalar_type(self.settings.seq_length)
        piece = [
            ("document", document),
            ("offset", in_document),
            ("length", in_pack),
            ("num_labels", in_pack),
        ]
        return {"pieces": np.dtype(piece), "packs": np.dtype([("stop", np.int64), ("loss_tokens", in_pack)])}


def is_small(store: TokenStore, settings: PackSettings) -> bool:
    """Return True if every process packs the documents itself: there is no file."""
    first, last = settings.document_range(store)
    tokens = int(store.starts(last) - store.starts(first))
    return last - first + tokens // settings.seq_length <= SMALL_PIECES


def pack_in_memory(store: TokenStore, settings: PackSettings) -> PackIndex:
    """Return the packs of a data set. Raises DataError if no token of it has loss."""
    packer, totals = WindowPacker(store, settings), Totals()
    windows = [totals.add(packer(window)) for window in Windows(store, settings)]
    pieces, packs = (
        np.concatenate([np.empty(0, kind), *(getattr(window, name) for window in windows)])
        for name, kind in packer.kinds().items()
    )
    return PackIndex(pieces, packs, totals.checked(store, settings))


def pack_into_file(
    store: TokenStore,
    settings: PackSettings,
    cache_dir: str,
    known: KnownFiles,
    workers: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> ArrayFile:
    """Return the file with the packs of a data set; write it unless the cache has it.

    The file depends on lengths and mask of the documents and on the settings alone. `workers` are the most
    processes that pack (0: this one). `progress` is called for every window, and may raise. Raises DataError
    if no token has loss, or the file cannot be written.
    """
    files = StoreFiles(store.prefix)
    contents = [path for path in (files.idx, files.loss_mask, files.images) if path.exists()]
    contents += [files.tags] if settings.by_tag and files.tags.exists() else []
    identity = settings.identity | ({"together": 2} if store.documents_per_record > 1 else {})
    key = known.content_hash([VERSION, identity], contents, progress)
    path = Path(cache_dir) / f"{Path(store.prefix).name}-packs-{key[:16]}.bin"
    if (found := open_whole(path, key, known, progress)) is not None:
        return found
    windows = list(Windows(store, settings))
    packer, totals = WindowPacker(store, settings), Totals()
    workers = min(workers, len(windows) // WINDOWS_PER_WORKER)
    lines = ProgressLines(f"packing {store.name}", len(windows), "parts")
    with (
        ArrayFileWriter(path, key, packer.kinds()) as writer,
        closing(in_workers(windows, packer, workers if workers > 1 else 0, progress)) as packed,
    ):
        for window in map(totals.add, packed):
            writer.append("packs", window.packs)
            writer.append("pieces", window.pieces)
            lines.step()
        writer.finish(totals.checked(store, settings), progress)
    lines.end()
    known.keep(path, WHOLE, True)
    return ArrayFile(path, key)


def open_whole(
    path: Path, key: str, known: KnownFiles, progress: Callable[[], None] = lambda: None
) -> ArrayFile | None:
    """Return the file, or None if it has to be written: missing, damaged or outdated. Logs the last two."""
    if not path.exists():
        return None
    try:
        file = ArrayFile(path, key)
        if known.fact(path, WHOLE, lambda: file.is_whole(progress)):
            return file
        why = "its SHA-256 is not the one recorded when it was written"
    except DataError as error:
        why = error.why
    LOG.warning(f"{path} is written again: {why}")
    return None


@dataclass
class Totals:
    """Sums over the windows of a data set."""

    pieces: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    windows: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: asdict(Dropped()))

    def add(self, window: PackedWindow) -> PackedWindow:
        """Count the window, and return it with stops that count from the first window's first piece."""
        window.packs["stop"] += self.pieces
        self.pieces += len(window.pieces)
        self.tokens += int(window.pieces["length"].sum(dtype=np.int64))
        self.loss_tokens += int(window.packs["loss_tokens"].sum(dtype=np.int64))
        self.windows += 1
        for name, number in asdict(window.dropped).items():
            self.dropped[name] += number
        return window

    def checked(self, store: TokenStore, settings: PackSettings) -> dict[str, int]:
        """Return the sums. Raises DataError if no token has loss."""
        if not self.loss_tokens:
            raise _no_loss_tokens(store, settings, Dropped(**self.dropped))
        sums = asdict(self)
        return sums | sums.pop("dropped")


def _no_loss_tokens(store: TokenStore, settings: PackSettings, dropped: Dropped) -> DataError:
    first, last = settings.document_range(store)
    if dropped.conversations:
        longest = int(store.lengths_between(first, last).max())
        return DataError(
            f"{store.name}: nothing is left to learn from, because {dropped.conversations} of {last - first} "
            f"documents are conversations longer than --seq-length {settings.seq_length}",
            "they are left out: their later pieces would be answers without the question",
            f"raise --seq-length (the longest document has {longest} tokens), or keep the end of each: "
            "--overlong-conversations truncate-left",
            code="longer-than-seq-length",
        )
    why = f"all tokens of its {last - first} documents that could be labels are masked"
    if str(dropped):
        why += f", or the documents have no room in a pack: {dropped}"
    return DataError(
        f"{store.prefix}: no loss tokens",
        why,
        "check that conversations have assistant turns, completions are not empty, "
        "and texts are longer than one token; raise a limit that is too small",
        code="corpus-without-loss-tokens",
    )
