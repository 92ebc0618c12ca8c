"""The data sets of a run get the teachers that read them in tokens of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mkd.data.aligned.teacher_pieces import longest_pack, teacher_pieces
from mkd.data.aligned.teacher_side import TeacherSide
from mkd.data.aligned.teacher_store import TeacherStore
from mkd.data.aligned.teacher_text import TeacherText
from mkd.data.dataset import BlendedDataset
from mkd.errors import UsageError


def attach_teachers(
    blends: Sequence[BlendedDataset | None],  # of one run: training, validation
    teachers: Sequence[TeacherText | None],
    prefixes: Mapping[str, Sequence[str | None]],  # of a student's corpus -> of the corpora of the teachers
    document_multiple: int,
) -> None:
    """Give all data sets their `teachers`; the packs of one teacher have the same length in all of them.

    Raises UsageError for a length that documents cannot be padded to.
    """
    members = [member for blend in blends if blend for member in blend.members]
    sides = []
    for number, text in enumerate(teachers):
        if text is None:
            sides.append([None] * len(members))
            continue
        stores = [TeacherStore(prefixes[member.store.prefix][number], member.store) for member in members]
        pieces = [teacher_pieces(store, member.pieces) for store, member in zip(stores, members, strict=True)]
        needs = (
            longest_pack(own, member.packs, document_multiple)
            for own, member in zip(pieces, members, strict=True)
        )
        seq_length = text.seq_length or max(needs)
        _check_length(text, seq_length, document_multiple)
        parts = zip(stores, members, pieces, strict=True)
        sides.append(
            [TeacherSide(s, text, m.pieces, own, seq_length, document_multiple) for s, m, own in parts]
        )
    for member, own_sides in zip(members, zip(*sides, strict=True), strict=True):
        member.teachers = own_sides


def _check_length(text: TeacherText, seq_length: int, document_multiple: int) -> None:
    if seq_length % document_multiple:
        raise UsageError(
            f"xtoken.seq_length {seq_length} of {text.name} is not a multiple of {document_multiple}",
            "the layout of this run pads documents to it, and a pack is made of whole documents",
            f"use {-(-seq_length // document_multiple) * document_multiple}",
            code="xtoken-seq-length-not-divisible",
        )
