"""Logits of mkd's models against transformers, for every family, packed documents, at TP 1 and 2."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from tests.tiny_models import FAMILIES, make_model

LENGTHS = (23, 1, 40, 17)  # one document beyond the original context of the scaled positions (32) and beyond the window (16)
PADDING = 15
TOLERANCE = 1e-5  # max |difference| / max |logit|


def documents(vocab_size):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in LENGTHS]


def pack(lengths, padding):
    """The THD description of documents in a row; the last one is followed by padding."""
    real = torch.tensor([0, *lengths]).cumsum(0).int()
    padded = real.clone()
    padded[-1] += padding
    longest = int(padded.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


def load_model(folder, tp, sequence_parallel=False):
    """One mkd model over all ranks of this world, weights from `folder`."""
    from mkd.checkpoint.hf_reader import HFCheckpoint, load_hf_weights
    from mkd.models.builder import build_chunks
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.model_shape import ModelShape
    from mkd.platform import detect

    context = ParallelContext.create(detect(), tensor_parallel=tp)
    shape = ModelShape.from_hf_dir(folder)
    options = ModelOptions(sequence_parallel=sequence_parallel)
    (model,) = build_chunks(shape, PipelineLayout.even(shape.num_layers, 1), options, context)
    load_hf_weights(model, shape, HFCheckpoint(folder), first_layer=0, tp_rank=context.tp_rank, tp_size=tp)
    return model.eval()


@torch.no_grad()
def packed_logits(folder, tp, sequence_parallel):
    """This rank's columns [sum(LENGTHS), v/tp] of one pack that holds all documents."""
    model = load_model(folder, tp, sequence_parallel)
    tokens = torch.cat([*documents(model.shape.vocab_size), torch.zeros(PADDING, dtype=torch.int64)])
    positions = torch.arange(tokens.numel())
    hidden = model(tokens[None], positions[None], None, packed_seq_params=pack(LENGTHS, PADDING))
    return model.logits(hidden)[: sum(LENGTHS), 0].clone()


@torch.no_grad()
def reference_logits(folder):
    """transformers, one document at a time: [sum(LENGTHS), vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.cat([model(ids[None]).logits[0] for ids in documents(model.config.vocab_size)])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path, ranks):
    folder = make_model(tmp_path / family, family)
    expected = reference_logits(folder)
    for tp, sequence_parallel in ((1, False), (2, False), (2, True)):
        shards = ranks.run(packed_logits, tp, folder, tp, sequence_parallel)
        logits = torch.cat(shards, dim=1)[:, : expected.shape[1]]
        error = (logits - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE, f"TP {tp}, sequence parallel {sequence_parallel}: relative error {error:.2e}"
