"""Save models as Megatron checkpoints at one layout, and export them at another: heads are cut anew."""

from __future__ import annotations

import pytest
import torch

from mkd.checkpoint.distributed import TrainingState, load_checkpoint, save_checkpoint
from mkd.checkpoint.folders import TrainingPosition, find_checkpoint
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.hf.hf_writer import export_hf
from mkd.convert.models import build_model, load_from_hf
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.platform import detect
from tests.checkpoint.saved_tensors import all_tensors
from tests.tiny_models import make_model


def save(folder, checkpoint, tp):
    """Convert `folder` on two ranks; what tensor parallelism leaves of them is pipeline stages."""
    context = ParallelContext.create(detect(), Sizes(tensor=tp, pipeline=2 // tp))
    model = load_from_hf(folder, ModelShape.from_hf_dir(folder), torch.float32, context)
    save_checkpoint(checkpoint, TrainingState([model]), TrainingPosition(), context, HFAssets.of(folder))


def export(checkpoint, folder, out, tp):
    context = ParallelContext.create(detect(), Sizes(tensor=tp, pipeline=2 // tp))
    shape = ModelShape.from_hf_dir(folder)
    model = build_model(shape, torch.float32, context)
    load_checkpoint(find_checkpoint(checkpoint), TrainingState([model]), context, is_verified=True)
    export_hf([(model, model.first_layer)], shape, out, context=context, assets=HFAssets.of(folder))


@pytest.mark.parametrize(
    ("family", "there", "back"),
    [
        *(("deepseek", 2, 1), ("moonlight", 1, 2), ("deepseek-experts", 2, 1)),
        *(("olmo3-padded", 2, 1), ("olmo3-padded", 1, 2), ("hunyuan_v1_dense", 2, 1)),
    ],
)
def test_heads_are_cut_anew(family, there, back, tmp_path, ranks):
    """3 heads or groups are padded to 4 at TP 2 and not padded at TP 1, norms of all heads with them."""
    folder = make_model(tmp_path / "model", family)
    ranks.run(save, 2, folder, tmp_path / "save", there)
    ranks.run(export, 2, tmp_path / "save", folder, tmp_path / "out", back)
    found, expected = all_tensors(tmp_path / "out"), all_tensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
