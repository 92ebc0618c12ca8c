"""Make tiny random Hugging Face checkpoints of every supported family with transformers, in seconds."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.tiny_families import FURTHER

SIZES = dict(
    hidden_size=48, intermediate_size=96, num_hidden_layers=4, vocab_size=307, max_position_embeddings=256
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LONG_ROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=0.75,
    original_max_position_embeddings=32,
    short_factor=[1.0 + 0.05 * i for i in range(6)],
    long_factor=[1.5 + 0.5 * i for i in range(6)],
)
YARN = dict(
    rope_type="yarn", rope_theta=1000.0, factor=8.0, original_max_position_embeddings=32, beta_fast=4.0
)
LATENTS = dict(  # 3 heads are padded to 4 by tensor parallelism; every layer has a dense MLP
    num_attention_heads=3,
    num_key_value_heads=3,
    kv_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=8,
    v_head_dim=6,
    first_k_dense_replace=64,
    num_mtp_layers=0,
)
EXPERTS = dict(num_local_experts=8, num_experts_per_tok=2)

FAMILIES = {
    "llama": ("Llama", dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8)),
    "llama3.2": (
        "Llama",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3_ROPE,
        ),
    ),
    "llama-biases": ("Llama", dict(num_attention_heads=4, num_key_value_heads=4, attention_bias=True)),
    "llama-mlp-bias": (
        "Llama",
        dict(num_attention_heads=4, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    ),
    "llama-mlp-bias-only": ("Llama", dict(num_attention_heads=4, num_key_value_heads=2, mlp_bias=True)),
    "qwen2": ("Qwen2", dict(num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)),
    "mistral": ("Mistral", dict(num_attention_heads=4, num_key_value_heads=1, sliding_window=16)),
    "qwen3-windows": (
        "Qwen3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            sliding_window=12,
            use_sliding_window=True,
            layer_types=2 * ["sliding_attention", "full_attention"],
        ),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=12,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=24,
            pad_token_id=None,  # transformers drops the gradient of this token's embedding, mkd does not
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, mlp_only_layers=[1], **EXPERTS)
        | dict(moe_intermediate_size=24, norm_topk_prob=True),
    ),
    "qwen3_moe-unnormalised": (
        "Qwen3Moe",
        dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12, decoder_sparse_step=2, **EXPERTS)
        | dict(moe_intermediate_size=24, norm_topk_prob=False, tie_word_embeddings=True)
        | dict(attention_bias=True),
    ),
    "mixtral": (
        "Mixtral",
        dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=None, **EXPERTS),
    ),
    "gpt_oss": (
        "GptOss",
        dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8, sliding_window=12, **EXPERTS)
        | dict(intermediate_size=48, swiglu_limit=0.4)  # as wide as the model, as in released ones
        | dict(rope_parameters=YARN | dict(truncate=False)),
    ),
    "phi3": ("Phi3", dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)),
    "phi4-long": (
        "Phi3",
        dict(
            num_attention_heads=3,
            num_key_value_heads=3,
            pad_token_id=0,
            original_max_position_embeddings=32,
            partial_rotary_factor=0.75,  # transformers 5.0 reads it here alone
            rope_parameters=LONG_ROPE,
        ),
    ),
    "deepseek": (
        "DeepseekV3",
        dict(**LATENTS, q_lora_rank=20, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.7)),
    ),
}
SIGMOID_EXPERTS = dict(
    first_k_dense_replace=1,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    n_shared_experts=2,
    routed_scaling_factor=1.5,
)
DELTA_NETS = (
    dict(  # 3 groups of attention are padded to 4 by tensor parallelism; one of 4 layers has attention
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    )
)
GATED_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20
)
VARIANTS = {  # further models of these families, for the tests that name them
    "moonlight": ("DeepseekV3", dict(**LATENTS, q_lora_rank=None, rms_norm_eps=1e-5)),
    "deepseek-experts": (
        "DeepseekV3",
        {**LATENTS, **SIGMOID_EXPERTS, "q_lora_rank": 20, "rope_parameters": YARN},
    ),
    "moonlight-experts": (
        "DeepseekV3",
        {**LATENTS, **SIGMOID_EXPERTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
        | {"rms_norm_eps": 1e-5, "num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "qwen3_5": ("Qwen3_5", DELTA_NETS),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA_NETS, **GATED_EXPERTS}),
    "qwen3_next": ("Qwen3Next", {**DELTA_NETS, **GATED_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3-yarn": (
        "Qwen3",
        dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_parameters=YARN),
    ),
    "qwen3-weaker-yarn": (  # its factor of attention is below 1
        "Qwen3",
        dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        | dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.2)),
    ),
}

DENSE = tuple(name for name, (_, options) in FAMILIES.items() if "num_local_experts" not in options)


def config_class(name: str) -> type:
    """Return the configuration class of a `...ForCausalLM`; for a family with images, its text model's."""
    return getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")


def config_values(family: str) -> dict:
    """Return the sizes and options of a tiny model of `family`."""
    return {**SIZES, **(FAMILIES | VARIANTS | FURTHER)[family][1]}


def config_of(family: str) -> dict:
    """Return config.json of a tiny model of `family`, as transformers writes it."""
    name, _ = (FAMILIES | VARIANTS | FURTHER)[family]
    return config_class(name)(**config_values(family)).to_dict()


def make_model(
    folder: Path,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float = 2.0,
    shard_size: str = "100KB",
    **sizes,
) -> Path:
    """Save a random model of `family` in `folder`, sharded, and return the folder.

    `sizes` override `SIZES`. Norm weights and biases are random too: a model whose norms are all one hides
    mapping errors. Matrices are `scale` times their usual size.
    """
    name, _ = (FAMILIES | VARIANTS | FURTHER)[family]
    config = config_class(name)(**config_values(family) | sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
            elif name.endswith("layer_scalar"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def obey_gate_limit(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return a GPT-OSS of transformers with the limit of its config.json. Older versions always take 7."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = model.config.swiglu_limit
    return model


def add_tokenizer(
    folder: Path, vocab_size: int = 300, text: str = "the quick brown fox jumps over the lazy dog. "
) -> Path:
    """Save a byte-level BPE tokenizer with <|endoftext|> as EOS in a model's folder.

    The same text gives the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    return folder
