"""Sample orders are functions of the sample number: epochs are permutations, blends keep their weights."""

from __future__ import annotations

import numpy as np
import pytest

from mkd.data import order as order_module
from mkd.data.order import BlendOrder, ComputedPermutation, EpochOrder, evenly_spaced, interleave


def test_every_epoch_is_another_permutation():
    order = EpochOrder(50, seed=3, shuffle=True)
    epochs = order(0, 150).reshape(3, 50)
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(
        epochs[0], EpochOrder(50, 4, True)(0, 50)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000, 4097])
def test_a_computed_permutation_has_every_number_once_in_any_part(size):
    orders = [
        ComputedPermutation(np.random.Generator(np.random.PCG64([seed, 0])), size)[np.arange(size)]
        for seed in (3, 3, 4)
    ]
    assert sorted(orders[0].tolist()) == list(range(size)) and np.array_equal(*orders[:2])
    if size > 3:
        assert not np.array_equal(orders[0], orders[2])


def test_a_computed_permutation_mixes_as_well_as_a_stored_one():
    """Neighbours are as far apart as in a random permutation, and each half comes from both halves."""
    found = ComputedPermutation(np.random.default_rng(0), 1 << 20)[np.arange(1 << 16)]
    assert abs(np.abs(np.diff(found)).mean() / (1 << 20) - 1 / 3) < 0.005
    assert abs((found < 1 << 19).mean() - 0.5) < 0.01


def test_large_epochs_are_computed_for_any_range_of_samples(monkeypatch):
    monkeypatch.setattr(order_module, "STORED_PACKS", 40)
    order = EpochOrder(50, seed=3, shuffle=True)
    whole = order(0, 150)
    epochs = whole.reshape(3, 50)
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1]) and np.array_equal(order(40, 70), whole[40:110])


def test_without_shuffling_packs_come_in_turn():
    assert EpochOrder(3, seed=0, shuffle=False)(2, 5).tolist() == [2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    "make", [lambda: EpochOrder(7, 1, True), lambda: BlendOrder([5, 3, 11], [0.5, 0.2, 0.3], 1, True)]
)
def test_any_range_is_a_cut_of_the_whole(make):
    whole = make()(0, 200)
    order = make()
    for first, count in [(0, 1), (3, 40), (150, 50), (17, 1), (99, 100)]:
        assert np.array_equal(order(first, count), whole[first : first + count])


@pytest.mark.parametrize(
    "weights", [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], [0.999, 0.001], list(np.full(30, 1 / 30))]
)
def test_interleave_is_one_greedy_sequence(weights):
    """Random access equals the greedy rule: next comes the member whose sample is due first."""
    weights = np.asarray(weights)
    counts, expected = np.zeros(len(weights)), []
    for _ in range(300):
        member = int(np.argmin((counts + 0.5) / weights))
        expected.append((member, counts[member]))
        counts[member] += 1
    for first, count in [(0, 300), (7, 5), (120, 180), (299, 1)]:
        members, ordinals = interleave(weights, first, count)
        assert list(zip(members, ordinals, strict=True)) == expected[first : first + count]


def test_weights_hold_at_every_length_and_far_out():
    weights = np.array([0.6, 0.3, 0.1])
    members, ordinals = interleave(weights, 0, 1000)
    shares = np.cumsum(members[:, None] == np.arange(3), axis=0) - np.arange(1, 1001)[:, None] * weights
    assert np.abs(shares).max() <= 1
    members, ordinals = interleave(weights, 10**12, 10)
    assert np.allclose(ordinals / weights[members], 1e12, rtol=1e-9)


@pytest.mark.parametrize("count", [0, 1, 7, 16, 100])
def test_evenly_spaced_packs(count):
    assert evenly_spaced([6, 10], None, count).tolist() == [k * 16 // count for k in range(count)]
    chosen = evenly_spaced([6, 10], [0.75, 0.25], count)
    first, second = chosen[chosen < 6].tolist(), (chosen[chosen >= 6] - 6).tolist()
    assert (len(first), len(second)) == (count - len(second), round(count / 4))
    for own, size in ((first, 6), (second, 10)):
        assert own == [k * size // len(own) for k in range(len(own))]


def test_members_have_epochs_of_their_own():
    chosen = BlendOrder([4, 10], [1, 1], seed=0, shuffle=True)(0, 40)
    small, large = chosen[chosen < 4], chosen[chosen >= 4]
    assert [sorted(epoch) for epoch in small.reshape(5, 4)] == [[0, 1, 2, 3]] * 5
    assert [sorted(epoch) for epoch in large.reshape(2, 10)] == [list(range(4, 14))] * 2
