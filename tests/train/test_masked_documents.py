"""Check that documents without loss tokens contribute nothing: the same losses and weights, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.train.command import flags, make_files, read_metrics, read_weights, run_main, write_records

MASKED = {"prompt": "the quick brown fox " * 3, "completion": ""}
LOGGED = ("loss", "ce_loss", "kd_loss", "grad_norm", "num_loss_tokens", "consumed_samples")


@pytest.mark.fault(35)
def test_masked_documents_contribute_nothing(tmp_path, ranks):
    """Masked documents fill separate packs; with two data-parallel ranks each gets some."""
    files = make_files(tmp_path)
    trained = [{"prompt": f"{i}: the", "completion": " quick brown fox" * (i % 3 + 1)} for i in range(12)]
    write_records(files / "plain.jsonl", *trained)
    write_records(files / "masked.jsonl", *[record for one in trained for record in (MASKED, one, MASKED)])
    seen = []
    for name in ("plain", "masked"):
        more = ("--no-append-eod", "--pack", "none", "--export-hf", files / f"{name} hf")
        results = run_main(ranks, flags(files, name, *more, data_path=f"{name}.jsonl"), world_size=2)
        assert [result.exit_code for result in results] == [0, 0], results[0].stderr
        lines = [{key: line[key] for key in LOGGED} for line in read_metrics(files / name)]
        seen.append((lines, read_weights(files / f"{name} hf")))
    assert seen[0][0] == seen[1][0] and len(seen[0][0]) == 2
    assert all(torch.equal(weight, seen[1][1][tensor]) for tensor, weight in seen[0][1].items())
