"""Settings that decide the packs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mkd.data.corpus.known_files import sha256_of_file
from mkd.data.corpus.store import TokenStore

WINDOW_PIECES = 1 << 21  # of a large data set, packed together: 10 s and 500 MB


@dataclass(frozen=True)
class PackSettings:
    """Settings that, with the documents, decide the packs."""

    seq_length: int
    pack: str = "bfd"
    overlong: str = "split"
    document_multiple: int = 1  # documents are padded to a multiple of it
    documents: tuple[int, int] | None = None  # [first, last) of the corpus; None: all
    left_out: tuple[int, ...] = ()  # documents to skip, ascending
    overlong_conversations: str | None = None  # of OVERLONG_CONVERSATIONS; None: as `overlong` says
    window_pieces: int = WINDOW_PIECES  # most pieces that are packed together
    max_patches: int | None = None  # of images in a pack, for each model; None: no limit
    by_tag: bool = False  # a pack holds documents of one tag
    teacher_images: tuple[str, ...] = ()  # files of the images of teachers with image processors of their own

    @property
    def identity(self) -> dict[str, Any]:
        """Settings for the key of a file of packs; without later settings it is that of earlier versions."""
        values = asdict(self)
        teachers = [sha256_of_file(path) for path in values.pop("teacher_images")]
        if not self.by_tag:
            del values["by_tag"]
        if self.overlong_conversations is None:
            del values["overlong_conversations"]
        if self.max_patches is None:
            del values["max_patches"]
        elif teachers:
            values["teacher_images"] = teachers
        return values

    def document_range(self, store: TokenStore) -> tuple[int, int]:
        return self.documents or (0, len(store))
