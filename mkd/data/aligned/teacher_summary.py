"""What packs hold for the teachers that read them in tokens of their own, in a line for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mkd.data.aligned.teacher_batch import TeacherPack
from mkd.data.aligned.teacher_side import TeacherSide
from mkd.data.batch import Pack

KIND_NAMES = ("1-1", "1-N", "M-1", "M-N")


def summarise_teacher(
    side: TeacherSide,
    packs: Sequence[Pack],  # of a data set of `num_packs`
    parts: Sequence[TeacherPack],  # the same in the teacher's tokens
    needed: int,  # teacher tokens of their pieces, those that found no room included
    num_packs: int,
) -> str:
    """Sizes and proportions; loss tokens are in no chunk where a chunk has a token without loss, where it lacks a predictor
    on one of the sides, or where the teacher's pack has no room."""
    tokens = sum(int(part.lengths.sum()) for part in parts)
    kinds = np.bincount(
        np.concatenate([part.chunks.kinds for part in parts]), minlength=len(KIND_NAMES)
    ).tolist()
    covered = sum(int(part.chunks.student_counts.sum()) for part in parts)
    loss_tokens = sum(np.count_nonzero(pack.loss_mask) for pack in packs)
    chunks = ", ".join(f"{name} {count}" for name, count in zip(KIND_NAMES, kinds, strict=True))
    return (
        f"  {side.text.name}: packs of {side.seq_length} tokens; in {len(packs)} of {num_packs} packs {tokens} tokens,"
        f" fill {tokens / (len(packs) * side.seq_length):.3f}, chunks {chunks},"
        f" share of loss tokens in chunks {covered / max(loss_tokens, 1):.3f},"
        f" share of teacher tokens without room {1 - tokens / max(needed, 1):.3f}"
    )
