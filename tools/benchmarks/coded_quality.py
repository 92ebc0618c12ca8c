"""Measure the rounding of experts in a trained teacher: KL(bf16 || FP8) on held-out text.

    python -m tools.benchmarks.coded_quality --out FOLDER

A small Qwen3-MoE learns the bytes of Python's standard library, the text of the quickstart, with plain
transformers. Then mkd runs it as a teacher in each precision. KL and agreement are of tokens of held-out
files; "fp32 || bf16" is the rounding that any teacher in bf16 has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mkd.checkpoint.hf.hf_reader import HFCheckpoint
from mkd.config.models import TeacherConfig
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.layout import PipelineLayout
from mkd.plan.models.model_shape import ModelShape
from mkd.platform import detect
from mkd.quickstart.demo_text import write_text
from mkd.resolve.model_source import ModelSource
from mkd.run.build_models import build_teacher_parts
from tools.benchmarks.benchmark_report import table

SIZES = dict(
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    vocab_size=256,  # bytes
    max_position_embeddings=1024,
    router_aux_loss_coef=0.01,
    output_router_logits=True,
)
TEACHERS = {
    "bf16": TeacherConfig(),
    "FP8, tensorwise": TeacherConfig(precision="fp8"),
    "FP8, blockwise": TeacherConfig(precision="fp8", fp8_recipe="blockwise"),
}


def read_bytes(path: Path, length: int) -> Tensor:
    """Return rows of tokens, int64 [rows, length], of a file of records."""
    texts = (json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines())
    tokens = torch.tensor(list("\0".join(texts).encode()))
    return tokens[: len(tokens) // length * length].view(-1, length)


def train(rows: Tensor, steps: int, batch: int, device: torch.device) -> torch.nn.Module:
    """Return the model after so many steps."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    begin = time.perf_counter()
    for step in range(steps):
        ids = rows[torch.randint(len(rows), (batch,))].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def log_probs(
    folder: Path, settings: TeacherConfig, dtype: torch.dtype, rows: Tensor, context: ParallelContext
) -> Tensor:
    """Return the teacher's log-probabilities of each next byte, fp32 [rows x tokens, 256] on the CPU."""
    from tests.models.test_hf_parity import pack

    shape, platform = ModelShape.from_hf_dir(folder), context.platform
    source = ModelSource(shape, folder, HFCheckpoint(folder), None)
    layout = PipelineLayout.even(shape.num_layers, 1)
    (part,) = build_teacher_parts(source, settings, layout, ModelOptions(dtype=dtype), context)
    part.eval().requires_grad_(False)
    found = []
    for few in rows.split(8):
        tokens = few.flatten()[None].to(context.device)
        positions = torch.arange(few.shape[1], device=context.device).repeat(len(few))[None]
        packed = pack((few.shape[1],) * len(few), 0, platform.transformer_engine, context.device)
        logits = part.logits(part(tokens, positions, packed_seq_params=packed))
        found.append(F.log_softmax(logits[:, 0, :256].float(), dim=-1).cpu())
    return torch.cat(found)


def compared(name: str, first: Tensor, second: Tensor) -> list[str]:
    kl = F.kl_div(second, first, log_target=True, reduction="none").sum(-1)
    agree = (first.argmax(-1) == second.argmax(-1)).float().mean()
    return [name, f"{float(kl.mean()):.5f}", f"{float(kl.quantile(0.99)):.4f}", f"{float(agree):.4f}"]


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    paths = write_text(args.out, 40_000)
    text, held_out = (read_bytes(path, args.length) for path in paths)
    platform = detect()
    context = ParallelContext.create(platform)
    folder = args.out / "teacher"
    if not (folder / "config.json").exists():
        train(text, args.steps, args.batch, context.device).save_pretrained(folder)
    rows = held_out[: args.rows]
    exact = log_probs(folder, TEACHERS["bf16"], torch.float32, rows, context)
    labels = rows.roll(-1, 1).flatten()
    entropy = F.nll_loss(exact, labels)
    teachers = {
        name: log_probs(folder, settings, torch.bfloat16, rows, context)
        for name, settings in TEACHERS.items()
    }
    lines = [compared("fp32 || bf16", exact, teachers["bf16"])]
    lines += [
        compared(f"bf16 || {name}", teachers["bf16"], teachers[name]) for name in TEACHERS if name != "bf16"
    ]
    title = f"{rows.numel()} held-out bytes, {float(entropy):.3f} nats a byte, {args.steps} steps"
    print(table(title, ["", "KL", "99 % of KL", "equal most probable"], lines))
    context.close()
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the parser."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("--out", type=Path, required=True, help="folder of text and teacher; a teacher there is used again")
    add("--steps", type=int, default=400, help="training steps")
    add("--batch", type=int, default=16, help="rows of a step")
    add("--length", type=int, default=512, help="bytes of a row")
    add("--rows", type=int, default=128, help="held-out rows")
    return flags


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
