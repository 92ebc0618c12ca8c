"""The summary line of a teacher equals a count over all packs."""

from __future__ import annotations

import numpy as np

from mkd.data.dataset import SUMMARISED_PACKS
from mkd.data.teacher_input import SharedTokens
from tests.data.pairs import open_pair, teacher_text, texts


def test_a_line_for_each_teacher_with_tokens_of_its_own(write_jsonl, tmp_path):
    path = write_jsonl("texts.jsonl", *({"text": text} for text in texts(20)))
    dataset, _ = open_pair(path, tmp_path, SharedTokens(), teacher_text(name="qwen", seq_length=128))
    packs = [dataset[i] for i in range(len(dataset))]
    parts = [pack.teacher_inputs[1] for pack in packs]
    kinds = np.bincount(np.concatenate([part.chunks.kinds for part in parts]), minlength=4)
    tokens = sum(part.lengths.sum() for part in parts)
    share = sum(part.chunks.student_counts.sum() for part in parts) / sum(
        pack.loss_mask.sum() for pack in packs
    )
    _, line = dataset.describe()
    count = len(packs)
    assert count <= SUMMARISED_PACKS
    assert line.startswith(f"  qwen: packs of 128 tokens; in {count} of {count} packs {tokens} tokens, ")
    assert f"fill {tokens / count / 128:.3f}, chunks " in line
    assert (
        f"1-1 {kinds[0]}, 1-N {kinds[1]}, M-1 {kinds[2]}, M-N {kinds[3]}, "
        f"share of loss tokens in chunks {share:.3f}" in line
    )


def test_large_data_sets_are_sampled(write_jsonl, tmp_path):
    path = write_jsonl("texts.jsonl", *({"text": text} for text in texts(100)))
    dataset, _ = open_pair(path, tmp_path, teacher_text(), pack="none")
    assert len(dataset) > 100 and f"in 64 of {len(dataset)} packs" in dataset.describe()[1]
