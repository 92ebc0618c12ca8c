"""Check weights of teachers if one has another tokenizer; test_objective.py covers the student's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.train.cross_tokenizer_invariance import SELECT, SINGLE, build, make_files
from tests.train.test_objective import Recorded, logits_of

SAME_ROWS, CROSS_ROWS = 352, 460
SHARES, TEMPERATURE = (2 / 3, 1 / 3), 2.0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("weights"))
    settings = json.loads((folder / "partition_kl.yaml").read_text())
    del settings["teachers"][0]["weight"]
    (folder / "equal.yaml").write_text(json.dumps(settings))
    return folder


def record_weights(flags, files, name):
    """Return values of each micro-batch's `Recorded`, its aligned chunks and weights [2, 1], and the heads.

    Heads come in the order of the ids. The first pack has no chunk, so that the cross-tokenizer teacher is
    compared on nothing there.
    """
    from safetensors.torch import load_file

    from tests.train.dense_teachers import record

    engine, _, batches, _ = build(SINGLE.with_flags(flags), files, name)
    batches[0] = without_chunks(batches[0])
    recorded, heads, _, _, weights = record(engine, batches)
    shards = [load_file(path) for path in (files / "cross").glob("*.safetensors")]
    (cross,) = (
        shard["model.embed_tokens.weight"] for shard in shards if "model.embed_tokens.weight" in shard
    )
    return recorded, [batch.teacher_inputs[0].chunks for batch in batches], weights, (cross, heads[2])


def without_chunks(batch):
    from mkd.data.aligned.teacher_batch import PackChunks, TeacherPack, collate_teacher

    own = batch.teacher_inputs[0]
    spans = own.cu_seqlens.diff().numpy(), own.cu_seqlens_padded.diff().numpy()
    pack = TeacherPack(own.tokens[0].numpy(), own.tokens[0].numpy(), *spans, PackChunks.empty())
    part = collate_teacher([pack], batch.labels[0].numpy())
    return replace(batch, teacher_inputs=(part, *batch.teacher_inputs[1:]))


def metric_of(name, logits, labels):
    """Return a metric of each row, [n] float64."""
    log_p = logits.log_softmax(1)
    if name == "ce":
        return -log_p.gather(1, labels[:, None])[:, 0]
    return -(log_p.exp() * log_p).sum(1) if name == "entropy" else 1 - log_p.exp().amax(1)


@pytest.mark.parametrize("name", ["ce", "entropy", "confidence", "select"])
def test_metric_is_per_student_token_of_the_same_text(name, files, ranks):
    flags = ("--teacher-weighting", name, "--teacher-weighting-temperature", str(TEMPERATURE))
    arguments = (SELECT, files, "equal") if name == "select" else (flags, files, "partition_kl")
    ((recorded, all_chunks, weights, (cross, same)),) = ranks.run(record_weights, 1, *arguments)
    seen = []
    for values, chunks, found in zip(recorded, all_chunks, weights, strict=True):
        one = Recorded(*values)
        rows, metric = one.mask.nonzero()[:, 0], "ce" if name == "select" else name
        of_same = metric_of(
            metric, logits_of(one.teacher_hiddens[1][rows], same, SAME_ROWS), one.labels[rows]
        ).mean()
        side = chunks.teacher
        total = metric_of(
            metric, logits_of(one.teacher_hiddens[0][side.rows], cross, CROSS_ROWS), side.labels
        ).sum()
        of_cross = total / len(chunks.student.rows) if chunks.num_chunks else torch.tensor(torch.inf)
        per_token = torch.stack([of_cross, of_same]).double()
        if name == "select":
            expected = (per_token == per_token.min()).double()
        else:
            expected = torch.softmax(torch.tensor(SHARES).double().log() - per_token / TEMPERATURE, dim=0)
        torch.testing.assert_close(found[:, 0].double(), expected, rtol=1e-5, atol=1e-7)
        seen.append(expected[0].item())
    assert seen[0] == 0 and max(seen) > 0.5 and all_chunks[0].num_chunks == 0
