"""The kernels of mixers on GPUs: fused ones, or plain torch and why."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from mkd.config.schema import TrainingConfig
from mkd.families.mixer_shape import MixerShape
from mkd.tested_versions import FUSED_MIXERS

MOST_CHANNELS = 256  # of a head


def unfused_reason(mixer: MixerShape, is_bf16: bool, is_exact: bool) -> str | None:
    """Return why a mixer runs in plain torch on GPUs; None if fused kernels run.

    `is_bf16`: activations have this precision. `is_exact`: --deterministic-mode.
    """
    if not mixer.has_corrections:
        return f"mkd has no fused kernels of a {mixer.title}"
    if is_exact:
        return "--deterministic-mode: fused kernels are tuned anew in every process"
    if not is_bf16:
        return "fused kernels are for --bf16"
    if max(mixer.key_dim, mixer.value_dim) > MOST_CHANNELS:
        return f"fused kernels have heads of at most {MOST_CHANNELS} channels"
    version = fla_version()
    if version is None:
        return "fla-core is not installed: pip install 'megatron-kd[hybrid]'"
    if not FUSED_MIXERS.holds(version):
        return f"fla-core {version} is not {FUSED_MIXERS}: pip install 'megatron-kd[hybrid]'"
    return None


def runs_fused(mixer: MixerShape, training: TrainingConfig) -> bool:
    """Return True if a mixer of this run has fused kernels on GPUs."""
    return unfused_reason(mixer, training.bf16, training.deterministic_mode) is None


@cache
def fla_version() -> str | None:
    """Return the version of fla-core in this environment; None if it is not installed."""
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None
