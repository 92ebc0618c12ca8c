"""Top-1 agreement by hand; the other sums are compared with the dense reference in test_fused.py."""

from __future__ import annotations

import torch

from mkd.xtoken import chunk_torch_passes
from mkd.xtoken.loss_call import LossCall
from mkd.xtoken.slices import ChunkSlice
from mkd.xtoken.teacher_metrics import slice_metrics
from tests.losses.objectives import chunk_settings_of
from tests.xtoken.chunk_cases import chunk_batch, random_case, relation_of, vocabulary_of


def test_first_choices_agree_only_on_common_tokens():
    relation, settings = relation_of(35, 42, 20), chunk_settings_of()
    case = random_case((1, 0, 0, 0), (37, 48, 45), relation)
    call = LossCall(vocabulary_of(case, {}, 0, 1)[0], settings, chunk_torch_passes, None)
    piece = ChunkSlice.of(chunk_batch(relation, (5, 0, 0, 0), seed=0)[0], range(5), call.vocabulary)
    common = call.common.nonzero().squeeze(1)
    other = (call.student_real & call.teacher_real[:48] & ~call.common).nonzero().squeeze(1)[0]
    student, teacher = torch.zeros(5, 48), torch.zeros(5, 48)
    columns = (
        (common[0], common[0]),
        (common[0], common[1]),
        (other, other),
        (other, common[0]),
        (common[2], common[2]),
    )
    for row, (ours, theirs) in enumerate(columns):
        student[row, ours] = teacher[row, theirs] = 1.0
    counts = torch.tensor([True, True, True, True, False])  # the last one would agree, and has no weight
    metrics = slice_metrics(student, teacher, counts, piece, call)
    assert metrics["top1_agreement"] == 1
    assert metrics["num_one_to_one"] == metrics["num_chunks"] == metrics["num_teacher_tokens"] == 4
