"""`LayerShape`: everything that may differ from one decoder layer to the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeShape:
    """Rotary position embedding. `kind` is `default`, `linear`, `llama3` or `longrope`."""

    theta: float
    rotary_dim: int  # leading channels of each head that are rotated
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer: norm, grouped-query attention, norm, gated MLP; two residual connections."""

    ffn_hidden_size: int  # width of the gate and of the up projection
    rope: RopeShape
    activation: str = "silu"  # function of the gate: `silu` or `gelu_tanh`
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head before the rotation
    post_norms: bool = False  # RMSNorm of the output of attention and MLP before the residual addition
    sliding_window: int | None = None  # tokens that a query sees, itself included; None: all earlier ones
