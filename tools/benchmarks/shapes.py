"""Shapes of known models as Hugging Face configurations, to build pairs of random weights without files."""

from __future__ import annotations

from mkd.errors import UsageError
from mkd.plan.models.model_shape import ModelShape


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


def _qwen3_moe(hidden: int, layers: int, heads: int, groups: int, head_dim: int, experts: tuple) -> dict:
    """Return a configuration; `experts` are their number, those of a token, and channels of each."""
    number, top_k, ffn = experts
    return _qwen3(hidden, layers, heads, 3 * hidden, tied=False) | dict(
        model_type="qwen3_moe",
        num_key_value_heads=groups,
        head_dim=head_dim,
        num_experts=number,
        num_experts_per_tok=top_k,
        moe_intermediate_size=ffn,
        norm_topk_prob=True,
        decoder_sparse_step=1,
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


def _qwen3_5(hidden: int, layers: int, heads: tuple[int, int], values: int, ffn: int, tied: bool) -> dict:
    """Return a text model with a gated delta net in three of four layers; `values` are its value heads."""
    return dict(
        model_type="qwen3_5_text",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=256,
        intermediate_size=ffn,
        linear_num_key_heads=16,
        linear_num_value_heads=values,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=248320,
        tie_word_embeddings=tied,
        max_position_embeddings=262144,
    )


def _qwen3_5_moe(hidden: int, layers: int, heads: tuple[int, int], values: int) -> dict:
    """Return a text model like `_qwen3_5` with 256 experts of 512 channels, 8 a token, and a shared one."""
    return _qwen3_5(hidden, layers, heads, values, 512, tied=False) | dict(
        model_type="qwen3_5_moe_text",
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )


def _nemotron_h(pattern: str, hidden: int, heads: tuple[int, int], mamba: tuple[int, int], ffn: int) -> dict:
    """Return a model of one block a layer.

    `heads` are the numbers of query and key/value heads, `mamba` number and size of a mixer's.
    """
    return dict(
        model_type="nemotron_h",
        hybrid_override_pattern=pattern,
        hidden_size=hidden,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=128,
        intermediate_size=ffn,
        mamba_num_heads=mamba[0],
        mamba_head_dim=mamba[1],
        ssm_state_size=128,
        n_groups=8,
        vocab_size=131072,
        max_position_embeddings=8192,
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


def _qwen2_5_vl(hidden: int, layers: int, heads: int, groups: int, ffn: int, vocab: int, tied: bool) -> dict:
    vision = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14)
    return dict(
        model_type="qwen2_5_vl",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        rope_theta=1e6,
        rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
        max_position_embeddings=128000,
        rms_norm_eps=1e-6,
        image_token_id=151655,
        vision_config=dict(
            vision, out_hidden_size=hidden, window_size=112, fullatt_block_indexes=[7, 15, 23, 31]
        ),
    )


_SMOLLM2 = dict(
    model_type="llama",
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    tie_word_embeddings=True,
    rope_theta=1e5,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
)
SHAPES = {
    "tiny-student": _tiny(32, 2, tied=True),
    "tiny-teacher": _tiny(64, 4, tied=False),
    "tiny-delta": _qwen3_5(32, 4, (2, 1), 32, 64, tied=True)
    | dict(head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, vocab_size=500),
    "tiny-mamba": _nemotron_h("M-*ME-", 32, (2, 1), (8, 8), 64)
    | dict(head_dim=16, ssm_state_size=16, vocab_size=500, moe_intermediate_size=32)
    | dict(moe_shared_expert_intermediate_size=32, moe_latent_size=16),
    "tiny-moe": _qwen3_moe(32, 2, 4, 2, 16, (8, 2, 16)) | dict(vocab_size=500),
    "smollm2-135m": _SMOLLM2,
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-6b": _qwen3(3584, 30, 32, 11776, tied=False),  # Qwen3-8B as it is pruned for distillation
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 128, (128, 8, 768)),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 4, 128, (128, 8, 1536)),
    "qwen3.5-2b": _qwen3_5(2048, 24, (8, 2), 16, 6144, tied=True),
    "qwen3.5-9b": _qwen3_5(4096, 32, (16, 4), 32, 12288, tied=False),
    "qwen3.5-35b-a3b": _qwen3_5_moe(2048, 40, (16, 2), 32),
    "nemotron-h-8b": _nemotron_h(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, (32, 8), (128, 64), 21504
    ),
    "nemotron-3-nano": _nemotron_h(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, (32, 2), (64, 64), 1856
    )
    | dict(n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856)
    | dict(moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5),
    "qwen2.5-vl-3b": _qwen2_5_vl(2048, 36, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-vl-7b": _qwen2_5_vl(3584, 28, 28, 4, 18944, 152064, tied=False),
    "llama3.2-1b": _llama3(2048, 16, 32, 64, 8192, tied=True, rope_factor=32.0),
    "llama3.2-1b-untied": _llama3(2048, 16, 32, 64, 8192, tied=False, rope_factor=32.0),
    "llama3.2-3b": _llama3(3072, 28, 24, 128, 8192, tied=True, rope_factor=32.0),
    "llama3.1-8b": _llama3(4096, 32, 32, 128, 14336, tied=False, rope_factor=8.0),
}


def config_of(name: str) -> dict:
    """Return the Hugging Face configuration of a shape; NAME:N has its first N layers.

    Raises UsageError if the name is not in the table.
    """
    known, _, layers = name.partition(":")
    if known not in SHAPES or not (layers or "1").isdecimal():
        raise UsageError(
            f"shape {name!r} is not known",
            "",
            f"choose one of: {', '.join(SHAPES)}; NAME:N has N of its layers",
            code="value-unknown",
        )
    found, kinds = dict(SHAPES[known]), "hybrid_override_pattern"  # callers may change it
    if not layers:
        return found
    if kinds in found:  # a letter a layer
        return found | {kinds: found[kinds][: int(layers)]}
    return found | {"num_hidden_layers": int(layers)}


def shape_of(name: str) -> ModelShape:
    """Return the shape of `config_of`."""
    return ModelShape.from_hf_config(config_of(name))
