"""Check that processes read only the slices of their experts, and export the bytes of the source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import make_model


def round_trip(source, out, expert_parallel, pipeline_parallel=1, tensor_parallel=1):
    """Load `source` with its experts spread over processes and export it to `out`; return the bytes read."""
    from mkd.checkpoint.hf.hf_assets import HFAssets
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint, load_hf_weights
    from mkd.checkpoint.hf.hf_writer import export_hf
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.model_shape import ModelShape
    from mkd.platform import detect

    context = ParallelContext.create(
        detect(),
        expert_parallel=expert_parallel,
        pipeline_parallel=pipeline_parallel,
        tensor_parallel=tensor_parallel,
    )
    shape, checkpoint = ModelShape.from_hf_dir(source), HFCheckpoint(source)
    options = ModelOptions(dtype=torch.bfloat16, sequence_parallel=True)
    layout = PipelineLayout.even(shape.num_layers, pipeline_parallel)
    (model,) = build_model_parts(shape, layout, options, context)
    load_hf_weights(
        model,
        shape,
        checkpoint,
        first_layer=model.first_layer,
        tp_rank=context.tp_rank,
        tp_size=context.tp_size,
        experts=context.experts(shape.num_experts),
    )
    export_hf([(model, model.first_layer)], shape, out, context=context, assets=HFAssets.of(source))
    return checkpoint.bytes_read


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_an_export_has_the_bytes_of_its_source(family, ranks, tmp_path):
    source = make_model(tmp_path / "source", family, dtype=torch.bfloat16)
    expected, read = tensors(source), {}
    assert all(tensor.dtype == torch.bfloat16 for tensor in expected.values())
    experts = sum(t.nbytes for name, t in expected.items() if ".experts." in name)
    for world, layout in ((1, (1,)), (2, (2,)), (4, (4, 1, 2)), (4, (2, 2))):
        out = tmp_path / f"out{world}{len(layout)}"
        read[world, layout] = ranks.run(round_trip, world, source, out, *layout)
        found = tensors(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (everything,) = read[1, (1,)]
    assert read[2, (2,)] == [everything - experts // 2] * 2
