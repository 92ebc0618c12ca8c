"""Print the table of runs in which no teacher runs beside the student: every layout equals one process.

Such runs pass only the student's activations from stage to stage. Each is the real command with many short
steps and small messages, on ranks whose freed memory is NaN (tests/ranks.py): a message that is freed
before it has left is then noticed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.ranks import RankPool
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import read_metrics, run_main, write_records
from tests.train.invariance import worst_relative_error

STEPS = 20
TOLERANCE = 1e-5
SCALE = 0.1  # of figures near 0, as the loss of GRPO is
KEYS = ("loss", "grad_norm", "completion_nll", "accuracy")
LINEAR = ("--lr", 0.1, "--adam-eps", 1, "--weight-decay", 0)
"""Updates are almost proportional to gradients, so that Adam does not blow up the rounding of small ones."""
EOS = dict(eos_token_id=0)
WORDS = ("quick brown", "fox jumps over", "lazy", "the dog is not")


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int
    flags: tuple[object, ...]


TP2, PP2, PP4 = (
    ("--tensor-model-parallel-size", 2),
    ("--pipeline-model-parallel-size", 2),
    ("--pipeline-model-parallel-size", 4),
)
VPP2 = ("--num-virtual-stages-per-pipeline-rank", 2)
SINGLE = Layout("one process", 1, ())
LAYOUTS = (
    Layout("PP2", 2, PP2),
    Layout("PP2 VPP2", 2, (*PP2, *VPP2)),
    Layout("PP4", 4, PP4),
    Layout("TP2 PP2", 4, (*TP2, *PP2)),
)
TEXT = ("--kd-ratio", 0, "--data-path", "text.jsonl")
PROMPTS = ("--prompt-data-path", "prompts.jsonl", "--rollout-prompts", 4, "--samples-per-prompt", 2)
REWARDS = ("--reward", "tests.kinds.sampled.reward_functions:of_length", "--kd-ratio", 0, *PROMPTS)
SAMPLING = ("--max-new-tokens", 6, "--rollout-slots", 8, "--on-policy-fraction", 1)
HELD_OUT = ("--eval-interval", 1, "--valid-data-path", "valid.jsonl")
TASKS = ("--eval-completions", "task.jsonl")
RUNS = {
    "cross entropy": TEXT,
    "cross entropy, held-out text and tasks": (*TEXT, *HELD_OUT, *TASKS),
    "cross entropy, full recomputation": (
        *TEXT,
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1),
    ),
    "stored teacher": ("--teacher-topk", "stored", "--kd-ratio", 0.5, "--data-path", "text.jsonl"),
    "stored hidden states": (
        *("--teacher-hidden", "states", "--kd-divergence", "jsd", "--kd-temperature", 2),
        *("--kd-ratio", 0.5, "--data-path", "text.jsonl"),
    ),
    "DPO": ("--dpo-beta", 0.3, "--kd-ratio", 0, "--data-path", "pairs.jsonl"),
    "GRPO": (*REWARDS, *SAMPLING),
    "GRPO, 3 updates": (*REWARDS, *SAMPLING, "--rollout-updates", 3),
}
EXPORTS = {"mkd topk": "stored", "mkd hidden": "states"}  # command -> folder that the runs read


def make_files(folder: Path) -> Path:
    """Make a student of 8 layers, a teacher, texts, pairs, prompts and a task."""
    sizes = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8, tie_word_embeddings=True)
    add_tokenizer(make_model(folder / "student", "qwen3", seed=1, num_hidden_layers=8, **sizes | EOS))
    add_tokenizer(make_model(folder / "teacher", "llama", seed=2, hidden_size=72, num_hidden_layers=8, **EOS))
    texts = [f"{i}: " + "the quick brown fox " * (i % 7 + 1) for i in range(80)]
    write_records(folder / "text.jsonl", *({"text": text} for text in texts))
    write_records(folder / "valid.jsonl", *({"text": text[::-1]} for text in texts[:20]))
    asked = [f"{i}: {WORDS[i % 4]}" for i in range(16)]
    answers = [(f" {WORDS[(i + 1) % 4]}.", f" {WORDS[(i + 2) % 4]}!") for i in range(16)]
    named = [dict(prompt=p, chosen=good, rejected=bad) for p, (good, bad) in zip(asked, answers, strict=True)]
    write_records(folder / "pairs.jsonl", *named)
    write_records(folder / "prompts.jsonl", *({"prompt": p, "answer": i} for i, p in enumerate(asked)))
    questions = [{"prompt": p, "completion": good} for p, (good, _) in zip(asked, answers, strict=True)]
    write_records(folder / "task.jsonl", *questions)
    return folder


def argv(files: Path, kind: str, log: str, layout: tuple[object, ...], steps: int) -> list[str]:
    """Return the command line of a run with steps of 8 micro-batches. Paths are relative to `files`."""
    words: list[object] = ["--student-hf", "student", "--seq-length", 48, "--global-batch-size", 8]
    words += ["--train-iters", steps, *LINEAR, "--data-cache-path", "cache", "--log-dir", log]
    words += ["--export-hf", f"{log}/hf", *RUNS[kind], *layout]
    is_path = {one.name for one in files.iterdir()} | {"cache", log, f"{log}/hf"}
    return [str(files / word) if word in is_path else str(word) for word in words]


def export_argv(files: Path, kind: str, out: str, layout: tuple[object, ...] = ()) -> list[str]:
    """Return the command line that stores the teacher's outputs, in 20 shards of 8 packs at most."""
    words = ["--teacher-hf", files / "teacher", "--data-path", files / "text.jsonl", "--seq-length", 48]
    words += ["--data-cache-path", files / "cache", "--out", files / out, "--samples-per-shard", 4]
    words += ["--k", 16, "--logprob-dtype", "float32"] if kind == "mkd topk" else []
    words += ["--log-dir", files / f"{out} log", *layout]
    return [str(word) for word in words]


def stored_values(folder: Path) -> np.ndarray:
    """Return all log-probabilities and statistics of a stored teacher, or all hidden states, in order."""
    import pyarrow.parquet as pq

    tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    columns = [name for name in ("logprobs", "statistics") if name in tables[0].column_names]
    values = [np.concatenate(table[name].to_numpy()) for table in tables for name in columns]
    if not values:
        states = (b"".join(row) for table in tables for row in table["states"].to_pylist())
        values = [np.frombuffer(one, np.float32) for one in states]
    return np.concatenate([one.astype(np.float64) for one in values])


def run(files: Path, kind: str, pool: RankPool, layout: Layout, name: str, steps: int = STEPS):
    """Run the command of this kind in a layout. Raises AssertionError unless it ends well."""
    is_export = kind in EXPORTS
    shutil.rmtree(files / name, ignore_errors=True)
    words = (
        export_argv(files, kind, name, layout.flags)
        if is_export
        else argv(files, kind, name, layout.flags, steps)
    )
    command = kind.replace("mkd ", "mkd.commands.") if is_export else "mkd.run.main"
    results = run_main(pool, words, layout.ranks, command)
    assert [one.exit_code for one in results] == [0] * layout.ranks, "\n".join(one.stderr for one in results)


def worst_error(
    files: Path, kind: str, pool: RankPool, layout: Layout, steps: int = STEPS
) -> dict[str, float]:
    """Return the worst relative errors of a layout against the run "single" of one process, by figure."""
    name = "layout"
    run(files, kind, pool, layout, name, steps)
    if kind in EXPORTS:
        ours, theirs = (stored_values(files / folder) for folder in (name, "single"))
        assert ours.shape == theirs.shape
        return {"stored": float(np.abs(ours - theirs).max() / np.abs(theirs).max())}
    ours, theirs = (read_metrics(files / folder) for folder in (name, "single"))
    assert [one.get("split") for one in ours] == [one.get("split") for one in theirs]
    errors: dict[str, float] = {}
    for mine, other in zip(ours, theirs, strict=True):
        for key in other.keys() & set(KEYS):
            error = abs(mine[key] - other[key]) / max(abs(other[key]), SCALE)
            errors[key] = max(errors.get(key, 0.0), error if np.isfinite(error) else np.inf)
    assert {"loss", "grad_norm"} <= errors.keys()
    assert sum(one.get("split") is None for one in ours) == steps
    errors["weights"], _ = worst_relative_error(files / name / "hf", files / "single" / "hf")
    return errors


def main() -> int:
    pool, failed = RankPool(), 0
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder))
        for kind, out in EXPORTS.items():
            run(files, kind, pool, SINGLE, out)
        print(f"worst relative error of {STEPS} steps to one process, fp32, freed memory is NaN\n")
        for kind in (*RUNS, *EXPORTS):
            run(files, kind, pool, SINGLE, "single")
            for layout in LAYOUTS:
                errors = worst_error(files, kind, pool, layout)
                failed += not max(errors.values()) <= TOLERANCE
                shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
                print(f"{kind:40}{layout.name:10}{shown}", flush=True)
    pool.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
