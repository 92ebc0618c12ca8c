"""Check Transformer Engine's layers against the local ones on a GPU, and both against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.exact64 import in_float64
from tests.models.test_hf_parity import PADDING, documents, pack
from tests.tiny_models import FAMILIES, LONG_ROPE, make_model, obey_gate_limit

pytestmark = pytest.mark.gpu

SMOLLM2 = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
QWEN3 = dict(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
)
DEEPSEEK = dict(  # DeepSeek-V3's heads
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    num_key_value_heads=16,
    q_lora_rank=384,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=4096,
)
NEMOTRON_H = dict(  # the 8B model's mixers
    hidden_size=1024,
    intermediate_size=4096,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    mamba_num_heads=32,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=8,
    vocab_size=4096,
)
FP32_TOLERANCE, BF16_TOLERANCE = 1e-5, 5e-2  # max |difference| / max |logit|


@torch.no_grad()
def logits_on_gpu(folder, dtype, transformer_engine, texts=None, fp32_logits=False):
    """Return [tokens, v] fp32 on the CPU, of a pack that holds all documents (default: random token ids)."""
    _, logits = model_and_logits(folder, dtype, transformer_engine, texts, fp32_logits)
    return logits.float().cpu()


def model_and_logits(folder, dtype, transformer_engine, texts=None, fp32_logits=False):
    """Return the model, and its logits of the real tokens of the pack, [tokens, v] on the GPU."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.losses.lm_head import head_logits
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.platform import detect

    platform = detect()
    assert platform.transformer_engine
    context = ParallelContext.create(replace(platform, transformer_engine=transformer_engine))
    shape = ModelShape.from_hf_dir(folder)
    (model,) = build_model_parts(
        shape, PipelineLayout.even(shape.num_layers, 1), ModelOptions(dtype=dtype), context
    )
    load_hf_weights(model, shape, HFCheckpoint(folder), context)
    texts = documents(shape.vocab_size) if texts is None else texts
    lengths = [len(ids) for ids in texts]
    tokens = torch.cat([*texts, torch.zeros(PADDING, dtype=torch.int64)]).to(context.device)
    packed = pack(lengths, PADDING, padding_joins_document=transformer_engine)
    for name, value in vars(packed).items():
        if isinstance(value, torch.Tensor):
            setattr(packed, name, value.to(context.device))
    positions = torch.arange(tokens.numel(), device=context.device)
    hidden = model.eval()(tokens[None], positions[None], packed_seq_params=packed)
    logits = model.logits(hidden).squeeze(1)
    if fp32_logits:
        logits = head_logits(hidden.squeeze(1), model.head_weight(), torch.float32, model.shape.logits_cap)
    return model, logits[: sum(lengths), : shape.vocab_size]


def relative_error(logits, reference) -> float:
    return float((logits - reference).abs().max() / reference.abs().max())


@torch.no_grad()
def transformers_logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = obey_gate_limit(model).cuda().eval()
    return torch.cat([model(ids[None].cuda()).logits[0] for ids in documents(model.config.vocab_size)]).cpu()


def as_exact_as_transformers(folder, logits) -> bool:
    """Return True if fp32 logits are those of transformers, or no farther from float64 than 1.5 x theirs."""
    from transformers import AutoModelForCausalLM

    theirs = transformers_logits(folder)
    if relative_error(theirs, logits) <= FP32_TOLERANCE:
        return True
    options = dict(dtype=torch.float32, experts_implementation="eager")  # grouped products have no float64
    model = obey_gate_limit(AutoModelForCausalLM.from_pretrained(folder, **options)).cuda().eval()
    with torch.no_grad(), in_float64(model) as exact:
        ids = [one[None].cuda() for one in documents(exact.config.vocab_size)]
        reference = torch.cat([exact(one).logits[0] for one in ids]).cpu()
    return relative_error(logits, reference) <= 1.5 * relative_error(theirs, reference)


@pytest.mark.parametrize(
    ("name", "family", "sizes"),
    [
        ("SmolLM2", "llama", SMOLLM2),
        ("Qwen3-0.6B", "qwen3", QWEN3),
        ("DeepSeek-V3", "deepseek", DEEPSEEK),
        ("Moonlight", "moonlight", DEEPSEEK | dict(q_lora_rank=None)),
        ("Nemotron-H", "nemotron_h", NEMOTRON_H),
    ],
)
def test_real_shapes(name, family, sizes, tmp_path, gpu_ranks):
    folder = make_model(tmp_path / name, family, shard_size="2GB", scale=1.0, **sizes)
    (exact,) = gpu_ranks.run(logits_on_gpu, 1, folder, torch.float32, False)
    (fp32,) = gpu_ranks.run(logits_on_gpu, 1, folder, torch.float32, True)
    (bf16,) = gpu_ranks.run(logits_on_gpu, 1, folder, torch.bfloat16, True)
    (local,) = gpu_ranks.run(logits_on_gpu, 1, folder, torch.bfloat16, False)
    errors = [relative_error(logits, exact) for logits in (fp32, bf16, local)]
    te32, te16, local16 = errors
    print(
        f"{name}: TE against local spec in fp32 {te32:.1e}; "
        f"bf16 against fp32, TE {te16:.1e}, local {local16:.1e}"
    )
    assert relative_error(transformers_logits(folder), exact) <= FP32_TOLERANCE
    assert errors[0] <= FP32_TOLERANCE
    assert errors[1] <= BF16_TOLERANCE
    assert errors[1] <= 1.5 * errors[2], "bf16 on Transformer Engine is as good as bf16 on the local spec"


def gradients_on_gpu(folder, dtype, transformer_engine):
    """Return the gradients of a random weighted sum of a pack's logits, by Hugging Face tensor, fp32."""
    from mkd.checkpoint.hf.hf_names import find_map

    model, logits = model_and_logits(folder, dtype, transformer_engine)
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(logits.device)
    (logits.float() * weight).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        for piece in find_map(model.shape, name, 0).pieces(tuple(parameter.shape), 0, 1):
            found.setdefault(piece.tensor, []).append(piece.in_shard(parameter.grad).float().cpu())
    return {tensor: torch.cat([part.flatten() for part in parts]) for tensor, parts in found.items()}


@pytest.mark.parametrize("q_lora_rank", [384, None])
def test_gradients_of_latent_attention(q_lora_rank, tmp_path, gpu_ranks):
    """Keys are wider than values: Transformer Engine's kernel for packs must take that in backward."""
    sizes = DEEPSEEK | dict(q_lora_rank=q_lora_rank, num_hidden_layers=2)
    folder = make_model(tmp_path / "deepseek", "deepseek", scale=1.0, **sizes)
    (exact,) = gpu_ranks.run(gradients_on_gpu, 1, folder, torch.float32, False)
    (bf16,) = gpu_ranks.run(gradients_on_gpu, 1, folder, torch.bfloat16, True)
    assert bf16.keys() == exact.keys()
    for name, expected in exact.items():
        error = float((bf16[name] - expected).norm() / expected.norm())
        assert error <= BF16_TOLERANCE, f"{name}: relative error {error:.2e}"


FURTHER = (
    "smollm3",
    "ministral3",
    "granite",
    "olmo3",
    "exaone4",
    "hunyuan_v1_dense",
    "ernie4_5",
    "minimax_m2",
    "nemotron_h-experts",
    "nemotron_h-nano",
    "gemma4",
    "gemma4-experts",
    "apertus",
)


@pytest.mark.parametrize("family", [*sorted(set(FAMILIES) - {"deepseek"}), *FURTHER])
def test_families(family, tmp_path, gpu_ranks):
    """Heads have 64 channels, which every attention kernel accepts."""
    sizes = dict(hidden_size=256, num_attention_heads=4, head_dim=64)
    if family.startswith("phi"):
        sizes.pop("head_dim")
    if family == "phi4-long":
        sizes["rope_parameters"] = LONG_ROPE | {
            name: 4 * LONG_ROPE[name] for name in ("short_factor", "long_factor")
        }
    if family.startswith("gemma4"):  # heads of full attention are too wide for Transformer Engine's kernels
        sizes |= dict(global_head_dim=512, num_global_key_value_heads=1)
    folder = make_model(tmp_path / family, family, **sizes | dict(num_key_value_heads=2))
    (exact,) = gpu_ranks.run(logits_on_gpu, 1, folder, torch.float32, False)
    (fp32,) = gpu_ranks.run(logits_on_gpu, 1, folder, torch.float32, True)
    assert as_exact_as_transformers(folder, exact)
    assert relative_error(fp32, exact) <= FP32_TOLERANCE or as_exact_as_transformers(folder, fp32)
