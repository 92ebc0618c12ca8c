"""Check the tables of names against plain whole-tensor arithmetic on real transformers checkpoints."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from mkd.checkpoint.hf import hf_names
from mkd.checkpoint.hf.hf_names import bind, find_map, hf_tensor_shapes
from mkd.families.registry import FAMILIES as FAMILIES_BY_TYPE
from mkd.families.weight_rules import FFN, GATE_UP, Entry, Rule
from mkd.plan.models.model_shape import ModelShape
from tests.checkpoint.saved_tensors import all_tensors
from tests.tiny_models import DENSE, make_model


# The tests of `tiny` spell out the parameters of grouped-query attention.
@pytest.fixture(scope="module", params=[family for family in DENSE if family != "deepseek"])
def tiny(request, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param)
    return ModelShape.from_hf_dir(folder), all_tensors(folder)


def shard_of(shape, tensors, parameter, length, tp_rank, tp_size):
    """Return rank `tp_rank`'s shard of `parameter` by the table; its cut dimension has size `length`."""
    tensor_map = find_map(shape, parameter, first_layer=0)
    dim = tensor_map.entry.rule.dim
    size = list(tensors[tensor_map.tensors[0]].shape)
    size[dim] = length
    shard = torch.zeros(size)
    assert tensor_map.fits(tuple(size), tp_size)
    for piece in tensor_map.pieces(tuple(size), tp_rank, tp_size):
        piece.in_shard(shard).copy_(piece.in_tensor(tensors[piece.tensor]))
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
    for kind in ["weight", "bias"] if shape.common("qkv_bias") else ["weight"]:
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
    width = shape.common("ffn_hidden_size") // tp_size
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
    is_gemma = shape.family == "gemma3_text"
    before_mlp = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
    for local, fused, source in [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", before_mlp),
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
    assert has_bias == shape.common("mlp_bias")


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


EXPERTS = 8
EXPERT_TENSORS = tuple(
    f"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up")
)
DOWN = ("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",)
NUMBERED = {  # one parameter for each local expert
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": Entry(
        replace(GATE_UP, experts=lambda m, layer: EXPERTS), EXPERT_TENSORS
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": Entry(
        replace(FFN, experts=lambda m, layer: EXPERTS), DOWN
    ),
}


@pytest.fixture
def moe(tmp_path, monkeypatch):
    """Return a Qwen3-MoE shape and tensors, and a function that chooses the table for names of experts."""
    shape = ModelShape.from_hf_dir(make_model(tmp_path, "qwen3", num_hidden_layers=2))
    inner, hidden = shape.common("ffn_hidden_size"), shape.hidden_size
    tensors = {}
    for layer in range(2):
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            tensors |= {f"{prefix}{part}_proj.weight": torch.randn(inner, hidden) for part in ("gate", "up")}
            tensors[f"{prefix}down_proj.weight"] = torch.randn(hidden, inner)

    def use(table):
        monkeypatch.setattr(
            hf_names, "FAMILIES", {"qwen3": replace(FAMILIES_BY_TYPE["qwen3"], tensors=table)}
        )
        return shape, tensors

    return use


def expert_shards(tensors, layer, expert, tp_rank, tp_size):
    """Return one expert's shard on a tensor-parallel rank: (gate and up rows, down columns)."""
    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
    gate, up = (tensors[f"{prefix}{part}_proj.weight"].chunk(tp_size)[tp_rank] for part in ("gate", "up"))
    return torch.cat([gate, up]), tensors[f"{prefix}down_proj.weight"].chunk(tp_size, dim=1)[tp_rank]


def test_every_expert_has_its_tensors(moe):
    shape, tensors = moe(NUMBERED)
    found = hf_tensor_shapes(shape)
    assert {name: found.get(name) for name in tensors} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert len(found) == len(tensors) + 3


@pytest.mark.parametrize("pattern", ["local_experts.{}.{}.{}", "{1}.{2}{0}"], ids=["local", "grouped"])
def test_stacks_are_cut_by_expert_and_written_back(pattern, tmp_path):
    """GPT-OSS: matrices are transposed, gates and up projections alternate, and all have the same width."""
    folder = make_model(tmp_path, "gpt_oss", num_hidden_layers=2)
    shape, tensors = ModelShape.from_hf_dir(folder), all_tensors(folder)
    assert hf_tensor_shapes(shape) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if ".experts." in name}
    for layer, expert in itertools.product(range(2), range(8)):
        stacks = {
            name.rpartition(".experts.")[2]: tensor[expert]
            for name, tensor in tensors.items()
            if f"layers.{layer}.mlp.experts." in name
        }
        expected = {
            ("linear_fc1", "weight"): torch.cat([stacks["gate_up_proj"].T[start::2] for start in (0, 1)]),
            ("linear_fc1", "bias"): torch.cat([stacks["gate_up_proj_bias"][start::2] for start in (0, 1)]),
            ("linear_fc2", "weight"): stacks["down_proj"].T,
            ("linear_fc2", "bias"): stacks["down_proj_bias"],
        }
        for (product, kind), whole in expected.items():
            name = "decoder.layers.0.mlp.experts." + pattern.format(expert % 4, product, kind)
            tensor_map = find_map(shape, name, first_layer=layer, first_expert=expert - expert % 4)
            assert tensor_map.fits(tuple(whole.shape), 2) and not tensor_map.fits((*whole.shape, 1), 2)
            for piece in tensor_map.pieces(tuple(whole.shape), 1, 2):
                shard = torch.zeros_like(whole)
                piece.in_shard(shard).copy_(piece.in_tensor(tensors[piece.tensor]))
                assert torch.equal(shard, whole), name
                piece.in_tensor(back[piece.tensor]).copy_(piece.in_shard(shard))
    assert all(torch.equal(back[name], tensors[name]) for name in back) and len(back) == 2 * 4


@pytest.mark.parametrize("tp_size", [1, 2])
def test_numbered_experts_count_from_the_first_of_the_rank(moe, tp_size):
    shape, tensors = moe(NUMBERED)
    for expert in range(4):
        expected = expert_shards(tensors, 1, 4 + expert, tp_size - 1, tp_size)
        for which, name in enumerate(("linear_fc1", "linear_fc2")):
            parameter = f"decoder.layers.0.mlp.experts.local_experts.{expert}.{name}.weight"
            tensor_map = find_map(shape, parameter, first_layer=1, first_expert=4)
            shard = torch.zeros_like(expected[which])
            assert tensor_map.fits(tuple(shard.shape), tp_size)
            for piece in tensor_map.pieces(tuple(shard.shape), tp_size - 1, tp_size):
                piece.in_shard(shard).copy_(piece.in_tensor(tensors[piece.tensor]))
            assert torch.equal(shard, expected[which])


def test_any_dimension_may_be_cut(tiny):
    """Cut the last of three dimensions, with padding: [2, h, 5 channels] over 2 ranks, 3 channels each."""
    shape, _ = tiny
    rule = Rule(
        lambda m, layer, ranks: 5,
        lambda m, layer, ranks: (1,),
        dim=2,
        other_dims=lambda m, layer: (2, m.hidden_size),
    )
    tensor_map = bind(shape, Entry(rule, ("model.layers.{layer}.mlp.experts.down_proj",)), 1)
    assert tensor_map.tensor_shapes() == {"model.layers.1.mlp.experts.down_proj": (2, shape.hidden_size, 5)}
    whole = torch.randn(2, shape.hidden_size, 5)
    for rank, width in ((0, 3), (1, 2)):
        shard = torch.zeros(2, shape.hidden_size, 3)
        assert tensor_map.fits(tuple(shard.shape), 2) and not tensor_map.fits((2, shape.hidden_size, 4), 2)
        for piece in tensor_map.pieces(tuple(shard.shape), rank, 2):
            piece.in_shard(shard).copy_(piece.in_tensor(whole))
        assert torch.equal(shard[..., :width], whole[..., 3 * rank : 3 * rank + width])
        assert not shard[..., width:].any()
