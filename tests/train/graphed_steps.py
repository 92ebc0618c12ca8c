"""Train some steps on a GPU with and without CUDA graphs, on packs of ever other documents."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path

STEPS, PACKS, SEQ_LENGTH = 12, 4, 1024
LLAMA = dict(
    model_type="llama",
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1000,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)
WIDER = LLAMA | dict(hidden_size=384, num_hidden_layers=8, num_attention_heads=6, tie_word_embeddings=False)
GEMMA3 = LLAMA | dict(
    model_type="gemma3_text",
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=128,
    query_pre_attn_scalar=64,
    hidden_activation="gelu_pytorch_tanh",
)
LATENT = LLAMA | dict(
    model_type="deepseek_v3",
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    first_k_dense_replace=4,  # no layer has the experts that follow
    moe_intermediate_size=64,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    tie_word_embeddings=False,
)
del LATENT["head_dim"]
DELTA = LLAMA | dict(
    model_type="qwen3_5_text",
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    tie_word_embeddings=False,
)
DELTA_ROUTED = DELTA | dict(
    model_type="qwen3_5_moe_text",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
)
MAMBA = dict(
    model_type="nemotron_h",
    hidden_size=256,
    layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    mamba_num_heads=8,
    mamba_head_dim=64,
    ssm_state_size=64,
    n_groups=4,
    chunk_size=64,
    vocab_size=1000,
    max_position_embeddings=2048,
)
ROUTED = LLAMA | dict(
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    decoder_sparse_step=1,
    mlp_only_layers=[1],
    norm_topk_prob=True,
)
SHARED = LATENT | dict(first_k_dense_replace=1, moe_intermediate_size=128, n_shared_experts=1)


@dataclass(frozen=True)
class GraphRow:
    """One kind of run."""

    name: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    student: str = "llama"
    teachers: tuple[str, ...] = ("wider",)
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    graphed: tuple[str, ...] = ("student", "teacher")
    tuned: bool = False  # kernels that a process tunes, and then repeats: not in --deterministic-mode
    forced: Forced | None = None


@dataclass(frozen=True)
class Forced:
    """Graphs that a run does not make by itself; see `graph_layers`."""

    student: bool = True
    teacher: bool = True
    recomputes: bool = False
    cuts_at_experts: bool = False
    most_layers: int | None = None


CONFIGS = {
    "llama": LLAMA,
    "wider": WIDER,
    "gemma3": GEMMA3,
    "latent": LATENT,
    "delta": DELTA,
    "delta routed": DELTA_ROUTED,
    "mamba": MAMBA,
    "routed": ROUTED,
    "shared": SHARED,
}


def train(row: GraphRow, graphs: bool, deterministic: bool = True) -> dict:
    """Return losses, norms, a digest of the weights, and what was graphed, of this rank.

    `graphs` False: the same run with `--cuda-graphs off`.
    """
    from mkd.parallel.context import ParallelContext
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect, make_deterministic

    if deterministic:
        make_deterministic()
    sizes = Sizes(tensor=row.tp, pipeline=row.pp, context=row.cp, expert=row.ep)
    context = ParallelContext.create(detect(), sizes, virtual_stages=row.vp, seed=7)
    try:
        return _trained(row, graphs, deterministic, context)
    finally:
        context.close()


def _trained(row: GraphRow, graphs: bool, deterministic: bool, context) -> dict:
    import numpy as np
    import torch

    from mkd.evaluation.evaluate import evaluate
    from mkd.train.layer_graphs import graph_bytes
    from mkd.train.step import train_step
    from tools.benchmarks.synthetic_documents import ChatLengths, for_teachers, full_pack

    engine = engine_of(row, graphs, deterministic, context)
    random = np.random.default_rng(context.dp_rank)
    lengths = ChatLengths(median=150, longest=700)
    losses, norms = [], []
    for step in range(STEPS):
        packs = [full_pack(SEQ_LENGTH, 1000, lengths, random) for _ in range(PACKS)]
        packs = [padded(pack, 2 * row.cp) for pack in packs] if row.cp > 1 else packs
        batches = [pack.shard(context.row_shard).to(context.device) for pack in packs]
        batches = for_teachers(batches, len(row.teachers))
        if step == STEPS // 2:  # between two steps
            losses.append(float(evaluate(engine, [batches]).token_sums()["loss"]))
        result = train_step(engine, batches)
        losses.append(float(result.sums.token_sums()["loss"]))
        norms.append(result.grad_norm)
    with engine.parameters_gathered():
        digest = [float(one.double().sum()) for stage in engine.stages for one in stage.parameters()]
    stages = [stage.module for stage in engine.stages]
    models = [("student", stage.student) for stage in stages]
    models += [("teacher", teacher) for stage in stages for teacher in stage.teachers]
    graphed = {name: 0 if model.graphs is None else len(model.graphs.bounds) for name, model in models}
    memory = torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_available() else 0
    kept = graph_bytes(engine.stages)
    return dict(losses=losses, norms=norms, weights=digest, graphed=graphed, memory=memory, graph_bytes=kept)


def padded(pack, multiple: int):
    """Return the pack with documents of lengths that context parallelism can cut."""
    import numpy as np

    from mkd.data.batch import collate
    from tools.benchmarks.synthetic_documents import lay_out, random_documents

    lengths = (pack.cu_seqlens.diff().numpy() // multiple) * multiple
    lengths = lengths[lengths > 0]
    lengths[-1] += SEQ_LENGTH - lengths.sum()
    random = np.random.default_rng(int(pack.tokens.sum()))
    return collate([lay_out(random_documents(lengths - 1, 1000, random), lengths.tolist())])


def engine_of(row: GraphRow, graphs: bool, deterministic: bool, context):
    """Build the engine of a run with random weights."""
    from mkd.config.load import load_config
    from mkd.kinds.known_kinds import KINDS, teacher_setup
    from mkd.plan.facts import RunFacts
    from mkd.plan.models.model_shape import ModelShape
    from mkd.resolve.model_source import ModelSource
    from mkd.resolve.run_plan import Plan
    from mkd.run.build_engine import build_engine
    from mkd.train.layer_graphs import graph_layers
    from tools.benchmarks.random_engine import RandomCheckpoint

    def source(name: str) -> ModelSource:
        shape = ModelShape.from_hf_config(CONFIGS[name])
        return ModelSource(shape, Path(name), RandomCheckpoint(shape, context.device), None)

    values = {
        "--student-hf": row.student,
        "--kd-ratio": 0.5,
        "--train-iters": STEPS,
        "--lr": 1e-3,
        "--seq-length": SEQ_LENGTH,
        "--global-batch-size": PACKS * context.dp_size,
        "--tensor-model-parallel-size": row.tp,
        "--pipeline-model-parallel-size": row.pp,
        "--context-parallel-size": row.cp,
        "--expert-model-parallel-size": row.ep,
        "--cuda-graphs": "auto" if graphs and row.forced is None else "off",
    }
    argv = [str(word) for pair in values.items() for word in pair]
    argv += ["--teacher-hf", row.teachers[0]]
    argv += ["--deterministic-mode"] if deterministic and not row.tuned else []
    argv += ["--sequence-parallel"] if row.tp > 1 else []
    argv += ["--num-virtual-stages-per-pipeline-rank", str(row.vp)] if row.vp > 1 else []
    config = load_config([*argv, "--bf16", *row.flags]).config
    settings = [replace(config.teachers[0], hf=name) for name in row.teachers]
    config = replace(config, teachers=tuple(settings))
    student, teachers = source(row.student), tuple(map(source, row.teachers))
    shapes = tuple(teacher.shape for teacher in teachers)
    facts = RunFacts(config, context.world_size, student.shape, shapes, kinds=KINDS)
    setups = tuple(teacher_setup([], facts, index, source) for index, source in enumerate(teachers))
    engine = build_engine(Plan(facts, student, teachers, setups), context)[0]
    if graphs and row.forced is not None:
        marked = row.forced.student, [row.forced.teacher] * len(teachers)
        cuts = row.forced.recomputes, row.forced.cuts_at_experts, row.forced.most_layers
        graph_layers(engine.stages, context, *marked, *cuts)
    return engine


def main() -> None:
    """Print every row of this machine, without pytest: under torchrun, those with as many ranks.

    With words, only rows whose name has one of them, and none after a minus sign (`-delta`); `forced` are
    those that a run does not make by itself.
    """
    import sys
    import traceback

    import torch

    from tests.train.test_graphs_gpu import FORCED, ROWS, away

    world = int(os.environ.get("WORLD_SIZE", "1"))
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    others = [word[1:] for word in sys.argv[1:] if word.startswith("-")]
    for row in ROWS + FORCED:
        named = f"{row.name} forced" if row in FORCED else row.name
        is_wanted = any(word in named for word in words or [""]) and not any(word in named for word in others)
        if row.ranks != world or not is_wanted:
            continue
        gc.collect()
        torch.cuda.empty_cache()
        try:
            eager, graphed = (train(row, graphs) for graphs in (False, True))
            free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
            mib = f"{eager['memory']:.0f} {graphed['memory']:.0f} of {(total - free) / 2**20:.0f} MiB"
            text = f"{away(eager, graphed)} bounds {graphed['graphed']}, {mib}"
        except Exception as error:
            print(*(line[:150] for line in traceback.format_exc().splitlines()[-8:]), sep="\n", flush=True)
            text = f"FAILED {type(error).__name__}: {error}"[:300]
        if os.environ.get("RANK", "0") == "0":
            print(f"ROW {row.name}: {text}", flush=True)
    gc.collect()
    if torch.distributed.is_initialized():  # as at the end of a run
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
