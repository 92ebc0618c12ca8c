"""Check a teacher's residency on GPUs: copies overlap with computation, every layer gets its own weights."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from tests.models.streamed import stream_loaded
from tests.models.test_hf_parity import pack
from tests.ranks import skip_unless_gpus_take
from tests.tiny_models import make_model

pytestmark = pytest.mark.gpu
SIZES = dict(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=7,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=1000,
    max_position_embeddings=4096,
)
COPIES_LAST, COMPUTATION_LASTS = 64, 4096  # tokens of a row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("residency_gpu") / "teacher", "qwen3", scale=1.0, **SIZES)


def build(folder, transformer_engine):
    """Return (context, a frozen model in bf16 with its weights)."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.platform import detect

    context = ParallelContext.create(replace(detect(), transformer_engine=transformer_engine))
    shape = ModelShape.from_hf_dir(folder)
    layout = PipelineLayout.even(shape.num_layers, 1)
    (model,) = build_model_parts(shape, layout, ModelOptions(dtype=torch.bfloat16), context)
    load_hf_weights(model, shape, HFCheckpoint(folder), context)
    return context, model.eval().requires_grad_(False)


def row(context, seed, length):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1000, (1, length), generator=generator).to(context.device)
    documents = pack((length - 10, 10), 0, context.platform.transformer_engine, context.device)
    positions = torch.arange(length, device=context.device)[None]
    return lambda model: model(tokens, positions, packed_seq_params=documents)


@torch.no_grad()
def outputs(context, model, length):
    """Return outputs of twelve micro-batches queued at once, other work between some; fp32 on the CPU."""
    rows = [row(context, seed, length) for seed in range(12)]
    other = torch.randn(4096, 4096, device=context.device)
    torch.cuda.synchronize()
    results = []
    for index, run in enumerate(rows):
        results.append(run(model))
        for _ in range(index % 3 * 4):
            other = (other @ other).clamp(-1, 1)
    return torch.stack(results).float().cpu()


@torch.no_grad()
def costs(context, model):
    """Return costs of one forward pass: allocations, peak above the start (bytes), synchronising calls."""
    run = row(context, 1, COMPUTATION_LASTS)
    run(model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, bytes_before = (
        torch.cuda.memory_stats()["allocation.all.allocated"],
        torch.cuda.memory_allocated(),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run(model)
        torch.cuda.set_sync_debug_mode("default")
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    syncs = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    return allocations, torch.cuda.max_memory_allocated() - bytes_before, syncs


def requested_bytes():
    """Return the bytes of tensors on the device, without what the allocator adds to each."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def streamed_against_device(folder, transformer_engine):
    """Return (outputs of short and long rows, costs, bytes at rest) on the device, and then elsewhere.

    The layers are on the host of one process, or split over several. Return also the bytes that are kept
    there and those of the buffers.
    """
    context, model = build(folder, transformer_engine)
    group = context.peer_group(context.world_size) if context.world_size > 1 else None
    measured, stream = [], None
    for is_streamed in (False, True):
        before = requested_bytes()
        if is_streamed:
            stream = stream_loaded([model], context.device, group)
        moved = before - requested_bytes()
        results = [outputs(context, model, length) for length in (COPIES_LAST, COMPUTATION_LASTS)]
        measured.append((results, costs(context, model), moved))
    parameters = [p for layer in model.decoder.layers for p in layer.parameters()]
    assert all(p.is_pinned() if group is None else p.is_cuda for p in parameters)
    return measured, stream.kept_bytes, stream.device_bytes


@pytest.mark.parametrize("transformer_engine", [True, False])
@pytest.mark.parametrize("processes", [1, 2], ids=["host", "peers"])
def test_same_bits_same_allocations_and_no_synchronisation(processes, transformer_engine, folder, gpu_ranks):
    skip_unless_gpus_take(processes)
    for (device, streamed), kept_bytes, device_bytes in gpu_ranks.run(
        streamed_against_device, processes, folder, transformer_engine
    ):
        for one, other in zip(device[0], streamed[0], strict=True):
            assert one.isfinite().all() and torch.equal(one, other)
        assert streamed[1] == device[1]
        whole = kept_bytes * processes
        kept_on_device = 0 if processes == 1 else kept_bytes
        assert device_bytes < whole / 3
        assert streamed[2] == pytest.approx(whole - kept_on_device - device_bytes, rel=0.01)
