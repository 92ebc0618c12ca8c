"""Measure what the student's own text adds to stored text, with a real teacher, a cut of it and real prompts.

    python tools/benchmarks/on_policy_pays.py --teacher-hf T --student-hf S --folder F

Arms, of as many loss tokens each: stored text alone; stored text, then the student's own; the student's own
from the start. Published order: the second is best. Every arm has several seeds. Figures are those of samples
that each student writes after held-out heads of Python functions, and of held-out text. Finished runs are
kept, so that a second call goes on; the table is printed after every run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.benchmarks.benchmark_report import mean_and_spread, table  # noqa: E402
from tools.benchmarks.distillation_pays import write_data  # noqa: E402
from tools.quickstart_on_policy import measure, write_prompts  # noqa: E402

OFF, THEN_ON, ON = "stored text", "stored text, then own", "own text"
FIGURES = {
    "kl": "KL(s || t), own text",
    "teacher_nll": "teacher NLL, own text",
    "held_out": "KL(t || s), held-out text",
}
HELD_OUT_TEXTS, HELD_OUT_TOKENS = 32, 512
CHARACTERS_A_TOKEN = 4


def prepare(args: argparse.Namespace) -> list[str]:
    """Write texts and prompts, and return the held-out prompts."""
    steps = args.steps * args.prompts * args.new_tokens * CHARACTERS_A_TOKEN
    if not (args.folder / "prompts.jsonl").exists():
        write_data(args.folder, 2 * steps)
        write_prompts(args.folder / "train.jsonl", args.folder / "prompts.jsonl")
    return write_prompts(args.folder / "valid.jsonl", args.folder / "held_out_prompts.jsonl")[: args.samples]


def command(
    args: argparse.Namespace, log_dir: Path, seed: int, steps: int, student: Path, own: bool
) -> list[str]:
    """Return the training command of one run; a step has as many loss tokens with either kind of text."""
    tokens = args.prompts * args.new_tokens
    flags = {
        "student-hf": student, "teacher-hf": args.teacher_hf, "kd-ratio": 1, "seed": seed,
        "train-iters": steps, "lr": args.own_lr if own else args.lr, "lr-decay-style": "cosine",
        "lr-warmup-iters": max(1, steps // 20), "eval-iters": 0, "log-dir": log_dir,
        "data-cache-path": args.folder / "cache", "export-hf": log_dir / "hf",
        "seq-length": args.seq_length, "global-batch-size": max(1, tokens // args.seq_length),
    }  # fmt: skip
    if own:
        flags |= {
            "on-policy-fraction": 1, "prompt-data-path": args.folder / "prompts.jsonl",
            "rollout-prompts": args.prompts, "max-new-tokens": args.new_tokens, "rollout-slots": args.prompts,
            "kd-divergence": "reverse_kl",
        }  # fmt: skip
    else:
        flags["data-path"] = args.folder / "train.jsonl"
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return [
        sys.executable,
        str(ROOT / "pretrain_kd.py"),
        "--no-save",
        "--overwrite",
        *words,
        *args.flags.split(),
    ]


def run(args: argparse.Namespace, name: str, seed: int, steps: int, student: Path, own: bool) -> Path:
    """Train, unless the same run is complete, and return its log folder."""
    log_dir = args.folder / "runs" / f"{name}-{seed}"
    words, done = command(args, log_dir, seed, steps, student, own), log_dir / "done"
    if not done.exists() or done.read_text(encoding="utf-8") != "\n".join(words):
        log_dir.mkdir(parents=True, exist_ok=True)
        with open(log_dir / "output.txt", "w", encoding="utf-8") as out:
            subprocess.run(words, check=True, stdout=out, stderr=out)
        done.write_text("\n".join(words), encoding="utf-8")
    return log_dir


def arm(args: argparse.Namespace, name: str, seed: int) -> Path:
    """Train one arm with one seed, and return its log folder."""
    half = args.steps // 2
    if name == OFF:
        return run(args, "off", seed, args.steps, args.student_hf, own=False)
    if name == ON:
        return run(args, "on", seed, args.steps, args.student_hf, own=True)
    first = run(args, "half", seed, half, args.student_hf, own=False)
    return run(args, "then", seed, args.steps - half, first / "hf", own=True)


def figures_of(args: argparse.Namespace, student_dir: Path, prompts: Sequence[str]) -> dict[str, float]:
    """Return the figures of a student, nats per token. Not for threads: transformers loads one at a time."""
    kept = args.folder / "figures" / f"{student_dir.parent.name}.json"
    if kept.exists() and kept.stat().st_mtime > (student_dir / "config.json").stat().st_mtime:
        return json.loads(kept.read_text(encoding="utf-8"))
    figures, _ = measure(student_dir, args.teacher_hf, prompts)
    lines = (args.folder / "valid.jsonl").read_text(encoding="utf-8").splitlines()[:HELD_OUT_TEXTS]
    texts = [json.loads(line)["text"] for line in lines]
    figures |= {"held_out": text_kl(student_dir, args.teacher_hf, texts)}
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(figures), encoding="utf-8")
    return figures


def text_kl(student_dir: Path, teacher_dir: Path, texts: Sequence[str]) -> float:
    """Return the mean KL(teacher || student) at the tokens of texts, nats."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(student_dir)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
        for path in (student_dir, teacher_dir)
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for text in texts:
            row = tokenizer(text, return_tensors="pt")["input_ids"][:, :HELD_OUT_TOKENS].to(device)
            ours, theirs = (model(row).logits[0].log_softmax(1) for model in (student, teacher))
            total += (theirs.exp() * (theirs - ours)).sum().item()
            count += row.shape[1]
    return total / count


def report(results: dict[str, list[dict[str, float]]], before: dict[str, float]) -> str:
    rows = [["student before", "1", *(f"{before[key]:.3f}" if key in before else "" for key in FIGURES)]]
    for name, found in results.items():
        cells = (mean_and_spread([one[key] for one in found]) for key in FIGURES)
        rows.append([name, str(len(found)), *cells])
    return table("nats per token", ["trained on", "seeds", *FIGURES.values()], rows)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--teacher-hf", type=Path, required=True)
    found.add_argument("--student-hf", type=Path, required=True)
    found.add_argument("--folder", type=Path, required=True, help="folder for data and runs")
    found.add_argument("--steps", type=int, default=40)
    found.add_argument("--prompts", type=int, default=128, help="completions of a step")
    found.add_argument("--new-tokens", type=int, default=64)
    found.add_argument("--samples", type=int, default=64, help="held-out prompts")
    found.add_argument("--seq-length", type=int, default=2048)
    found.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    found.add_argument("--parallel", type=int, default=3, help="runs at the same time")
    found.add_argument("--lr", type=float, default=5e-4)
    found.add_argument("--own-lr", type=float, default=2e-4)
    found.add_argument("--flags", default="", help="more flags of pretrain_kd.py, such as --bf16")
    return found


def main() -> None:
    args, start = parser().parse_args(), time.perf_counter()
    args.folder.mkdir(parents=True, exist_ok=True)
    prompts = prepare(args)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in (OFF, THEN_ON, ON)}
    with ThreadPoolExecutor(args.parallel) as pool:
        jobs = {pool.submit(arm, args, name, seed): name for seed in args.seeds for name in results}
        before = figures_of(args, args.student_hf, prompts)  # beside the runs
        for job in as_completed(jobs):
            results[jobs[job]].append(figures_of(args, job.result() / "hf", prompts))
            print(f"\nafter {time.perf_counter() - start:.0f} s\n{report(results, before)}", flush=True)


if __name__ == "__main__":
    main()
