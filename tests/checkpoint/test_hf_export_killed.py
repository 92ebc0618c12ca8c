"""Check that an export killed before any of its changes to the folder leaves no half model."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest
import torch

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_folder import OLD
from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.checkpoint.hf.hf_weights import load_hf_weights
from mkd.checkpoint.hf.hf_writer import export_hf
from mkd.errors import MkdError
from mkd.models.builder import build_model_parts
from mkd.models.transformer_config import ModelOptions
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape
from tests.checkpoint.saved_tensors import all_tensors
from tests.checkpoint.tiny_saves import run_forked
from tests.tiny_models import make_model

CHANGES = ("open", "os.rename", "os.remove", "os.truncate")  # audit events of Python


def export_and_die(context, source, out, shard_bytes, changes):
    """Export `source` to `out`; kill the process before its change number `changes` to that folder."""
    left = changes

    def count(event, arguments):
        nonlocal left
        is_change = event in CHANGES and not (event == "open" and arguments[1] in ("r", "rb"))
        if is_change and str(arguments[0]).startswith(str(out)):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    shape = ModelShape.from_hf_dir(source)
    layout = PipelineLayout((shape.num_layers,), 1, 1)
    (chunk,) = build_model_parts(shape, layout, ModelOptions(), context, shape.padded_vocab_size(1))
    load_hf_weights(chunk, shape, HFCheckpoint(source), context)
    sys.addaudithook(count)
    export_hf(
        [(chunk, 0)], shape, out, context=context, assets=HFAssets.of(source), max_shard_bytes=shard_bytes
    )


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def what_is_in(folder, models):
    """Return the name of the model that `folder` holds, or None if readers refuse it. Anything else fails."""
    try:
        HFCheckpoint(folder)
    except MkdError:
        return None
    tensors = all_tensors(folder)
    (name,) = [name for name, expected in models.items() if equal(tensors, expected)]
    return name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return {name: folder} of two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, "llama", seed=seed) for seed, name in enumerate(("old", "new"))}


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "shard_bytes, step",
    [
        pytest.param(5_000_000_000, 7, id="one file, every seventh"),
        pytest.param(5_000_000_000, 1, id="one file", marks=pytest.mark.slow),
        pytest.param(60_000, 1, id="shards", marks=pytest.mark.slow),
    ],
)
def test_killed_before_every_change(shard_bytes, step, models, tmp_path):
    """The folder holds the old model, none, or the new one, in this order; the next export succeeds."""
    tensors = {name: all_tensors(folder) for name, folder in models.items()}
    before = tmp_path / "before"
    assert run_forked(1, export_and_die, models["old"], before, shard_bytes, -1) == [(0, None)]
    assert what_is_in(before, tensors) == "old"
    seen, code, changes = [], -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        folder = shutil.copytree(before, tmp_path / str(changes))
        ((code, _),) = run_forked(1, export_and_die, models["new"], folder, shard_bytes, changes)
        seen.append(what_is_in(folder, tensors))
        changes += step
    assert code == 0 and changes > 10
    assert seen == sorted(seen, key=["old", None, "new"].index) and set(seen) == {"old", None, "new"}
    for wreck in (tmp_path / str(place * step) for place, name in enumerate(seen) if name is None):
        restored = shutil.copytree(wreck, tmp_path / f"{wreck.name} restored")
        shutil.copytree(wreck / OLD, restored, dirs_exist_ok=True)
        assert what_is_in(restored, tensors) == "old"  # nothing of it is lost
    assert run_forked(1, export_and_die, models["new"], wreck, shard_bytes, -1) == [(0, None)]
    assert what_is_in(wreck, tensors) == "new" and not list(wreck.glob(".mkd*"))
