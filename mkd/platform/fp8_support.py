"""Check that this machine can multiply in FP8: a GPU with FP8 products, and Transformer Engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterator

import torch

from mkd.errors import UsageError
from mkd.platform import has_transformer_engine, local_rank
from mkd.tested_versions import FP8_TRANSFORMER_ENGINE, is_too_old_for_fp8

FIRST_CAPABILITY = {"tensorwise": (8, 9), "blockwise": (9, 0)}
"""FP8 recipe -> lowest compute capability of a GPU (Ada, Hopper), as Transformer Engine 2.11 requires it."""

BLOCKWISE_CUDA = (12, 9)
"""Lowest version of CUDA whose cuBLAS multiplies with scales of blocks."""


def fp8_problems(recipes: Collection[str], role: str = "teacher") -> Iterator[UsageError]:
    """Yield an error if this machine cannot run teachers, or the student, with these FP8 recipes."""
    flag, do = f"--{role}-precision fp8", f"use --{role}-precision bf16"
    if not recipes:
        return
    if not torch.cuda.is_available():
        why = "only GPUs have FP8 products, and torch sees none"
        yield UsageError(f"{flag} needs a GPU", why, do, code="fp8-not-possible")
    elif not has_transformer_engine():
        why = "its kernels quantise and multiply"
        do = f"install mkd's extra `te` (`mkd doctor` shows what is there), or {do}"
        yield UsageError(f"{flag} needs Transformer Engine", why, do, code="fp8-not-possible")
    elif is_too_old_for_fp8(version := transformer_engine_version()):
        what = f"{flag} with Transformer Engine {version}"
        why = f"FP8 products run in its autocast, which came with {FP8_TRANSFORMER_ENGINE}"
        do = f"install {FP8_TRANSFORMER_ENGINE} or newer (`mkd doctor` names the tested versions), or {do}"
        yield UsageError(what, why, do, code="fp8-not-possible")
    else:
        yield from _device_problems(recipes, role)


def transformer_engine_version() -> str | None:
    """Return the installed version of Transformer Engine; None if its package does not say."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_problems(recipes: Collection[str], role: str) -> Iterator[UsageError]:
    device = local_rank() % torch.cuda.device_count()
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    for recipe in sorted(recipes):
        first, do = FIRST_CAPABILITY[recipe], f"use --{role}-precision bf16"
        if capability < first:
            what = f"--{role}-fp8-recipe {recipe} on {name}, whose compute capability is {_dots(capability)}"
            yield UsageError(what, f"it needs {_dots(first)} or more", do, code="fp8-not-possible")
        elif recipe == "blockwise" and cuda < BLOCKWISE_CUDA:
            what = f"--{role}-fp8-recipe blockwise with a torch for CUDA {_dots(cuda)}"
            why = f"cuBLAS has scales of blocks from CUDA {_dots(BLOCKWISE_CUDA)} on"
            do = f"use --{role}-fp8-recipe tensorwise, or a newer torch"
            yield UsageError(what, why, do, code="fp8-not-possible")


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
