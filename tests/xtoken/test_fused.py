"""The fused chunk loss against the dense float64 reference, on several ranks.

Values and the gradients of hidden states and head are compared.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mkd.config.divergence import DIVERGENCES
from mkd.config.models import XTOKEN_LOSSES
from mkd.losses import HeadInput
from mkd.xtoken.chunks import ChunkBatch, ChunkSide, RowExchange
from mkd.xtoken.fused import fused_chunk_kd
from tests.losses.objectives import MIXED, chunk_settings_of
from tests.losses.test_vocab_parallel_cost import Recorder
from tests.xtoken.chunk_cases import (
    Case,
    assert_all_equal_reference,
    assert_equals_reference,
    assert_near,
    each_on_rank,
    expected,
    on_rank,
    random_case,
    relation_of,
    values,
    vocabulary_of,
)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("loss", XTOKEN_LOSSES)
def test_equals_dense_reference(ranks, tp, loss):
    others = (
        DIVERGENCES[1:]
        if loss == "partition_kl"
        else (DIVERGENCES[1 + XTOKEN_LOSSES.index(loss) % (len(DIVERGENCES) - 1)],)
    )
    cases = []
    for temperature in (1.0, 2.5):
        for seed, divergence in enumerate(("forward_kl", *others)):
            settings = dict(MIXED, loss=loss, divergence=divergence, temperature=temperature)
            cases.append((random_case(seed=seed).to(torch.float32), settings))
    assert_all_equal_reference(ranks, tp, cases, 1e-5)


@pytest.mark.parametrize("loss", XTOKEN_LOSSES)
def test_is_exact_in_float64(loss):
    """Slices may have any size, and the factor of backward may be announced or not."""
    tolerance = 1e-7 if loss == "p_kl" else 1e-10  # p_kl has a matrix of fp32
    for divergence, chunk_rows in zip(DIVERGENCES, itertools.cycle((None, 1, 7, 1000)), strict=False):
        case, settings = random_case(seed=5), dict(MIXED, loss=loss, divergence=divergence, temperature=1.7)
        positional, shared = arguments(case, **settings)
        hidden, weight = positional[0][:2]
        factor = torch.tensor(3.0, dtype=torch.float64)
        announced = factor if chunk_rows == 7 else None
        output = fused_chunk_kd(*positional, **shared, chunk_rows=chunk_rows, loss_gradient=announced)
        (factor * output.loss).backward()
        assert_equals_reference([(values(output), hidden.grad, weight.grad)], case, settings, tolerance)


def test_sequence_parallel(ranks):
    case = random_case(seed=3).to(torch.float32)
    by_rank = ranks.run(each_on_rank, 2, [(case, dict(loss=loss), True) for loss in XTOKEN_LOSSES])
    for loss, results in zip(XTOKEN_LOSSES, zip(*by_rank, strict=True), strict=True):
        assert_equals_reference(results, case, dict(loss=loss), 1e-5, sequence_parallel=True)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_settings(ranks, tp):
    cases = [dict(top_k=3), dict(top_k=1000), dict(temperature_scaling="none", temperature=2.0)]
    assert_all_equal_reference(
        ranks, tp, [(random_case(seed=2).to(torch.float32), settings) for settings in cases], 1e-5
    )


@pytest.mark.parametrize("loss", XTOKEN_LOSSES)
def test_vocabularies_without_a_rest(ranks, loss):
    """All rows of one model, or of both, are common tokens (for p_kl: supported)."""
    cases = []
    for student, teacher, common in ((20, 31, 20), (31, 20, 20), (20, 20, 20)):
        relation = relation_of(student, teacher, common, whole_projection=student < teacher)
        case = random_case(sizes=(student, 32, teacher), relation=relation, seed=1).to(torch.float32)
        cases += [(case, dict(loss=loss, divergence=divergence)) for divergence in ("forward_kl", "jsd")]
    assert_all_equal_reference(ranks, 2, cases, 1e-5)


def test_no_chunk_or_no_weight_is_zero_with_a_graph(ranks):
    case = random_case()
    weightless = replace(case, chunks=replace(case.chunks, weights=torch.zeros_like(case.chunks.weights)))
    nothing = random_case((0, 0, 0, 0)), weightless
    cases = [
        (some, dict(loss=loss), split)
        for some in nothing
        for loss in XTOKEN_LOSSES
        for split in (False, True)
    ]
    for results in ranks.run(each_on_rank, 2, cases):
        for got, hidden, weight in results:
            assert all(value == 0 for value in got.values())
            assert torch.count_nonzero(hidden) == torch.count_nonzero(weight) == 0


def context_parallel_parts(case: Case, size: int) -> list[Case]:
    """Return one case a rank: the r-th part of both models' rows.

    It has the chunks whose last student row it has.
    """
    parts = [-(-len(hidden) // size) for hidden in (case.student_hidden, case.teacher_hidden)]
    batch, offsets = case.chunks, case.chunks.student.host_offsets
    owners = batch.student.rows.numpy()[offsets[1:] - 1] // parts[0]
    result = []
    for rank in range(size):
        sides = [
            exchanged_side(side, owners, rank, size, part)
            for side, part in zip((batch.student, batch.teacher), parts, strict=True)
        ]
        own = np.flatnonzero(owners == rank)
        pairs = np.isin(batch.support_chunks.numpy(), own)
        chunks = np.searchsorted(own, batch.support_chunks.numpy()[pairs])
        support_offsets = np.concatenate([[0], np.cumsum(np.diff(batch.support_offsets)[own])]).astype(
            np.int64
        )
        owned = ChunkBatch(
            *sides,
            batch.kinds[own],
            batch.weights[own],
            batch.packs[own],
            support_offsets,
            torch.from_numpy(chunks),
            batch.support_student[pairs],
            batch.support_teacher[pairs],
            batch.num_chunks,
        )
        hiddens = (
            h[rank * n : (rank + 1) * n]
            for h, n in zip((case.student_hidden, case.teacher_hidden), parts, strict=True)
        )
        student, teacher = hiddens
        result.append(replace(case, student_hidden=student, teacher_hidden=teacher, chunks=owned))
    return result


def exchanged_side(side: ChunkSide, owners: np.ndarray, rank: int, size: int, part: int) -> ChunkSide:
    """Return the tokens of the chunks that `rank` owns; the rows come from all ranks, by source."""
    counts = np.diff(side.host_offsets)
    rows, owner_of_row = side.rows.numpy(), np.repeat(owners, counts)
    wanted = [
        [rows[(owner_of_row == to) & (rows // part == source)] for to in range(size)]
        for source in range(size)
    ]
    received = np.concatenate([wanted[source][rank] for source in range(size)])
    own = owner_of_row == rank
    position = {row: i for i, row in enumerate(received.tolist())}
    exchange = RowExchange(
        torch.from_numpy(np.concatenate(wanted[rank]) - rank * part),
        tuple(len(sent) for sent in wanted[rank]),
        tuple(len(wanted[source][rank]) for source in range(size)),
    )
    offsets = np.concatenate([[0], np.cumsum(counts[owners == rank])]).astype(np.int64)
    places = torch.tensor([position[row] for row in rows[own].tolist()], dtype=torch.int64)
    return ChunkSide(places, side.labels[own], torch.from_numpy(offsets), offsets, exchange)


def on_context_rank(parts: list[Case], settings: dict):
    case = parts[dist.get_rank()]
    hidden, weight = (t.clone().requires_grad_() for t in (case.student_hidden, case.student_weight))
    vocabulary, teacher_weight = vocabulary_of(case, settings, 0, 1)
    output = fused_chunk_kd(
        HeadInput(hidden, weight),
        HeadInput(case.teacher_hidden, teacher_weight),
        case.chunks,
        vocabulary=vocabulary,
        cp_group=dist.group.WORLD,
        settings=chunk_settings_of(**settings),
        tp_group=None,
        chunk_rows=4,
    )
    output.loss.backward()
    return values(output), hidden.grad, weight.grad


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_context_parallel(ranks, cp):
    """Ranks' sums add up to those of the whole, and so do the gradients."""
    for loss in ("partition_kl", "p_kl"):
        case = random_case(seed=cp).to(torch.float32)
        results = ranks.run(on_context_rank, cp, context_parallel_parts(case, cp), dict(loss=loss))
        wanted, hidden, weight = expected(case, loss=loss)
        for name, value in wanted.items():
            total = sum(r[0][name] for r in results)
            torch.testing.assert_close(total.double(), value.double(), rtol=1e-5, atol=1e-5)
        assert_near(torch.cat([r[1] for r in results]), hidden, 1e-5)
        assert_near(sum(r[2] for r in results), weight, 1e-5)


def arguments(case: Case, **settings):
    vocabulary, teacher_weight = vocabulary_of(case, settings, 0, 1)
    hidden, weight = (
        case.student_hidden.clone().requires_grad_(),
        case.student_weight.clone().requires_grad_(),
    )
    shared = dict(vocabulary=vocabulary, settings=chunk_settings_of(**settings), tp_group=None, cp_group=None)
    return (HeadInput(hidden, weight), HeadInput(case.teacher_hidden, teacher_weight), case.chunks), shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adds_the_weight_gradient_to_main_grad(dtype):
    case, scale = random_case().to(dtype), torch.tensor(0.25)
    positional, shared = arguments(case)
    hidden, weight = positional[0][:2]
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    output = fused_chunk_kd(*positional, **shared, loss_gradient=scale, fp32_logits=True)
    (output.loss * scale).backward()
    wanted, wanted_hidden, wanted_weight = expected(case)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.loss.double(), wanted["loss"], rtol=1e-5, atol=0.0)
    assert_near(hidden.grad, 0.25 * wanted_hidden, tolerance)
    assert_near(weight.main_grad - 1.0, 0.25 * wanted_weight, tolerance)
    assert weight.grad_added_to_main_grad


def test_another_factor_than_announced_fails():
    positional, shared = arguments(random_case())
    output = fused_chunk_kd(*positional, **shared, loss_gradient=torch.tensor(0.25))
    with pytest.raises(RuntimeError):
        (output.loss * 0.5).backward()


@pytest.mark.parametrize("loss", XTOKEN_LOSSES)
def test_evaluation_makes_no_gradient_and_nothing_waits_for_the_device(loss):
    case = random_case()
    positional, shared = arguments(case, loss=loss)
    with torch.no_grad(), Recorder() as recorder:
        output = fused_chunk_kd(*positional, **shared)
    assert not output.loss.requires_grad
    torch.testing.assert_close(output.loss, expected(case, loss=loss)[0]["loss"], rtol=1e-7, atol=0.0)
    assert recorder.waits == []
    with Recorder() as recorder:
        fused_chunk_kd(*positional, **shared)
    assert recorder.waits == []


def recorded(case: Case, settings: dict):
    with Recorder() as recorder:
        on_rank(case, settings, chunk_rows=None)
    return recorder.collectives


def test_collectives_of_a_slice(ranks):
    gather, reduce = "c10d._allgather_base_.default", "c10d.allreduce_.default"
    for counts, wanted in (((6, 0, 0, 0), [gather, gather, reduce]), ((0, 3, 0, 0), [gather, gather])):
        for found in ranks.run(recorded, 2, random_case(counts), {}):
            assert found == [*wanted, reduce]  # the last is that of the hidden states' gradient


def test_logits_of_one_slice_at_a_time():
    case = random_case((40, 0, 0, 0)).to(torch.float32)
    positional, shared = arguments(case)
    with Recorder() as recorder:
        fused_chunk_kd(*positional, **shared, chunk_rows=5).loss.backward()
    assert recorder.largest[torch.float32] == max(
        5 * 48, case.student_weight.numel(), case.teacher_weight.numel()
    )
