"""Check which packs a graphed decoder takes, and that a run continues if no graph can be made."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from mkd.models.graphs.graph_memory import GraphMemory
from mkd.models.graphs.graphed_decoder import MOST_BOUNDS, MOST_SEEN, GraphedDecoder
from mkd.models.packed import packed_documents


class Layers(torch.nn.Module):
    """In place of a decoder: notes the borders that it is given."""

    pre_process, layers = True, ()

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.borders = []

        self.config = SimpleNamespace(recompute_granularity=None)

    def set_input_tensor(self, hidden):
        self.input_tensor = hidden

    def forward(self, hidden_states, attention_mask, rotary_pos_emb, packed_seq_params):
        hidden_states = self.input_tensor if hidden_states is None else hidden_states
        self.recomputes = self.config.recompute_granularity == "full"
        self.borders.append(packed_seq_params.cu_seqlens_q.tolist())
        return hidden_states * self.weight


class Replayed:
    """In place of a pass: a device without graphs cannot make one."""

    def run(self, given):
        return 10 * given.hidden


@pytest.fixture
def decoder():
    memory = GraphMemory(stream=None, scratch=None)
    return GraphedDecoder(Layers(), "the student", lambda packed: None, memory)


def pack(*lengths):
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packed_documents(borders, borders, max(lengths), padding_joins_document=True)


def run(decoder, *lengths, packed=None):
    return decoder(torch.ones(sum(lengths), 1, 1), sum(lengths), packed or pack(*lengths))


def test_a_pack_runs_within_bounds_first_and_as_graphs_when_its_bounds_come_again(decoder, monkeypatch):
    made = []
    monkeypatch.setattr(decoder, "_made", lambda bounds, given: made.append(bounds) or Replayed())
    assert run(decoder, 300, 212).mean() == 1 and decoder.decoder.borders == [[0, 300, 512, 512, 512]]
    assert run(decoder, 212, 300).mean() == 10 and len(made) == 1
    assert len(decoder.decoder.borders) == 1


def test_packs_beyond_the_most_bounds_run_with_their_own_borders(decoder, monkeypatch):
    monkeypatch.setattr(decoder, "_made", lambda bounds, given: Replayed())
    for number in range(MOST_BOUNDS + 1):
        for _ in range(3):
            last = run(decoder, *[2] * 2 ** (2 + number))
    assert last.mean() == 1 and len(decoder.decoder.borders[-1]) == 2 ** (2 + MOST_BOUNDS) + 1
    assert run(decoder, *[2] * 4).mean() == 10  # known bounds stay graphs


def test_bounds_that_never_come_again_are_not_remembered_for_ever(decoder):
    for number in range(MOST_SEEN + 50):
        run(decoder, 300 + number)
    assert len(decoder._seen) == MOST_SEEN and not decoder._graphed


def test_rows_with_values_of_their_own_and_evaluation_run_without_graphs(decoder, monkeypatch):
    monkeypatch.setattr(decoder, "_made", lambda bounds, given: Replayed())
    factors = pack(300, 212)
    factors.query_factors = torch.ones(512, 1, 1, 1)
    for _ in range(3):
        assert run(decoder, 300, 212, packed=factors).mean() == 1
        with torch.no_grad():
            assert run(decoder, 300, 212).mean() == 1
    decoder.decoder.eval()
    for _ in range(3):
        assert run(decoder, 300, 212).mean() == 1


def test_if_no_graph_can_be_made_one_warning_names_the_cause(decoder, monkeypatch, caplog):
    def fails(bounds, given):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(decoder, "_training_pass", fails)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another pool")
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert run(decoder, 300, 212).mean() == 1
    (record,) = caplog.records
    cause = "operation not permitted when stream is capturing"
    assert record.getMessage() == f"the student continues without CUDA graphs: {cause}"
    assert not decoder.is_on and decoder.memory.scratch == "another pool"


def test_a_later_stage_goes_on_with_the_input_that_it_received(decoder, monkeypatch):
    """A capture gives the layers its own input."""

    def fails(bounds, given):
        decoder.decoder.set_input_tensor("that of the capture")
        raise RuntimeError("no graph")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another pool")
    monkeypatch.setattr(decoder, "_training_pass", fails)
    received = torch.ones(512, 1, 1)
    for _ in range(2):
        decoder.decoder.set_input_tensor(received)
        decoder(None, 512, pack(300, 212))
    assert decoder.decoder.input_tensor is received and not decoder.is_on
    assert decoder.decoder.borders == [[0, 300, 512, 512, 512]] * 2


def test_trained_experts_become_graphs_after_a_backward(decoder, monkeypatch):
    monkeypatch.setattr(decoder, "_compiles_backward", True)
    monkeypatch.setattr(decoder, "_made", lambda bounds, given: Replayed())
    hidden = torch.ones(512, 1, 1, requires_grad=True)
    for _ in range(3):
        first = decoder(hidden, 512, pack(300, 212))
        assert first.mean() == 1
    first.sum().backward()
    assert decoder(hidden, 512, pack(300, 212)).mean() == 10
    assert run(decoder, 300, 724).mean() == run(decoder, 724, 300).mean() == 1  # packs of other lengths


def test_packs_without_graphs_are_recomputed_where_the_memory_is_short(decoder, monkeypatch):
    run(decoder, 300, 212)
    assert not decoder.decoder.recomputes
    decoder.recomputes = True
    run(decoder, 300, 400)
    assert decoder.decoder.recomputes and decoder.decoder.config.recompute_granularity is None
    with torch.no_grad():
        run(decoder, 300, 212)
    assert not decoder.decoder.recomputes  # nothing is kept
    decoder.is_on = False  # as after a capture that failed on this process: others go on with their graphs
    run(decoder, 300, 700)
    assert decoder.decoder.recomputes
    run(decoder, 300, 212)  # the second pack of these bounds
    assert not decoder.decoder.recomputes  # it is a graph elsewhere, which computes nothing again
