"""Megatron-core on CPU: the only file of mkd that replaces attributes of another library.

megatron-core 0.16.1 asks for "cuda" devices, streams and generators by name. Without a GPU those names are mapped to the
CPU here, by replacing attributes. (A TorchFunctionMode would be shorter, but sees every call of torch: a quarter of a small
model's time.) Of the arithmetic one stand-in of Megatron's is replaced, the norm of gradients, which was not exact enough.
Communication and schedules are Megatron's; gloo carries the messages.
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
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
)
FACTORIES += ("randint", "randint_like", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like")
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
NORM_ELEMENTS = 2**14  # whose squares fp32 adds up well
FOR_GPUS = ("transformer_engine", "apex", "amp_C")  # libraries that Megatron takes wherever it finds them


def install() -> None:
    """Map "cuda" to the CPU for this process. Idempotent; refuses to run where a GPU exists."""
    assert not torch.cuda.is_available(), "the CPU shim must not hide a GPU"
    if getattr(torch.cuda, "_mkd_cpu_shim", None) is not None:
        return
    _hide(FOR_GPUS)
    with _nothing_compiled(), _not_yet("wandb"):
        import megatron.core  # noqa: F401
    _replace_tensor_functions()
    _replace_device_functions()
    _replace_generators()
    _replace_norm()
    torch.cuda._mkd_cpu_shim = True


def _hide(packages: tuple[str, ...]) -> None:
    """Let their import fail in this process, as if they were not installed; what has been imported before stays."""
    for name in packages:
        sys.modules.setdefault(name, None)


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Leave the functions that are decorated with torch.compile in here as they are.

    Megatron decorates its fused functions when it is imported, and that loads the compiler: two seconds of every start, for
    functions that are fused for GPUs. Where it has been imported before, nothing changes.
    """
    compile_function = torch.compile
    torch.compile = lambda function=None, **settings: function or (lambda decorated: decorated)
    try:
        yield
    finally:
        torch.compile = compile_function


@contextlib.contextmanager
def _not_yet(package: str) -> Iterator[None]:
    """Let its import fail in here, unless it has been imported before; Megatron takes wandb wherever it finds it."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None
    try:
        yield
    finally:
        del sys.modules[package]


def _replace_tensor_functions() -> None:
    """Tensors asked for on "cuda" are made on, or stay on, the CPU; `Tensor.type()` says that they are CUDA's."""
    _device_constructors()  # `with torch.device(...)` keeps a list of the factories: of those that the replacements call
    for owner, names in ((torch, FACTORIES), (Tensor, METHODS)):
        for name in names:
            setattr(owner, name, _on_cpu(getattr(owner, name)))
    Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    Tensor.type = _typed_as_cuda(Tensor.type)


def _on_cpu(function: Callable) -> Callable:
    """The same function, for which a device "cuda" (by name, or the argument after a tensor) is the CPU."""

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


class _Stream:
    """Stands for a CUDA stream; on the CPU everything is already in order."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event=None):
        return event or _Event()


class _Event:
    """Stands for a CUDA event; always complete."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None) -> None:
        pass

    def wait(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _replace_device_functions() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.set_device = lambda device: None
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None


def _replace_generators() -> None:
    """Megatron's "CUDA" random states become states of the CPU's default generator."""

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
    # It warns when device code draws from the CPU's generator; here that generator is the device's.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _replace_norm() -> None:
    """Of gradients, over all elements of a list of tensors: [1] fp32, relative error 1e-7.

    Megatron's stand-in for the fused kernel takes `torch.norm` of whole tensors, which is 2e-3 off for a large embedding.
    """
    from megatron.core.optimizer import clip_grads

    def l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args):
        parts = [
            part
            for tensors in tensor_lists
            for tensor in tensors
            for part in tensor.reshape(-1).split(NORM_ELEMENTS)
        ]
        return torch.stack(torch._foreach_norm(parts)).double().square().sum().sqrt().float().reshape(1), None

    clip_grads.l2_norm_impl = l2_norm
