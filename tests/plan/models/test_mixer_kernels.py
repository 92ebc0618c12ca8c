"""Check when gated delta nets run as fused kernels, and that the plan says why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.kinds.known_kinds import KINDS
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.facts import RunFacts
from mkd.plan.footprint.activations import Activations
from mkd.plan.forecast import Forecast
from mkd.plan.models import mixer_kernels
from mkd.plan.models.mixer_kernels import unfused_reason
from mkd.plan.parallel_sizes import ONE_PROCESS
from tests.plan.shapes import QWEN3_5_9B, SEQ_LENGTH, config

MIXER = QWEN3_5_9B.layers[0].mixer
CASES = (
    ("0.6.1", {}, None),
    (None, {}, "megatron-kd[hybrid]"),
    ("0.4.0", {}, "0.4.0"),
    ("0.6.1", dict(is_exact=True), "--deterministic-mode"),
    ("0.6.1", dict(is_bf16=False), "--bf16"),
    ("0.6.1", dict(mixer=replace(MIXER, key_dim=320)), "256"),
)


@pytest.mark.parametrize("version, settings, reason", CASES)
def test_each_reason(version, settings, reason, monkeypatch):
    monkeypatch.setattr(mixer_kernels, "fla_version", lambda: version)
    found = unfused_reason(**dict(mixer=MIXER, is_bf16=True, is_exact=False) | settings)
    assert found is None if reason is None else reason in found


def test_the_plan_says_it_and_counts_less_memory(monkeypatch):
    kept = {}
    for version, line in ((None, "plain torch"), ("0.6.0", "fused kernels of fla-core")):
        monkeypatch.setattr(mixer_kernels, "fla_version", lambda found=version: found)
        flags = config("--student-hf", "s", "--data-path", "d", "--train-iters", 1)
        facts = RunFacts(flags, 1, QWEN3_5_9B, (QWEN3_5_9B,), kinds=KINDS)
        assert f"mixers: {line}" in describe_forecast(Forecast.from_facts(facts))
        activations = Activations(facts.config, QWEN3_5_9B, 2, SEQ_LENGTH, ONE_PROCESS)
        kept[version] = activations.layer_bytes(QWEN3_5_9B.layers[0])
    assert 0.2 < kept["0.6.0"] / kept[None] < 0.4
