"""Run Megatron-core on CPU. Only this file of mkd replaces attributes of another library.

Megatron-core asks for "cuda" devices, streams and generators by name. Without a GPU, this file maps
those names to the CPU by replacing attributes. (A TorchFunctionMode would be shorter, but it sees every call
of torch and costs a quarter of a small model's time.) Arithmetic stays Megatron's, except for the norm of
gradients, whose fallback is not exact enough. Communication and schedules are Megatron's; gloo carries the
messages.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like ones ones_like rand rand_like randint randint_like "
    "randn randn_like randperm tensor zeros zeros_like"
)
METHODS = "new_empty new_full new_ones new_tensor new_zeros to"
NORM_ELEMENTS = 2**14  # few enough that fp32 adds up their squares accurately
FOR_GPUS = ("transformer_engine", "apex", "amp_C")  # libraries that Megatron uses whenever they are installed


def install() -> None:
    """Map "cuda" to the CPU for this process. Idempotent; refuses if there is a GPU."""
    assert not torch.cuda.is_available(), "the CPU shim must not hide a GPU"
    if getattr(torch.cuda, "_mkd_cpu_shim", None) is not None:
        return
    for name in FOR_GPUS:
        sys.modules.setdefault(name, None)  # importing it fails, unless it was imported before
    with _nothing_compiled(), _not_yet("wandb"):
        import megatron.core  # noqa: F401
    _replace_tensor_functions()
    _replace_device_functions()
    _replace_generators()
    _replace_norm()
    torch.cuda._mkd_cpu_shim = True


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Turn torch.compile into a decorator that does nothing, inside the `with` block.

    Megatron decorates its fused functions when it is imported. That loads the compiler and adds two seconds
    to every start, for functions that are fused for GPUs. If Megatron was imported before, nothing changes.
    """
    compile_function = torch.compile
    torch.compile = lambda function=None, **settings: function or (lambda decorated: decorated)
    try:
        yield
    finally:
        torch.compile = compile_function


@contextlib.contextmanager
def _not_yet(package: str) -> Iterator[None]:
    """Make imports of `package` fail in the block. Megatron imports wandb if it is installed."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None
    try:
        yield
    finally:
        del sys.modules[package]


def _replace_tensor_functions() -> None:
    """Create and keep tensors for "cuda" on the CPU; `Tensor.type()` calls them CUDA tensors."""
    _device_constructors()  # caches the original factories, so that `with torch.device(...)` recognises them
    for owner, names in ((torch, FACTORIES), (Tensor, METHODS)):
        for name in names.split():
            setattr(owner, name, _on_cpu(getattr(owner, name)))
    Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    Tensor.type = _typed_as_cuda(Tensor.type)
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    ShardedTensor.init_data.__defaults__ = (torch.empty,)  # it has kept the function from before


def _on_cpu(function: Callable) -> Callable:
    """Return `function` with a device "cuda" (by name, or after a tensor) replaced by the CPU."""

    @functools.wraps(function)
    def on_cpu(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        elif len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return function(*args, **kwargs)

    return on_cpu


def _typed_as_cuda(type_of: Callable) -> Callable:
    @functools.wraps(type_of)
    def typed_as_cuda(tensor, *args, **kwargs):
        answer = type_of(tensor, *args, **kwargs)
        return answer if args or kwargs else answer.replace("torch.", "torch.cuda.", 1)

    return typed_as_cuda


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Done:
    """Replacement for CUDA streams and events: on the CPU everything is already in order."""

    def __init__(self, *args, **kwargs):
        pass

    def synchronize(self, *args, **kwargs) -> None:
        pass

    wait = wait_stream = wait_event = record = synchronize

    def record_event(self, event=None):
        return event or _Done()

    def query(self) -> bool:
        return True


def _replace_device_functions() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.set_device = lambda device: None
    cuda.Stream = cuda.Event = _Done
    cuda.current_stream = cuda.default_stream = lambda device=None: _Done()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None


def _replace_generators() -> None:
    """Map Megatron's "CUDA" random states to states of the CPU's default generator."""

    def get_state(device=CPU, clone=False, graph_safe=False):
        return torch.get_rng_state()

    def set_state(state, device=-1, graph_safe=False):
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.random.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    # Megatron warns if device code draws from the CPU's generator, which is the right one here.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _replace_norm() -> None:
    """Replace the norm of gradients by one with a relative error of 1e-7: [1] fp32 over a list of tensors.

    Megatron's fallback for the fused kernel takes `torch.norm` of whole tensors, which is 2e-3 off for a
    large embedding.
    """
    from megatron.core.optimizer import clip_grads

    def l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args):
        tensors = (tensor for tensors in tensor_lists for tensor in tensors)
        parts = [part for tensor in tensors for part in tensor.reshape(-1).split(NORM_ELEMENTS)]
        return torch.stack(torch._foreach_norm(parts)).double().square().sum().sqrt().float().reshape(1), None

    clip_grads.l2_norm_impl = l2_norm
