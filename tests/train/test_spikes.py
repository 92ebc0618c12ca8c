"""Losses that stand out are flagged; noise and the falling loss of a young run are not."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random

import pytest
import torch

from mkd.train.spikes import MIN_STEPS, SpikeDetector
from tests.train.command import flags, make_files, read_metrics


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("spikes"))


def noisy_losses(seed: int, steps: int = 500, noise: float = 0.1) -> list[float]:
    """Return a loss that falls from 10 to 2, with heavy-tailed multiplicative noise."""
    generator = random.Random(seed)
    losses = []
    for step in range(steps):
        # Student's t, 6 degrees of freedom
        wide = generator.gauss(0, 1) / math.sqrt(generator.gammavariate(3, 1 / 3))
        losses.append((2 + 8 * math.exp(-step / 60)) * math.exp(noise * max(-4.0, min(4.0, wide))))
    return losses


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.fault(21)
def test_no_false_alarm_in_500_steps(noise):
    for seed in range(20):
        detector = SpikeDetector()
        assert not [step for step, loss in enumerate(noisy_losses(seed, noise=noise)) if detector.add(loss)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.fault(21)
def test_a_spike_of_10_is_flagged_wherever_it_comes(noise):
    for place in (MIN_STEPS, 50, 200, 499):
        losses = noisy_losses(place, noise=noise)
        losses[place] *= 10
        detector = SpikeDetector()
        flagged = {step: ratio for step, loss in enumerate(losses) if (ratio := detector.add(loss))}
        assert list(flagged) == [place] and 4 < flagged[place] < 25


def test_what_is_not_finite_is_no_spike_and_leaves_no_trace():
    detector = SpikeDetector()
    assert not any(detector.add(loss) for loss in [2.0, math.nan, math.inf] * 30)
    assert set(detector.losses) == {2.0} and detector.add(20.0) == pytest.approx(10)


def train_with_a_broken_weight(argv, step):
    """Train with a final norm 40 times larger in one step.

    Return the output, and this rank's samples of that step.
    """
    from mkd.config.load import load_config
    from mkd.operations.console import console
    from mkd.platform import detect
    from mkd.run.loop import one_step
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    samples, world_size = [], torch.distributed.get_world_size()
    with contextlib.redirect_stdout(io.StringIO()) as output, console(torch.distributed.get_rank()):
        run = build_run(plan_run(load_config(argv).config, world_size), detect())
        next_step = run.data.train.next_step

        def recorded():
            batches = next_step()
            if run.position.iteration + 1 == step:
                samples.extend(one for batch in batches for one in batch.sample_ids)
            return batches

        run.data.train.next_step = recorded
        norm = run.state.models[-1].decoder.final_layernorm.weight
        while run.position.iteration < run.config.training.train_iters:
            factor = 40.0 if run.position.iteration + 1 == step else 1.0
            norm.data.mul_(factor)
            one_step(run)
            norm.data.div_(factor)
        run.reporter.close()
    return output.getvalue(), samples


@pytest.mark.fault(21)
def test_a_real_run_flags_its_spike_alone_and_names_the_samples(files, ranks):
    """The samples of both data-parallel ranks are named, and their documents."""
    results = ranks.run(train_with_a_broken_weight, 2, flags(files, "spike", "--train-iters", 60), 41)
    lines, (output, _) = read_metrics(files / "spike"), results[0]
    flagged = {line["iteration"]: line["loss_spikes"] for line in lines if "loss_spikes" in line}
    assert flagged == {41: 1} and lines[40]["loss"] > 5 * lines[39]["loss"]
    assert output.count("  spikes 1\n") == 1
    samples = sorted(one for _, of_rank in results for one in of_rank)
    assert (
        f"the steps before it; samples of the step: {', '.join(map(str, samples))}\n" in output
        and len(samples) == 4
    )
    (spike,) = map(json.loads, (files / "spike" / "loss_spikes.jsonl").read_text().splitlines())
    assert (
        spike["iteration"] == 41 and spike["loss"] == pytest.approx(lines[40]["loss"]) and spike["ratio"] > 5
    )
    assert spike["sample_ids"] == samples and spike["documents"].keys() == set(map(str, samples))
    assert all(
        min(documents) >= 0 for of_pack in spike["documents"].values() for documents in of_pack.values()
    )


@pytest.mark.slow
@pytest.mark.fault(21)
def test_500_steps_of_a_real_run_have_none(files, ranks):
    ranks.run(train_with_a_broken_weight, 1, flags(files, "clean", "--train-iters", 500), 0)
    lines = read_metrics(files / "clean")
    assert len(lines) == 500 and not any("loss_spikes" in line for line in lines)
