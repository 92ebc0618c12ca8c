"""Check the inverse cumulative distribution against numpy, and the hash behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkd.kinds.sampled.sampler.sampling import barred_columns, sample_tokens, uniforms

VOCAB_SIZE, WIDTH, ROWS = 700, 768, 400


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_token_is_where_the_distribution_exceeds_the_number(temperature):
    logits = 3 * torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    uniform = np.linspace(0, 1, ROWS, endpoint=False)
    found = sample_tokens(
        logits.expand(ROWS, -1),
        torch.from_numpy(uniform),
        temperature=temperature,
        vocab_size=VOCAB_SIZE,
        tp_group=None,
    )
    log_p = logits[0, :VOCAB_SIZE].double().log_softmax(0).numpy()
    at_temperature = np.exp(log_p / temperature)
    ends = np.cumsum(at_temperature / at_temperature.sum())
    assert found.ids.tolist() == np.searchsorted(ends, uniform, side="right").tolist()
    assert np.abs(found.logp.numpy() - log_p[found.ids]).max() < 1e-6
    assert found.entropy.numpy() == pytest.approx(-(np.exp(log_p) * log_p).sum(), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.1, 0.0])
def test_barred_ids_are_never_sampled_but_have_a_probability(temperature):
    """Only the drawing is restricted: p is over all real ids, as the training model computes it."""
    logits = 3 * torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    barred = [int(logits[0, :VOCAB_SIZE].argmax()), 0, 255, 256, VOCAB_SIZE - 1]
    logits[0, barred[0]] += 12.0  # exp of the others' distance from it underflows at 0.1
    uniform = (np.arange(ROWS) + 0.5) / ROWS  # 0 itself depends on weights that underflow
    columns = barred_columns(barred, WIDTH, None, torch.device("cpu"))
    found = sample_tokens(
        logits.expand(ROWS, -1),
        torch.from_numpy(uniform),
        temperature=temperature,
        vocab_size=VOCAB_SIZE,
        barred=columns,
        tp_group=None,
    )
    log_p = logits[0, :VOCAB_SIZE].double().log_softmax(0).numpy()
    weights = np.exp(log_p / (temperature or 1))
    weights[barred] = 0
    ends = np.cumsum(weights / weights.sum())
    expected = (
        np.searchsorted(ends, uniform, side="right") if temperature else np.full(ROWS, weights.argmax())
    )
    assert found.ids.tolist() == expected.tolist() and not set(barred) & set(found.ids.tolist())
    assert np.abs(found.logp.numpy() - log_p[found.ids]).max() < 1e-6
    assert barred_columns((), WIDTH, None, torch.device("cpu")) is None


def test_the_last_number_never_leaves_the_vocabulary():
    """Zero probabilities at the end, and a number whose product with the total is rounded up to it."""
    logits = torch.full((1, WIDTH), -torch.inf)
    logits[0, [3, 400]] = torch.tensor([0.0, -1.0])
    for number, expected in ((0.0, 3), (1 - 2**-53, 400)):
        uniform = torch.tensor([number], dtype=torch.float64)
        found = sample_tokens(logits, uniform, temperature=1.0, vocab_size=VOCAB_SIZE, tp_group=None)
        assert found.ids.tolist() == [expected]


def sampled_on_one_of_two(logits, uniform, temperature):
    """Return what a rank of two finds; half of the vocabulary is not a multiple of a block."""
    import torch.distributed as dist

    half = logits.shape[1] // 2
    own = logits[:, dist.get_rank() * half :][:, :half]
    settings = dict(temperature=temperature, vocab_size=logits.shape[1], tp_group=dist.group.WORLD)
    return sample_tokens(own, uniform, **settings)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("likely", [5, 300])
def test_a_rank_may_have_no_weight(likely, temperature, ranks):
    """At 0.1 all weights but one underflow."""
    logits = torch.full((3, 640), -torch.inf if temperature == 1.0 else -20.0)
    logits[:, likely] = 0.0
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    settings = dict(temperature=temperature, vocab_size=640, tp_group=None)
    whole = sample_tokens(logits, uniform, **settings)
    assert whole.ids.tolist() == [likely] * 3
    for found in ranks.run(sampled_on_one_of_two, 2, logits, uniform, temperature):
        assert found.ids.tolist() == [likely] * 3
        assert torch.equal(found.logp, whole.logp) and torch.allclose(found.entropy, whole.entropy)


def test_temperature_0_takes_the_first_of_the_most_probable():
    logits = torch.zeros(1, WIDTH)
    logits[0, [5, 9]] = 2.0
    uniform = torch.tensor([0.99], dtype=torch.float64)
    found = sample_tokens(logits, uniform, temperature=0.0, vocab_size=VOCAB_SIZE, tp_group=None)
    assert found.ids.tolist() == [5]


def test_numbers_are_uniform_and_depend_on_every_argument():
    places = np.arange(20_000)
    zeros = np.zeros_like(places)
    base = uniforms(1, 2, zeros, zeros, places)
    others = (
        uniforms(2, 2, zeros, zeros, places),
        uniforms(1, 3, zeros, zeros, places),
        uniforms(1, 2, zeros + 1, zeros, places),
        uniforms(1, 2, zeros, zeros + 1, places),
    )
    assert base.min() >= 0 and base.max() < 1
    for numbers in (base, *others):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-squared with 19 degrees, p = 0.0007
    for numbers in others:
        assert abs(np.corrcoef(base, numbers)[0, 1]) < 0.03
    # swapping arguments is another number
    assert uniforms(1, 2, zeros[:1] + 3, zeros[:1] + 4, zeros[:1]) != uniforms(
        1, 2, zeros[:1] + 4, zeros[:1] + 3, zeros[:1]
    )


@pytest.mark.parametrize("top_p, temperature", [(0.9, 1.0), (0.5, 0.7), (0.0001, 1.0)])
def test_top_p_samples_among_the_ids_of_transformers(top_p, temperature):
    from transformers import TopPLogitsWarper

    logits = 3 * torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2))
    uniform = np.linspace(0, 1, ROWS, endpoint=False)
    found = sample_tokens(
        logits.expand(ROWS, -1),
        torch.from_numpy(uniform),
        temperature=temperature,
        vocab_size=VOCAB_SIZE,
        top_p=top_p,
        tp_group=None,
    )
    real = logits[:, :VOCAB_SIZE].double() / temperature
    kept = TopPLogitsWarper(top_p)(None, real)[0].softmax(0).numpy()
    ends = np.cumsum(kept)
    assert found.ids.tolist() == np.searchsorted(ends, uniform * ends[-1], side="right").tolist()
    log_p = logits[0, :VOCAB_SIZE].double().log_softmax(0).numpy()
    assert np.abs(found.logp.numpy() - log_p[found.ids]).max() < 1e-6  # of the whole distribution
