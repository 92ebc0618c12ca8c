"""Check that layers in sections compute what they compute as a whole, bit for bit, with all gradients."""

from __future__ import annotations

import pytest
import torch

from mkd.models.moe.token_documents import split_documents
from mkd.models.packed import packed_documents
from tests.models.graphs.replayed_graphs import Ready, graph_memory, replayed_graphs
from tests.models.test_hf_parity import load_model
from tests.tiny_models import make_model

LENGTHS = ((30, 50, 20), (64, 3, 33), (100,), (1, 99), (30, 50, 20))  # packs of 100 tokens, the same bounds


def pack(lengths):
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    return packed_documents(borders, borders, max(lengths), padding_joins_document=True)


def graphed(model, at_experts, most_layers):
    """Let the layers of the model run in sections; return what is told to DDP."""
    from mkd.models.graphs.graphed_decoder import GraphedDecoder

    ready = Ready(groups=[])
    own = model.decoder, "the model", model.rotary_pos_emb, graph_memory()
    cuts = dict(cuts_at_experts=at_experts, most_layers=most_layers)
    model.graphs = GraphedDecoder(*own, ready if model.training else None, **cuts)
    return ready


def outputs(model, backward):
    """Return outputs, gradients and router records of packs; two of them are in flight together."""
    found, held = [], []
    for number, lengths in enumerate(LENGTHS):
        tokens = torch.randint(300, (1, 100), generator=torch.Generator().manual_seed(number))
        hidden = model(tokens, torch.arange(100)[None], pack(lengths))
        found.append(hidden.detach().clone())
        held.append(hidden)
        if backward and len(held) == 2:
            backwards(held)
    if backward:
        backwards(held)
    return found


def backwards(held):
    while held:
        hidden = held.pop(0)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()


def results(folder, trains, most_layers):
    """Return the values of all packs without and with sections, and what they say of sections."""
    from mkd.models.moe.layer import ExpertLayer

    model = load_model(folder, tp=1)
    model.train() if trains else model.requires_grad_(False)
    if trains and model.router_record is not None:
        model.router_record.balance_coeff = model.router_record.z_coeff = 0.1
    every = []
    for sections in (False, True):
        for parameter in model.parameters():
            parameter.main_grad, parameter.grad = torch.zeros_like(parameter), None
        if model.router_record is not None:
            model.router_record.start_step(torch.tensor(0.002))
        with replayed_graphs(), torch.set_grad_enabled(trains):
            ready = graphed(model, True, most_layers) if sections else None
            if sections:  # the first packs make the passes, which changes records and gradients here
                for parameter in model.parameters():
                    parameter.grad_added_to_main_grad = False
                outputs(model, trains)
                for parameter in model.parameters():
                    parameter.main_grad.zero_()
                    parameter.grad = None
                if model.router_record is not None:
                    model.router_record.start_step(torch.tensor(0.002))
                ready.groups.clear()
            found = outputs(model, trains)
        gradients = {
            name: one.main_grad + (0 if one.grad is None else one.grad)
            for name, one in model.named_parameters()
        }
        sums = None if model.router_record is None else model.router_record.sums.clone()
        every.append((found, gradients, sums))
    kinds = [type(section).__name__ for section in model.graphs.sections]
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[one] for one in group] for group in ready.groups]
    experts = sum(isinstance(layer.mlp, ExpertLayer) for layer in model.decoder.layers)
    return every, kinds, groups, experts, len(model.graphs.bounds)


@pytest.mark.parametrize(
    ("family", "most_layers"),
    [("qwen3_moe", None), ("deepseek-experts", None), ("llama", 2), ("llama", None)],
)
def test_sections_change_no_bit(family, most_layers, ranks, tmp_path):
    folder = make_model(tmp_path / family, family)
    for trains in (False, True):
        ((plain, cut), kinds, groups, experts, bounds) = ranks.run(results, 1, folder, trains, most_layers)[0]
        graphs = experts + (1 if most_layers is None else 4 // most_layers)
        assert kinds.count("Section") == graphs and kinds.count("EagerSection") == experts and bounds == 1
        for one, other in zip(plain[0], cut[0], strict=True):
            assert torch.equal(one, other)
        for name, gradient in plain[1].items():
            assert torch.equal(gradient, cut[1][name]), name
            assert not trains or gradient.any() or "output_layer" in name or ".local_experts." in name
        assert plain[2] is None or torch.equal(plain[2], cut[2])
        if trains:  # every parameter of a graph is ready once a micro-batch, those of the last layers first
            in_layers = [name for name in plain[1] if name.startswith("decoder.")]
            expected = sorted(name for name in in_layers if ".mlp.experts." not in name)
            first = [name for group in groups[:graphs] for name in group]
            assert len(groups) == graphs * len(LENGTHS) and sorted(first) == expected
            assert groups[0][0] == "decoder.final_layernorm.weight"  # as backward completes them
            layers = [int(name.split(".")[2]) for name in first if ".layers." in name]
            assert layers == sorted(layers, reverse=True)


def left_alone(folder):
    """Return reasons not to cut a part at its experts, and whether a model that cannot be cut has graphs."""
    from mkd.models.graphs.sections import why_uncut

    model = load_model(folder, tp=1)
    decoder = model.decoder.train()
    found = [why_uncut(decoder)]
    decoder.layers[-1].mlp.moe_layer_recompute = True
    found.append(why_uncut(decoder))
    decoder.config.recompute_granularity = "full"
    found.append(why_uncut(decoder))
    graphed(model, True, None)
    return found, model.graphs.is_on


def test_a_model_that_cannot_be_cut_at_its_experts_runs_without_graphs(ranks, tmp_path):
    (reasons, is_on) = ranks.run(left_alone, 1, make_model(tmp_path / "model", "qwen3_moe"))[0]
    assert reasons[0] is None and not is_on
    assert "experts or their norm are recomputed" in reasons[1] and "whole layers" in reasons[2]


def test_documents_of_tokens_fill_the_bounds():
    from mkd.models.graphs.bounds import Bounds, filled

    packed = pack((30, 50, 20))
    packed.documents_of_tokens = torch.cat((torch.zeros(100), torch.tensor([30, 50, 20]))).int()
    full = filled(packed, Bounds.of(packed, 100))
    tokens, lengths = split_documents(full.documents_of_tokens, 100)
    assert lengths.tolist() == [30, 50, 20, 0] and full.cu_seqlens_q.numel() == 5 and len(tokens) == 100
