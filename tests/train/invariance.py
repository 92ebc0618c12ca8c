"""Print the headline table: loss, every gradient, evaluation and five updates are the same at every layout.

One fixed global batch of packed documents with random masks; the teacher is deeper and wider than the student
and its vocabulary is larger. Each layout runs the real engine on gloo ranks and is compared with one process.
`make invariance` prints the table.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.ranks import RankPool
from tests.tiny_models import add_tokenizer, make_model

SEQ_LENGTH, NUM_PACKS, NUM_UPDATES = 64, 8, 5
SPAN_MULTIPLE = 8  # of documents with padding: required by CP4, the table's largest context parallelism
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Layout:
    """One row of the table. `permuted`: the documents of every pack in another order."""

    name: str
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    micro: int = 1
    flags: tuple[str, ...] = ()
    permuted: bool = False

    def argv(self, student: Path, teacher: Path) -> list[str]:
        argv = ["--student-hf", str(student), "--teacher-hf", str(teacher)]
        argv += ["--data-path", str(student / "text.txt")]
        argv += ["--kd-ratio", "0.5", "--kd-temperature", "2", "--seq-length", str(SEQ_LENGTH)]
        argv += ["--train-iters", "10", "--lr", "1e-4", "--clip-grad", "0.1", "--weight-decay", "0.1"]
        argv += ["--global-batch-size", str(NUM_PACKS), "--micro-batch-size", str(self.micro)]
        argv += ["--tensor-model-parallel-size", str(self.tp), "--context-parallel-size", str(self.cp)]
        argv += ["--pipeline-model-parallel-size", str(self.pp)]
        if self.vp > 1:
            argv += ["--num-virtual-stages-per-pipeline-rank", str(self.vp)]
        return argv + list(self.flags)

    def with_flags(self, flags: tuple[str, ...]) -> Layout:
        return replace(self, flags=self.flags + flags)


SP, DISTRIBUTED = ("--sequence-parallel",), ("--use-distributed-optimizer",)
OVERLAP = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather")
UNEVEN = ("--student-pipeline-layout", "3,5", "--teacher-pipeline-layout", "10,6")
SELECTIVE = ("--recompute-granularity", "selective")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
PEERS = {number: ("--teacher-residency", "peers", "--teacher-peers", str(number)) for number in (2, 4)}
NOT_AHEAD = "--teacher-prefetch", "0"
SINGLE = Layout("one process")
LAYOUTS = (
    Layout("TP2", 2, tp=2),
    Layout("TP2 + sequence parallel", 2, tp=2, flags=SP),
    Layout("TP4 micro-batch 4", 4, tp=4, micro=4),
    Layout("TP4 + sequence parallel, micro-batch 4", 4, tp=4, micro=4, flags=SP),
    Layout("PP2", 2, pp=2),
    Layout("PP4", 4, pp=4),
    Layout("PP2 VPP2", 2, pp=2, vp=2),
    Layout("PP4 VPP2", 4, pp=4, vp=2),
    Layout("PP2 uneven", 2, pp=2, flags=UNEVEN),
    Layout("TP2 PP2", 4, tp=2, pp=2, flags=SP),
    Layout("DP2", 2),
    Layout("DP2 + distributed optimizer", 2, flags=DISTRIBUTED),
    Layout("DP2 + overlapped communication", 2, flags=OVERLAP),
    Layout("DP4", 4),
    Layout("DP4 + distributed optimizer", 4, flags=DISTRIBUTED),
    Layout("TP2 PP2 DP2 micro-batch 2", 8, tp=2, pp=2, micro=2),
    Layout("TP2 PP2 VPP2 DP2 + SP, distributed", 8, tp=2, pp=2, vp=2, flags=SP + DISTRIBUTED),
    Layout("CP2", 2, cp=2),
    Layout("CP4 micro-batch 2", 4, cp=4, micro=2),
    Layout("CP2 micro-batch 4 + distributed optimizer", 2, cp=2, micro=4, flags=DISTRIBUTED),
    Layout("CP2 DP2", 4, cp=2),
    Layout("CP2 DP2 micro-batch 2 + overlapped communication", 4, cp=2, micro=2, flags=OVERLAP),
    Layout("TP2 CP2 + sequence parallel, micro-batch 4", 4, tp=2, cp=2, micro=4, flags=SP),
    Layout("PP2 CP2", 4, pp=2, cp=2),
    Layout("PP2 VPP2 CP2 micro-batch 2", 4, pp=2, vp=2, cp=2, micro=2),
    Layout(
        "TP2 PP2 CP2 + SP, distributed, micro-batch 4", 8, tp=2, pp=2, cp=2, micro=4, flags=SP + DISTRIBUTED
    ),
    Layout("CP2 micro-batch 4, documents permuted", 2, cp=2, micro=4, permuted=True),
    Layout("micro-batch 2", micro=2),
    Layout("micro-batch 4", micro=4),
    Layout("PP2 micro-batch 2", 2, pp=2, micro=2),
    Layout("documents permuted", permuted=True),
    Layout("selective recomputation", flags=SELECTIVE),
    Layout("PP2, full recomputation", 2, pp=2, flags=FULL),
    Layout("TP2 micro-batch 4, documents permuted", 2, tp=2, micro=4, permuted=True),
    Layout("DP2, teacher over 2 peers", 2, flags=PEERS[2]),
    Layout("DP4 + distributed optimizer, teacher over 4 peers", 4, flags=DISTRIBUTED + PEERS[4]),
    Layout("TP2 DP2 + SP, teacher over 2 peers", 4, tp=2, flags=SP + PEERS[2]),
    Layout("PP2 DP2, teacher over 2 peers", 4, pp=2, flags=PEERS[2]),
    Layout("PP2 VPP2 DP2, teacher over 2 peers", 4, pp=2, vp=2, flags=PEERS[2]),
    Layout("CP2, teacher over 2 peers", 2, cp=2, flags=PEERS[2]),
    Layout("PP2, teacher 2 micro-batches ahead", 2, pp=2, flags=("--teacher-prefetch", "2")),
    Layout("PP4, teacher not ahead", 4, pp=4, flags=NOT_AHEAD),
    Layout("TP2 PP2 DP2 + SP, teacher not ahead", 8, tp=2, pp=2, flags=SP + NOT_AHEAD),
    Layout("PP2 DP2, teacher over 2 peers, not ahead", 4, pp=2, flags=PEERS[2] + NOT_AHEAD),
)


def make_pair(folder: Path, sizes: dict | None = None) -> tuple[Path, Path]:
    """Make a student (8 layers, tied embeddings, 3 key/value heads) and a teacher.

    The teacher has 16 layers, is wider, and has a larger vocabulary.
    """
    student_sizes = dict(
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        tie_word_embeddings=True,
    )
    teacher_sizes = dict(
        num_hidden_layers=16,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=330,
    )
    student = make_model(folder / "student", "qwen3", seed=1, **student_sizes | (sizes or {}))
    teacher = make_model(folder / "teacher", "llama", seed=2, **teacher_sizes | (sizes or {}))
    return add_text(student), teacher


def add_text(student: Path) -> Path:
    """Write a tokenizer and a text, which a plan requires; return the student's folder.

    The packs here use neither.
    """
    (student / "text.txt").write_text("the quick brown fox\n", encoding="utf-8")
    return add_tokenizer(student)


def fixed_packs(permuted: bool, padding: int = 0) -> list:
    """Return the global batch: documents of random lengths, padding and masks.

    One pack has no padding. One has no loss token, and after a few tokens only padding: the first
    context-parallel rank holds all of them. `padding` seeds the tokens of the padding, which must not matter.
    """
    from mkd.data.batch import Pack

    random, shuffle, filler = (np.random.default_rng(seed) for seed in (0, 1, 100 + padding))
    packs = []
    for index in range(NUM_PACKS):
        borders = random.choice(np.arange(SPAN_MULTIPLE, SEQ_LENGTH, SPAN_MULTIPLE), size=3, replace=False)
        documents = []
        for span in np.diff([0, *np.sort(borders), SEQ_LENGTH]):
            length = span if index == 0 else span - random.integers(SPAN_MULTIPLE - 1)
            ids = random.integers(0, 307, size=length + 1)
            mask = (random.random(length) < 0.7) * (index != 3)
            mask[-1] = 0
            documents.append(
                (length, [np.pad(column, (0, span - length)) for column in (ids[:-1], ids[1:], mask)])
            )
        if index == 3:
            documents = [(6, [np.pad(column[:6], (0, SEQ_LENGTH - 6)) for column in documents[0][1]])]
        if permuted:
            documents = [documents[i] for i in shuffle.permutation(len(documents))]
        lengths = np.array([length for length, _ in documents])
        spans = np.array([len(tokens) for _, (tokens, _, _) in documents])
        columns = zip(*(columns for _, columns in documents), strict=True)
        tokens, labels, mask = (np.concatenate(column) for column in columns)
        place = np.concatenate([np.arange(span) for span in spans])
        tokens = np.where(place < np.repeat(lengths, spans), tokens, filler.integers(0, 307, len(tokens)))
        packs.append(Pack(tokens, labels, mask.astype(np.float32), lengths, spans, index))
    return packs


def microbatches(layout: Layout, context, num_teachers: int = 1) -> list:
    """Return this rank's share of the global batch, for teachers that read the student's tokens."""
    from mkd.data.batch import collate
    from mkd.data.teacher_input import SharedTokens

    shared = (SharedTokens(),) * num_teachers
    packs = fixed_packs(layout.permuted, padding=layout.ranks)
    packs = [replace(pack, teacher_inputs=shared) for pack in packs]
    groups = [packs[i : i + layout.micro] for i in range(0, NUM_PACKS, layout.micro)]
    mine = groups[context.dp_rank :: context.dp_size]
    return [collate(group).shard(context.row_shard) for group in mine]


def run_layout(
    layout: Layout, student: Path, teacher: Path, out_dir: Path, num_updates: int = NUM_UPDATES
) -> dict:
    """Run one step and an evaluation on this rank; export gradients and updated weights by name.

    Return the sums.
    """
    engine, state, batches = build_layout(layout, layout.argv(student, teacher))
    return measure(engine, state, batches, student, out_dir, num_updates)


def build_layout(layout: Layout, argv: list[str]):
    """Return engine, training state and this rank's share of the fixed global batch."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run

    plan = plan_run(load_config(argv).config, layout.ranks)
    context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
    engine, state = build_engine(plan, context)
    batches = microbatches(layout, context, len(engine.teachers))
    return engine, state, [batch.to(context.device) for batch in batches]


def measure(
    engine, state, batches: list, student: Path, out_dir: Path, num_updates: int = NUM_UPDATES
) -> dict:
    """Return sums of an evaluation, a step and the last of some updates.

    Export gradients and updated weights to `out_dir`.
    """
    from mkd.evaluation.evaluate import evaluate
    from mkd.train.step import train_step

    evaluation = evaluate(engine, [batches])
    sums = export_gradients(engine, state, batches, student, out_dir)
    for _ in range(num_updates):
        result = train_step(engine, batches, following=batches)
    with engine.parameters_gathered():
        export_student(engine, state, student, out_dir / "updated")
    assert result.grad_norm > 0.1, "the updates must go through clipping"
    return {
        "sums": sums,
        "evaluation": evaluation.token_sums(),
        "last": {**result.sums.token_sums(), "grad_norm": result.grad_norm},
    }


def export_gradients(engine, state, batches: list, student: Path, out_dir: Path) -> dict[str, float]:
    """Export the gradients of one step to `out_dir / "gradients"`; return its sums."""
    from mkd.train.step import training_objective

    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches)
    sums = engine.schedule.run(engine.stages, batches, objective, forward_only=False)
    with gradients_as_parameters(engine, engine.context):
        export_student(engine, state, student, out_dir / "gradients")
    return objective.sums(sums).token_sums()


def export_student(engine, state, student: Path, out_dir: Path) -> None:
    """Export the student, whose configuration is in the folder `student`."""
    from mkd.checkpoint.hf.hf_assets import HFAssets
    from mkd.checkpoint.hf.hf_writer import export_hf

    chunks = [(model, model.first_layer) for model in state.models]
    shape, assets = state.models[0].shape, HFAssets.of(student)
    export_hf(chunks, shape, out_dir, context=engine.context, assets=assets)


class gradients_as_parameters:
    """Set every student parameter's data to its reduced gradient inside, in the parameter's dtype.

    After a change of dtype autograd would drop the hooks that Megatron's DDP has on a parameter.
    """

    def __init__(self, engine, context):
        self.engine, self.context, self.saved = engine, context, []

    def __enter__(self):
        for chunk in self.engine.stages:
            if chunk.ddp_config.use_distributed_optimizer:
                groups = (self.context.copies_group, self.context.edp.group)
                for buffers, group in zip(
                    (chunk.buffers, chunk.expert_parallel_buffers), groups, strict=True
                ):
                    for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                        # Megatron shards the optimizer over the group
                        shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                        torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=group)
            for parameter in (one for one in chunk.parameters() if one.requires_grad):
                self.saved.append((parameter, parameter.data))
                parameter.data = parameter.main_grad.to(parameter.dtype, copy=True)

    def __exit__(self, *_):
        for parameter, data in self.saved:
            parameter.data = data


def worst_relative_error(actual: Path, expected: Path) -> tuple[float, str]:
    """Return the max over tensors of max |difference| / max |expected|, and the tensor where it is."""
    ours, theirs = (by_expert(load_file(folder / "model.safetensors")) for folder in (actual, expected))
    assert ours.keys() == theirs.keys()
    errors = {}
    for name, reference in theirs.items():
        # A softmax does not see the bias of keys: without rotary positions its gradient is rounding.
        scale = theirs[name.replace("k_proj.bias", "q_proj.bias")] if "vision_model." in name else reference
        difference, size = (float(one.abs().max()) for one in (ours[name] - reference, scale))
        errors[name] = difference / (size or 1e-30)  # an expert without tokens has no gradient
    return max((error, name) for name, error in errors.items())


def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split the tensors that hold all experts, so that each expert has its own scale."""
    found = {}
    for name, tensor in tensors.items():
        rest = name.partition(".mlp.experts.")[2]
        is_stack = rest and not rest[0].isdigit()
        parts = {f"{name}[{index}]": part for index, part in enumerate(tensor)}
        found |= parts if is_stack else {name: tensor}
    return found


def compare(layout: Layout, pool: RankPool, student: Path, teacher: Path, folder: Path, single: dict) -> dict:
    """Return relative errors of one layout against one process, and where the largest are."""
    return errors_of(
        pool.run(run_layout, layout.ranks, layout, student, teacher, folder / "layout"), folder, single
    )


PARTS = ("loss", "evaluation", "last step", "grad norm", "gradient", "updated")
"""Keys of `errors_of` that are errors."""


def require_equal(errors: dict) -> None:
    """Raise AssertionError unless every error is within `TOLERANCE`."""
    for part in PARTS:
        assert errors[part] <= TOLERANCE, f"{part}: {errors}"


def errors_of(results: list[dict], folder: Path, single: dict) -> dict:
    """Return relative errors of all ranks' results of one layout, and of its exports, against one process."""
    assert all(result == results[0] for result in results), "ranks report different sums"
    names = ("loss", "ce", "kd")
    ours, reference = folder / "layout", folder / "single"
    gradient, gradient_name = worst_relative_error(ours / "gradients", reference / "gradients")
    updated, updated_name = worst_relative_error(ours / "updated", reference / "updated")

    def error(part: str, *keys: str) -> float:
        return max(abs(results[0][part][n] - single[part][n]) / abs(single[part][n]) for n in keys or names)

    return {
        "loss": error("sums"),
        "gradient": gradient,
        "evaluation": error("evaluation"),
        "last step": error("last"),
        "grad norm": error("last", "grad_norm"),
        "updated": updated,
        "where": f"{gradient_name} / {updated_name}",
    }


def print_table(
    pool: RankPool,
    folder: Path,
    pair: tuple[Path, Path],
    one_process: Layout,
    layouts: Sequence[Layout],
    run: Callable[..., dict] = run_layout,
) -> int:
    """Print the table of `layouts` and return how many of them are not within the tolerance."""
    failed = 0
    (single,) = pool.run(run, 1, one_process, *pair, folder / "single")
    columns = ("loss", "gradient", "evaluation", "grad norm", "updated")
    print(f"relative error to one process, fp32 (allowed {TOLERANCE:.0e})\n")
    print(f"{'layout':52}{'ranks':>6}" + "".join(f"{column:>12}" for column in columns))
    for layout in layouts:
        results = pool.run(run, layout.ranks, layout, *pair, folder / "layout")
        errors = errors_of(results, folder, single)
        ok = all(errors[column] <= TOLERANCE for column in columns)
        failed += not ok
        values = "".join(f"{errors[column]:12.1e}" for column in columns)
        verdict = "" if ok else "  FAILED " + errors["where"]
        print(f"{layout.name:52}{layout.ranks:6}{values}{verdict}", flush=True)
    print(f"\n{len(layouts) - failed} of {len(layouts)} layouts within {TOLERANCE:.0e}")
    return failed


def main() -> int:
    pool = RankPool()
    with tempfile.TemporaryDirectory() as name:
        failed = print_table(pool, Path(name), make_pair(Path(name)), SINGLE, LAYOUTS)
    pool.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
