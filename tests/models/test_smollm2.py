"""Test the real SmolLM2-135M-Instruct, from PyPI (93 MB): 9 heads in 3 groups, so TP 2 pads a group."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_hf_parity import packed_logits, reference_logits
from tests.models.test_te_spec import logits_on_gpu
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.download


def test_logits_equal_transformers(smollm2, ranks):
    expected = reference_logits(smollm2)
    for tp in (1, 2):
        logits = torch.cat(ranks.run(packed_logits, tp, smollm2, tp, False), dim=1)[:, : expected.shape[1]]
        log_p, log_q = (x.double().log_softmax(-1) for x in (expected, logits))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert abs(kl) <= 1e-8


@pytest.mark.gpu
def test_bf16_on_transformer_engine(smollm2, gpu_ranks):
    """Print the KL between the model in fp32 and in bf16, per token of real text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [
        tokenizer(path.read_text(encoding="utf-8"))["input_ids"][:1024]
        for path in sorted(REPOSITORY.glob("*.md"))
    ]
    texts = [torch.tensor(ids) for ids in texts]
    exact, whole, kept = (
        gpu_ranks.run(logits_on_gpu, 1, smollm2, dtype, True, texts, fp32_logits)[0].double().log_softmax(-1)
        for dtype, fp32_logits in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    )
    model = (
        AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16, attn_implementation="sdpa")
        .cuda()
        .eval()
    )
    with torch.no_grad():
        theirs = (
            torch.cat([model(ids[None].cuda()).logits[0].cpu() for ids in texts]).double().log_softmax(-1)
        )
    kl = [float((exact.exp() * (exact - other)).sum(-1).mean()) for other in (kept, whole, theirs)]
    print(f"KL(fp32 || bf16) of SmolLM2 on {len(exact)} tokens: {kl[0]:.1e}", end="")
    print(
        f" (evaluation: fp32 logits), {kl[1]:.1e} (training: bf16 logits); "
        f"of transformers, bf16 logits: {kl[2]:.1e}"
    )
    assert kl[0] <= 1e-3
    assert kl[1] <= 1.1 * kl[2], "the rounding of bf16 logits is all that is added"
