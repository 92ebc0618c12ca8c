"""Print the table of layouts for models with experts: every gradient is the same at every layout.

`make invariance` prints it after the table of dense models.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.tiny_models import make_model
from tests.train.invariance import BLOCK, DISTRIBUTED, FULL, OVERLAP, PEERS, SP, Layout, add_text
from tests.train.invariance_tables import print_tables

EP2 = ("--expert-model-parallel-size", "2")
EP4 = ("--expert-model-parallel-size", "4")
TEACHER_EP1 = ("--teacher-expert-model-parallel-size", "1")
TEACHER_EP4 = ("--teacher-expert-model-parallel-size", "4")
RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
BALANCE = ("--moe-aux-loss-coeff", "0.05", "--moe-z-loss-coeff", "0.01")
MOVED = ("--moe-router-bias-update-rate", "0.01")
ON_HOST = ("--teacher-residency", "host")

LAYOUTS = (
    Layout("EP2", 2, flags=EP2),
    Layout("EP4, teacher EP1", 4, flags=EP4 + TEACHER_EP1),
    Layout("EP2 DP4, distributed optimizer, teacher EP4", 4, flags=EP2 + DISTRIBUTED + TEACHER_EP4),
    Layout("EP1 DP2, distributed optimizer", 2, flags=DISTRIBUTED),
    Layout("EP2 TP2 + SP", 2, tp=2, micro=2, flags=EP2 + SP),
    Layout("TP2 + SP, EP1", 2, tp=2, flags=SP),
    Layout("EP4 TP2 DP2 + SP, distributed optimizer", 4, tp=2, flags=EP4 + SP + DISTRIBUTED),
    Layout("EP2 PP2", 4, pp=2, flags=EP2),
    Layout("EP2 PP2 VPP2, one layer of two recomputed", 4, pp=2, vp=2, flags=EP2 + BLOCK),
    Layout("PP2 uneven, a stage without experts", 2, pp=2, flags=("--student-pipeline-layout", "2,6")),
    Layout("EP2 CP2", 2, cp=2, flags=EP2),
    Layout("EP2 CP2 DP2 + overlapped communication", 4, cp=2, micro=2, flags=EP2 + OVERLAP),
    Layout("EP2 TP2 PP2 + SP, experts recomputed", 4, tp=2, pp=2, flags=EP2 + SP + RECOMPUTED),
    Layout("EP2, full recomputation", 2, flags=EP2 + FULL),
    Layout("experts recomputed", flags=RECOMPUTED),
    Layout("EP1 DP2, teacher over 2 peers", 2, flags=PEERS[2]),
    Layout("EP2 DP4, teacher over 2 peers", 4, flags=EP2 + PEERS[2]),
    Layout("micro-batch 4", micro=4),
    Layout("documents permuted", permuted=True),
    Layout("EP2, teacher on the host", 2, flags=EP2 + ON_HOST),
)
LATENT_LAYOUTS = (
    Layout("EP2 TP2 + SP", 2, tp=2, flags=EP2 + SP),
    Layout("EP2 PP2 DP2, full recomputation", 4, pp=2, flags=EP2 + FULL),
    Layout("EP2 CP2", 2, cp=2, flags=EP2),
)
GPT_OSS_LAYOUTS = (  # no context parallelism, which sinks do not have
    Layout("EP2", 2, flags=EP2),
    Layout("EP4, teacher EP1", 4, flags=EP4 + TEACHER_EP1),
    Layout("EP2 TP2 + SP", 2, tp=2, flags=EP2 + SP),
    Layout("EP2 TP2 DP2 + SP, distributed optimizer, micro-batch 2", 4, tp=2, micro=2).with_flags(
        EP2 + SP + DISTRIBUTED
    ),
    Layout("EP2 PP2", 4, pp=2, flags=EP2),
    Layout("EP2 PP2 VPP2, full recomputation", 4, pp=2, vp=2, flags=EP2 + FULL),
    Layout("EP2 TP2 PP2 + SP, experts recomputed", 4, tp=2, pp=2, flags=EP2 + SP + RECOMPUTED),
    Layout("micro-batch 4", micro=4),
    Layout("documents permuted", permuted=True),
)


def make_gpt_oss_pair(folder: Path) -> tuple[Path, Path]:
    """Make a GPT-OSS student of 4 layers, and a wider teacher of 8 layers."""
    student = make_model(folder / "student", "gpt_oss", seed=1)
    sizes = dict(num_hidden_layers=8, hidden_size=64, intermediate_size=32, vocab_size=330)
    teacher = make_model(
        folder / "teacher", "gpt_oss", seed=2, num_attention_heads=8, num_key_value_heads=4, **sizes
    )
    return add_text(student), teacher


def make_moe_pair(folder: Path, sizes: dict | None = None) -> tuple[Path, Path]:
    """Make a Qwen3-MoE student whose first two of 8 layers are dense, and a Mixtral teacher.

    `sizes` override both models' sizes.
    """
    student_sizes = dict(num_hidden_layers=8, head_dim=8, mlp_only_layers=[0, 1])
    teacher_sizes = dict(num_hidden_layers=8, hidden_size=64, intermediate_size=32, vocab_size=330)
    teacher_sizes |= dict(num_attention_heads=4, num_key_value_heads=2)
    student = make_model(folder / "student", "qwen3_moe", seed=1, **student_sizes | (sizes or {}))
    teacher = make_model(folder / "teacher", "mixtral", seed=2, **teacher_sizes | (sizes or {}))
    return add_text(student), teacher


def make_latent_pair(folder: Path) -> tuple[Path, Path]:
    """Make a DeepSeek-V3 student and a Moonlight teacher, each with one dense layer."""
    student = add_text(make_model(folder / "student", "deepseek-experts", seed=1))
    wider = dict(hidden_size=64, vocab_size=330)
    return student, make_model(folder / "teacher", "moonlight-experts", seed=2, **wider)


TABLES = (
    ("models with experts", make_moe_pair, LAYOUTS, ()),
    ("models with experts, with balance losses", make_moe_pair, LAYOUTS, BALANCE),
    ("GPT-OSS, with balance losses", make_gpt_oss_pair, GPT_OSS_LAYOUTS, BALANCE),
    ("DeepSeek-V3, whose correction biases move", make_latent_pair, LATENT_LAYOUTS, MOVED),
)


if __name__ == "__main__":
    sys.exit(print_tables(TABLES))
