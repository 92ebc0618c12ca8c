"""Check the CPU shim: calls of megatron-core to "cuda" run on the CPU, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from mkd.platform import cpu, detect
from tests.ranks import REPOSITORY


def tensor_calls():
    """Return (device, or result) of each way to ask for a CUDA tensor."""
    detect()
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shard = ShardedTensor("x", None, torch.float32, (2,), (2,), (0,), (1,))
    shard.init_data("cuda")
    x = torch.arange(4.0)
    made = {
        "of a checkpoint": shard.data,
        "factory": torch.empty(2, device="cuda"),
        "factory with index": torch.zeros(2, device="cuda:0"),
        "factory with device": torch.ones(2, device=torch.device("cuda", 0)),
        "current device": torch.tensor([1.0], device=torch.cuda.current_device()),
        "like": torch.zeros_like(x, device="cuda"),
        "new": x.new_empty(3, device="cuda"),
        "to": x.to("cuda"),
        "to by name": x.to(device="cuda", dtype=torch.float64),
        "to with dtype": x.to("cuda", torch.float64),
        "module": next(torch.nn.Linear(2, 2).cuda().parameters()),
    }
    return (
        {name: str(tensor.device) for name, tensor in made.items()},
        x.cuda() is x,
        made["to with dtype"].dtype,
    )


def gradient_through_cuda():
    """Return the gradient of sum(x^2) along a path that moves x to "cuda" twice."""
    detect()
    x = torch.arange(3.0, requires_grad=True)
    (x.cuda() * x.to("cuda")).sum().backward()
    return x.grad.tolist()


def type_names():
    """Megatron's DDP groups gradients by `Tensor.type()`, and compares it with CUDA names."""
    detect()
    x = torch.zeros(2)
    return x.type(), x.bfloat16().type(), x.type(torch.int64).dtype, x.type("torch.DoubleTensor").dtype


def other_devices():
    """Return the devices of tensors made on other devices, which the replacements do not touch."""
    detect()
    with torch.device("meta"):
        made = {
            "factory": torch.zeros(2),
            "tensor": torch.tensor([1.0]),
            "layer": torch.nn.Linear(2, 2).weight,
        }
    made |= {
        "by name": torch.empty(2, device="meta"),
        "to": torch.ones(2).to("meta"),
        "like": torch.ones_like(made["factory"]),
    }
    return {name: str(tensor.device) for name, tensor in made.items()}


def streams_and_events():
    detect()
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        event.record(stream)
        event.record(stream=stream)
    stream.wait_event(event)
    stream.wait_event(event=event)
    stream.wait_stream(stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    return event.query(), isinstance(stream.record_event(), torch.cuda.Event)


def generators():
    """Return True if a state is restored, and figures of Megatron's tracker.

    It leaves the default alone, draws as its seed says, and advances.
    """
    detect()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    restored = torch.equal(torch.rand(4), first)

    torch.cuda.manual_seed(5)
    expected_default = torch.rand(4)
    torch.cuda.manual_seed(7)
    expected_tracked = torch.rand(4)

    torch.cuda.manual_seed(5)
    tracker = CudaRNGStatesTracker()
    tracker.add("tensor-parallel", 7)
    with tracker.fork("tensor-parallel"):
        tracked = torch.rand(4)
    untouched = torch.equal(torch.rand(4), expected_default)
    with tracker.fork("tensor-parallel"):
        moved = not torch.equal(torch.rand(4), tracked)
    return restored, untouched, torch.equal(tracked, expected_tracked), moved


def norm_of_gradients():
    """Return the norm of a large and a small gradient: (as the optimizer computes it, in float64)."""
    detect()
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (5_000_003, 7)]
    exact = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
    return get_grad_norm_fp32(gradients), exact.item()


def install_twice():
    """Return (True if a second installation changes no attribute, is_available, platform's description)."""
    cpu.install()
    once = dict(vars(torch.cuda))
    cpu.install()
    return once == dict(vars(torch.cuda)), torch.cuda.is_available(), detect().describe()


def test_cuda_tensors_are_cpu_tensors(ranks):
    ((devices, is_same, dtype),) = ranks.run(tensor_calls, 1)
    assert set(devices.values()) == {"cpu"}, devices
    assert is_same and dtype == torch.float64


def test_moving_keeps_the_graph(ranks):
    assert ranks.run(gradient_through_cuda, 1) == [[0.0, 2.0, 4.0]]


def test_type_names_are_those_of_cuda(ranks):
    ((single, half, converted, by_name),) = ranks.run(type_names, 1)
    assert (single, half) == ("torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor")
    assert (converted, by_name) == (torch.int64, torch.float64)


def test_other_devices_stay_what_they_are(ranks):
    (devices,) = ranks.run(other_devices, 1)
    assert set(devices.values()) == {"meta"}, devices


def test_streams_and_events_are_always_done(ranks):
    assert ranks.run(streams_and_events, 1) == [(True, True)]


def test_generators_are_those_of_the_cpu(ranks):
    assert ranks.run(generators, 1) == [(True, True, True, True)]


def test_the_norm_of_large_gradients_is_exact(ranks):
    ((norm, exact),) = ranks.run(norm_of_gradients, 1)
    assert norm == pytest.approx(exact, rel=1e-6)


def test_installing_again_changes_nothing(ranks):
    ((unchanged, is_available, description),) = ranks.run(install_twice, 1)
    assert unchanged and not is_available
    assert description == "CPU platform: gloo, local layer spec, 1 thread a process"


def test_a_gpu_is_never_hidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    current_device = torch.cuda.current_device
    with pytest.raises(AssertionError):
        cpu.install()
    assert torch.cuda.current_device is current_device


def test_what_is_for_gpus_stays_outside(tmp_path):
    """Megatron loads no Transformer Engine, no compiler and no wandb here, even if they are installed."""
    for name in cpu.FOR_GPUS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('there is no GPU')")
    (tmp_path / "wandb.py").write_text("there = True")
    code = """
import sys, torch
from mkd.platform import detect
detect()
import megatron.core.optimizer, mkd.models.builder
assert megatron.core.optimizer.Adam is torch.optim.AdamW
assert "torch._inductor" not in sys.modules
assert torch.compile.__module__ == "torch"
assert "wandb" not in sys.modules
import wandb
assert wandb.there
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
