"""Check which machines are refused for FP8, before any work."""

from __future__ import annotations

import pytest
import torch

from mkd.platform import fp8_support
from mkd.platform.fp8_support import fp8_problems


def machine(monkeypatch, capability=(9, 0), cuda="13.0", has_te=True, has_gpu=True):
    """Let this machine have one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(fp8_support, "has_transformer_engine", lambda: has_te)


@pytest.mark.parametrize(
    ("settings", "recipes", "codes"),
    [
        (dict(), {"tensorwise", "blockwise"}, []),
        (dict(has_gpu=False), set(), []),
        (dict(has_gpu=False), {"tensorwise"}, ["fp8-without-gpu"]),
        (dict(has_te=False), {"tensorwise"}, ["fp8-without-transformer-engine"]),
        (dict(capability=(8, 9)), {"tensorwise"}, []),
        (dict(capability=(8, 9)), {"blockwise"}, ["fp8-not-on-this-gpu"]),
        (dict(capability=(8, 0)), {"tensorwise", "blockwise"}, ["fp8-not-on-this-gpu"] * 2),
        (dict(cuda="12.8"), {"tensorwise", "blockwise"}, ["fp8-not-on-this-cuda"]),
    ],
)
def test_machines(settings, recipes, codes, monkeypatch):
    machine(monkeypatch, **settings)
    assert [error.code for error in fp8_problems(recipes)] == codes
