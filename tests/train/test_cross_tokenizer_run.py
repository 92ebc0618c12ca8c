"""Check that a real cross-tokenizer teacher teaches more than text alone.

SmolLM2-135M teaches a random student with Mistral's tokens.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.train.command import read_metrics
from tests.train.cross_tokenizer_run import SIZES, compare, prepare, run_folder, show

pytestmark = [pytest.mark.download, pytest.mark.slow]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    try:
        return prepare(SIZES["ci"], tmp_path_factory.mktemp("cross") / "data")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the tokenizer of Mistral could not be downloaded")


def test_distillation_beats_cross_entropy_at_equal_tokens(data, smollm2, tmp_path):
    """Both start from the same weights and see the same packs; compare bits per byte of held-out text."""
    size = SIZES["ci"]
    results = compare(size, data, smollm2, tmp_path)
    show(results)
    ce, kd = (results["curves"][ratio]["1"] for ratio in ("0", "0.9"))
    assert ce[0] == kd[0]
    assert [point["tokens"] for point in ce] == [point["tokens"] for point in kd] == [0, 1536, 3072]

    first_losses = [read_metrics(run_folder(tmp_path, ratio, 1))[1]["ce_loss"] for ratio in size.kd_ratios]
    assert first_losses[0] == pytest.approx(first_losses[1], rel=1e-6)
    last = {ratio: curve[-1]["bits_per_byte"] for ratio, curve in (("ce", ce), ("kd", kd))}
    assert last["ce"] < ce[0]["bits_per_byte"] - 1, "cross entropy alone must learn too"
    assert last["kd"] < last["ce"] - 0.15
