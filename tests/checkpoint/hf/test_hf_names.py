"""The tables against plain whole-tensor arithmetic on real transformers checkpoints."""

from __future__ import annotations

import pytest
import torch

from mkd.checkpoint.hf.hf_names import find_map, hf_tensor_shapes
from mkd.plan.model_shape import ModelShape
from tests.checkpoint.saved_tensors import all_tensors
from tests.tiny_models import FAMILIES, make_model


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param)
    return ModelShape.from_hf_dir(folder), all_tensors(folder)


def shard_of(shape, tensors, parameter, length, tp_rank, tp_size):
    """What the table says rank `tp_rank` holds of `parameter`, `length` long along its cut dimension."""
    tensor_map = find_map(shape, parameter, first_layer=0)
    dim = tensor_map.rule.dim
    size = list(tensors[tensor_map.tensors[0]].shape)
    size[dim] = length
    shard = torch.zeros(size)
    assert tensor_map.fits(tuple(size), tp_size)
    for piece in tensor_map.pieces(length, tp_rank, tp_size):
        part = tensors[piece.tensor].narrow(dim, piece.tensor_start, piece.length)
        shard.narrow(dim, piece.shard_start, piece.length).copy_(part)
    return shard


def pad(tensor, length, dim=0):
    size = list(tensor.shape)
    size[dim] = length - size[dim]
    return torch.cat([tensor, tensor.new_zeros(size)], dim)


def split_qkv(shape, tensors, kind):
    prefix = "model.layers.1.self_attn."
    if shape.family != "phi3":
        return [tensors[f"{prefix}{part}_proj.{kind}"] for part in "qkv"]
    heads, groups, d = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    return tensors[f"{prefix}qkv_proj.{kind}"].split([heads * d, groups * d, groups * d])


def split_gate_up(shape, tensors):
    prefix = "model.layers.1.mlp."
    if shape.family != "phi3":
        return tensors[f"{prefix}gate_proj.weight"], tensors[f"{prefix}up_proj.weight"]
    return tensors[f"{prefix}gate_up_proj.weight"].chunk(2)


def test_names_and_shapes_are_those_of_transformers(tiny):
    shape, tensors = tiny
    assert hf_tensor_shapes(shape) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_qkv_is_interleaved_by_group_and_padded(tiny, tp_size):
    shape, tensors = tiny
    padded = shape.padded_query_groups(tp_size)
    for kind in ["weight", "bias"] if shape.qkv_bias else ["weight"]:
        parts = [
            part.reshape(shape.num_query_groups, -1, *part.shape[1:])
            for part in split_qkv(shape, tensors, kind)
        ]
        groups = torch.cat(parts, dim=1)
        expected = pad(groups, padded).flatten(0, 1).chunk(tp_size)
        for rank in range(tp_size):
            name = f"decoder.layers.1.self_attention.linear_qkv.{kind}"
            assert torch.equal(
                shard_of(shape, tensors, name, len(expected[0]), rank, tp_size), expected[rank]
            )


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_attention_output_columns_follow_the_groups(tiny, tp_size):
    shape, tensors = tiny
    width = shape.padded_query_groups(tp_size) * shape.heads_per_group * shape.head_dim
    expected = pad(tensors["model.layers.1.self_attn.o_proj.weight"], width, dim=1).chunk(tp_size, dim=1)
    for rank in range(tp_size):
        name = "decoder.layers.1.self_attention.linear_proj.weight"
        assert torch.equal(shard_of(shape, tensors, name, width // tp_size, rank, tp_size), expected[rank])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_gate_and_up_slices_alternate_by_rank(tiny, tp_size):
    shape, tensors = tiny
    gate, up = (part.chunk(tp_size) for part in split_gate_up(shape, tensors))
    down = tensors["model.layers.1.mlp.down_proj.weight"].chunk(tp_size, dim=1)
    width = shape.ffn_hidden_size // tp_size
    for rank in range(tp_size):
        fc1 = shard_of(shape, tensors, "decoder.layers.1.mlp.linear_fc1.weight", 2 * width, rank, tp_size)
        assert torch.equal(fc1, torch.cat([gate[rank], up[rank]]))
        fc2 = shard_of(shape, tensors, "decoder.layers.1.mlp.linear_fc2.weight", width, rank, tp_size)
        assert torch.equal(fc2, down[rank])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_vocabulary_rows_are_padded_to_whatever_the_model_has(tiny, tp_size):
    shape, tensors = tiny
    head = "model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"
    for rows in (shape.padded_vocab_size(tp_size), shape.padded_vocab_size(tp_size) + 128 * tp_size):
        for parameter, source in [
            ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            ("output_layer.weight", head),
        ]:
            expected = pad(tensors[source], rows).chunk(tp_size)
            for rank in range(tp_size):
                shard = shard_of(shape, tensors, parameter, rows // tp_size, rank, tp_size)
                assert torch.equal(shard, expected[rank])


def test_norms_have_one_source_under_both_layer_specs(tiny):
    shape, tensors = tiny
    for local, fused, source in [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm"),
    ]:
        for name in (local, fused):
            found = shard_of(shape, tensors, f"decoder.layers.1.{name}", shape.hidden_size, 1, 2)
            assert torch.equal(found, tensors[f"model.layers.1.{source}.weight"])


def test_local_layers_count_from_the_first_of_the_chunk(tiny):
    shape, _ = tiny
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert find_map(shape, name, first_layer=2).tensors == ("model.layers.3.mlp.down_proj.weight",)
    assert find_map(shape, name, first_layer=3) is None  # the model has 4 layers


def test_parameters_without_a_source_have_no_map(tiny):
    shape, _ = tiny
    assert find_map(shape, "decoder.layers.0.mlp.router.weight", 0) is None
    assert find_map(shape, "vision_model.weight", 0) is None
    has_bias = find_map(shape, "decoder.layers.0.mlp.linear_fc1.bias", 0) is not None
    assert has_bias == shape.mlp_bias


def test_shards_that_do_not_hold_whole_blocks_do_not_fit(tiny):
    shape, _ = tiny
    qkv = find_map(shape, "decoder.layers.0.self_attention.linear_qkv.weight", 0)
    group = (shape.heads_per_group + 2) * shape.head_dim
    rows = shape.padded_query_groups(2) // 2 * group
    assert qkv.fits((rows, 48), tp_size=2)
    assert not qkv.fits((rows - 1, 48), tp_size=2)
    assert not qkv.fits((rows - group, 48), tp_size=2)
    assert not qkv.fits((rows + group, 48), tp_size=2)
    assert not qkv.fits((rows, 32), tp_size=2)
    assert not qkv.fits((rows,), tp_size=2)
    assert not find_map(shape, "decoder.layers.0.self_attention.linear_proj.weight", 0).fits((48,), tp_size=1)
