"""Define shapes and configurations for plans: Qwen3-8B teaches Qwen3-1.7B, packs of 8,192 tokens."""

from __future__ import annotations

from dataclasses import replace

from mkd.config.load import load_config
from mkd.config.schema import Config, TeacherConfig
from mkd.plan.model_shape import ModelShape

SEQ_LENGTH = 8192


def qwen3(num_layers: int, hidden: int, ffn: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape.from_hf_config(
        dict(
            model_type="qwen3",
            num_hidden_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=ffn,
            head_dim=128,
            num_attention_heads=heads,
            num_key_value_heads=8,
            vocab_size=151936,
            tie_word_embeddings=tied,
        )
    )


STUDENT = qwen3(28, 2048, 6144, 16, tied=True)
TEACHER = qwen3(36, 4096, 12288, 32, tied=False)


def config(*argv: str | int) -> Config:
    """Return the configuration of these flags, in bf16."""
    return load_config(
        ["--teacher-hf", "t", "--bf16", "--seq-length", str(SEQ_LENGTH), *map(str, argv)]
    ).config


def several(*teachers: dict, **kd) -> Config:
    """Return a configuration in bf16 with `TeacherConfig` fields of each teacher."""
    settings = config()
    sources = tuple(TeacherConfig(**{"hf": f"t{index}"} | fields) for index, fields in enumerate(teachers))
    return replace(settings, teachers=sources, kd=replace(settings.kd, **kd))
