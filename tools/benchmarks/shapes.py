"""Shapes of known models as Hugging Face configurations, to build pairs of random weights without files."""

from __future__ import annotations

from mkd.errors import UsageError
from mkd.plan.model_shape import ModelShape


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, tied: bool) -> dict:
    return dict(
        model_type="qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=ffn,
        vocab_size=151936,
        tie_word_embeddings=tied,
        rope_theta=1e6,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
    )


def _llama3(
    hidden: int, layers: int, heads: int, head_dim: int, ffn: int, tied: bool, rope_factor: float
) -> dict:
    rope = dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=rope_factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return dict(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        intermediate_size=ffn,
        vocab_size=128256,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    )


def _tiny(hidden: int, layers: int, tied: bool) -> dict:
    return dict(
        model_type="qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=2 * hidden,
        vocab_size=500,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
    )


SHAPES = {
    "tiny-student": _tiny(32, 2, tied=True),
    "tiny-teacher": _tiny(64, 4, tied=False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
    "llama3.2-1b": _llama3(2048, 16, 32, 64, 8192, tied=True, rope_factor=32.0),
    "llama3.2-3b": _llama3(3072, 28, 24, 128, 8192, tied=True, rope_factor=32.0),
    "llama3.1-8b": _llama3(4096, 32, 32, 128, 14336, tied=False, rope_factor=8.0),
}


def shape_of(name: str) -> ModelShape:
    """Return the shape of that name. Raises UsageError if it is not in the table."""
    if name not in SHAPES:
        raise UsageError(
            f"shape {name!r} is not known",
            "",
            f"choose one of: {', '.join(SHAPES)}",
            code="benchmark-shape-unknown",
        )
    return ModelShape.from_hf_config(SHAPES[name])
