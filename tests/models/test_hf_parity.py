"""Check logits of mkd's models against transformers, for every family, packed documents, at TP 1 and 2."""

from __future__ import annotations

import pytest
import torch

from mkd.models.packed import packed_documents
from tests.tiny_models import FAMILIES, SIZES, VARIANTS, make_model

# one document beyond the original context of the scaled positions (32) and beyond the window (16)
LENGTHS = (23, 1, 40, 17)
PADDING = 17
TOLERANCE = 1e-5  # max |difference| / max |logit|


def documents(vocab_size):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in LENGTHS]


def pack(lengths, padding, padding_joins_document=False, device=None):
    """Return the THD description of documents in a row; the last one is followed by padding."""
    real = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    padded = real.clone()
    padded[-1] += padding
    return packed_documents(real, padded, int(padded.diff().max()), padding_joins_document)


def load_model(folder, tp, sequence_parallel=False):
    """Return one mkd model over all ranks of this world, with weights from `folder`."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect

    context = ParallelContext.create(detect(), Sizes(tensor=tp))
    shape = ModelShape.from_hf_dir(folder)
    options = ModelOptions(sequence_parallel=sequence_parallel)
    (model,) = build_model_parts(shape, PipelineLayout.even(shape.num_layers, 1), options, context)
    load_hf_weights(model, shape, HFCheckpoint(folder), context)
    return model.eval()


@torch.no_grad()
def packed_logits(folder, tp, sequence_parallel, padding_joins_document=False):
    """Return this rank's columns [sum(LENGTHS), v/tp] of one pack that holds all documents."""
    model = load_model(folder, tp, sequence_parallel)
    tokens = torch.cat([*documents(model.shape.vocab_size), torch.zeros(PADDING, dtype=torch.int64)])
    positions = torch.arange(tokens.numel())
    hidden = model(
        tokens[None], positions[None], packed_seq_params=pack(LENGTHS, PADDING, padding_joins_document)
    )
    return model.logits(hidden)[: sum(LENGTHS), 0].clone()


@torch.no_grad()
def reference_logits(folder):
    """Return the logits of transformers, one document at a time: [sum(LENGTHS), vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.cat([model(ids[None]).logits[0] for ids in documents(model.config.vocab_size)])


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_logits_equal_transformers(family, tmp_path, ranks):
    folder = make_model(tmp_path / family, family)
    expected = reference_logits(folder)
    for tp, sequence_parallel in ((1, False), (2, False), (2, True)):
        shards = ranks.run(packed_logits, tp, folder, tp, sequence_parallel)
        logits = torch.cat(shards, dim=1)[:, : expected.shape[1]]
        error = (logits - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE, (
            f"TP {tp}, sequence parallel {sequence_parallel}: relative error {error:.2e}"
        )


@pytest.mark.parametrize("family", ["phi4-long", "mistral"])
def test_padding_may_join_the_last_document(family, tmp_path, ranks):
    """Transformer Engine gets this form. With padding the last document would exceed LongRoPE's length."""
    folder = make_model(tmp_path / family, family)
    (apart,), (joined,) = (ranks.run(packed_logits, 1, folder, 1, False, joins) for joins in (False, True))
    assert (apart - joined).abs().max() <= TOLERANCE * apart.abs().max()


def test_the_long_family_is_long():
    """The long family really uses its scaled frequencies and its attention factor."""
    import transformers

    from mkd.plan.models.model_shape import ModelShape

    _, options = FAMILIES["phi4-long"]
    config = transformers.Phi3Config(**SIZES, **options)
    rope = ModelShape.from_hf_config(config.to_dict()).common("rope")
    assert rope.original_max_position_embeddings < max(LENGTHS) and rope.attention_factor > 1.1


def gradients(folder):
    """Return the gradients of `weighted_sum` of all logits of a pack, by parameter's Hugging Face tensors."""
    from mkd.checkpoint.hf.hf_names import find_map

    model = load_model(folder, tp=1)
    tokens = torch.cat([*documents(model.shape.vocab_size), torch.zeros(PADDING, dtype=torch.int64)])
    positions = torch.arange(tokens.numel())
    hidden = model(tokens[None], positions[None], packed_seq_params=pack(LENGTHS, PADDING))
    logits = model.logits(hidden)[: sum(LENGTHS), 0, : model.shape.vocab_size]
    weighted_sum(logits).backward()
    found = {}
    for name, parameter in model.named_parameters():
        for piece in find_map(model.shape, name, 0).pieces(tuple(parameter.shape), 0, 1):
            found.setdefault(piece.tensor, []).append((piece, piece.in_shard(parameter.grad).clone()))
    return found


def weighted_sum(logits):
    return (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))).sum()


@pytest.mark.parametrize("family", ["gemma3", "qwen3-windows", "deepseek", "moonlight", "gpt_oss"])
def test_gradients_equal_transformers(family, tmp_path, ranks):
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / family, family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = documents(model.config.vocab_size)
    weighted_sum(torch.cat([model(document[None]).logits[0] for document in ids])).backward()
    (found,) = ranks.run(gradients, 1, folder)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, pieces in found.items():
        for piece, gradient in pieces:
            reference = piece.in_tensor(expected[name])
            scale = (reference if piece.stack else expected[name]).abs().max()  # of one expert
            error = (gradient - reference).abs().max()
            assert error <= TOLERANCE * scale, f"{name}: relative error {error / scale:.2e}"
