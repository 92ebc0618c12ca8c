"""Check the means over the sampled tokens of a step, and that what no token measures is absent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def finished(sums_of_teachers, shares, gap):
    """Return the figures of one process. `gap` is (sum, tokens)."""
    import torch

    from mkd.kinds.sampled.rollout_meter import Measured, RolloutMeter
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    stream = SimpleNamespace(rows=[], figures={})
    teachers = [Measured(SimpleNamespace(), share) for share in shares]
    meter = RolloutMeter(ParallelContext.create(detect()), stream, teachers, vocab_size=7)
    meter.start()
    meter._sums += torch.tensor([*(value for sums in sums_of_teachers for value in sums), *gap])
    return meter.finish()


def test_what_no_token_measures_is_absent(ranks):
    nothing = [0.0] * 10
    one = [6.0, 0, 8.0, 0, 3, 0, 2, 0, 20.0, 5]  # ln p - ln q of four quarters, their tokens, -ln q, all
    two = [4.0, 0, 0.0, 5.0, 4, 0, 0, 5, 27.0, 9]
    (found,) = ranks.run(finished, 1, [one, two], [0.25, 0.75], (0.5, 5))
    assert found == {
        "rollout/kl_quarter_1": 0.25 * 2 + 0.75 * 1,
        "rollout/kl_quarter_3": 4.0,  # of the only teacher with tokens there
        "rollout/kl_quarter_4": 1.0,
        "rollout/teacher_nll": pytest.approx(0.25 * 4 + 0.75 * 3),
        "rollout/logp_gap": 0.1,
    }
    assert ranks.run(finished, 1, [nothing, nothing], [0.25, 0.75], (0.0, 0)) == [{}]
