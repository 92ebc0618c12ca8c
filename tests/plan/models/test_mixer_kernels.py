"""Check when gated delta nets run as fused kernels, and that the plan says why not."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mkd.kinds.known_kinds import KINDS
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.facts import RunFacts
from mkd.plan.footprint.activations import Activations
from mkd.plan.forecast import Forecast
from mkd.plan.models import mixer_kernels
from mkd.plan.models.mixer_kernels import unfused_reason
from mkd.plan.parallel_sizes import ONE_PROCESS
from tests.plan.shapes import QWEN3_5_9B, SEQ_LENGTH, config
from tests.reported import refused

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


def test_a_broken_installation_is_an_error_when_the_model_is_built(tmp_path, monkeypatch):
    from mkd.models.mixers import fused_recurrence
    from mkd.models.mixers.mixer import _recurrence

    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise OSError('libtriton.so: cannot open')")
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (mixer_kernels, fused_recurrence):
        monkeypatch.setattr(module, "fla_version", lambda: "0.6.1")
    fused_recurrence.kernels.cache_clear()
    with refused("package-missing: fla-core 0.6.1 cannot be imported: libtriton.so"):
        _recurrence(SimpleNamespace(params_dtype=torch.bfloat16, deterministic_mode=False), MIXER)
