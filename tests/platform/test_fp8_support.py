"""Check which machines are refused for FP8, before any work."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from mkd.platform import fp8_support
from mkd.platform.fp8_support import fp8_problems
from tests.reported import reports


def machine(monkeypatch, capability=(9, 0), cuda="13.0", has_te=True, has_gpu=True, te="2.11.0"):
    """Let this machine have one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(fp8_support, "has_transformer_engine", lambda: has_te)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"transformer-engine": te}[name])


@pytest.mark.parametrize(
    ("settings", "recipes", "codes"),
    [
        (dict(), {"tensorwise", "blockwise"}, []),
        (dict(has_gpu=False), set(), []),
        (dict(has_gpu=False), {"tensorwise"}, ["fp8-not-possible: needs a GPU"]),
        (dict(has_te=False), {"tensorwise"}, ["fp8-not-possible: needs Transformer Engine"]),
        (dict(te="2.8.0+cu12"), {"blockwise"}, ["fp8-not-possible: with Transformer Engine"]),
        (dict(te="2.9.0a0"), {"tensorwise"}, []),
        (dict(capability=(8, 9)), {"tensorwise"}, []),
        (dict(capability=(8, 9)), {"blockwise"}, ["fp8-not-possible: whose compute capability is"]),
        (
            dict(capability=(8, 0)),
            {"tensorwise", "blockwise"},
            ["fp8-not-possible: whose compute capability is"] * 2,
        ),
        (
            dict(cuda="12.8"),
            {"tensorwise", "blockwise"},
            ["fp8-not-possible: --teacher-fp8-recipe blockwise"],
        ),
    ],
)
def test_machines(settings, recipes, codes, monkeypatch):
    machine(monkeypatch, **settings)
    assert reports(fp8_problems(recipes)) == codes


def test_an_old_transformer_engine_is_named_with_what_it_lacks(monkeypatch):
    machine(monkeypatch, te="2.8.0")
    (error,) = fp8_problems({"tensorwise"})
    assert "--teacher-precision fp8 with Transformer Engine 2.8.0" in str(error)
    assert "autocast, which came with 2.9" in str(error) and "use --teacher-precision bf16" in str(error)


def test_a_transformer_engine_without_version_is_tried(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    machine(monkeypatch)
    monkeypatch.setattr(importlib.metadata, "version", unknown)
    assert not list(fp8_problems({"tensorwise"}))
