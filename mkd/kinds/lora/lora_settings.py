"""The settings of students with adapters."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import ABOVE_0, Range, option

LINEAR_LAYERS = ("qkv", "proj", "fc1", "fc2")


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters on the student's linear layers (LoRA). All other weights are frozen."""

    lora_rank: int | None = option(
        None,
        "rank of the student's adapters, which alone learn: y = W x + alpha / rank * B A x. The weights W "
        "stay those of --student-hf, without gradients and optimizer state (default: all weights learn)",
        valid=Range("1 or more", lambda x: x >= 1),
    )
    lora_alpha: float | None = option(
        None,
        "numerator of the factor alpha / rank on every adapter (default: 2 x --lora-rank)",
        valid=ABOVE_0,
    )
    lora_targets: tuple[str, ...] = option(
        LINEAR_LAYERS,
        "linear layers with adapters. qkv, proj: the projections into and out of attention (or a mixer). "
        "fc1, fc2: the projections into and out of the MLP, or of shared experts. Routed experts, routers, "
        "embedding and head have none",
    )
    lora_base: str = option(
        "bf16",
        "storage of the frozen weights that have adapters. bf16: the run's precision. nf4: 4 bits, and a "
        "scale for 64 weights, by the package bitsandbytes, for models that do not fit otherwise. The base "
        "is then the rounded model, also in --export-hf",
        choices=("bf16", "nf4"),
    )
    export_lora: str | None = option(
        None,
        "folder to write the adapters to at the end, as PEFT loads them onto --student-hf. --export-hf "
        "writes the whole model with the adapters added (default: no such folder)",
    )

    @property
    def is_on(self) -> bool:
        """True if the student learns by adapters."""
        return self.lora_rank is not None
