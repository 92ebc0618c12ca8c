"""Measure what GRPO gains over SFT at equal samples, on arithmetic problems with a checker.

    pip install reasoning-gym==0.1.25   # in a venv of its own; only this first command needs it
    python tools/benchmarks/reward_gain.py problems --folder F
    python tools/benchmarks/reward_gain.py compare --folder F --student-hf S

A student first learns the form of answers by supervised steps. Then two arms start from it, with equally many
samples a step: SFT on problems with their answers, and GRPO on its own completions of such problems, which
`arithmetic_reward.py` judges. The figure is the mean reward of completions of held-out problems, at T = 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mkd.log.records import read_records  # noqa: E402

REWARD = "tools.benchmarks.arithmetic_reward:exact"
SEQ_LENGTH, NEW_TOKENS = 64, 12


def write_problems(folder: Path, count: int, held_out: int, terms: int, digits: int) -> None:
    """Write held_out.jsonl, and train.jsonl without its problems: {"prompt", "completion", "answer"}."""
    import reasoning_gym

    sizes = dict(min_terms=2, max_terms=terms, min_digits=1, max_digits=digits)
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, str] = {}
    training: list[tuple[str, str]] = []
    for item in reasoning_gym.create_dataset("chain_sum", size=2 * (count + held_out), seed=1, **sizes):
        prompt, answer = item["question"].rpartition(": ")[2], item["answer"]  # "4 - 1 - 7 =", "-4"
        if len(kept) < held_out:
            kept[prompt] = answer
        elif prompt not in kept and len(training) < count:
            training.append((prompt, answer))
    for name, problems in (("held_out", list(kept.items())), ("train", training)):
        lines = [{"prompt": p, "completion": f" {answer}", "answer": answer} for p, answer in problems]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def run(folder: Path, name: str, *flags: object) -> float:
    """Train with these flags, logging to folder/name; return the seconds it took."""
    command = [sys.executable, str(ROOT / "pretrain_kd.py"), "--log-dir", folder / name]
    command += ["--seq-length", SEQ_LENGTH, "--data-cache-path", folder / "cache", *flags]
    start = time.perf_counter()
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return time.perf_counter() - start


def sft(samples: int, steps: int, lr: float) -> list[object]:
    """Return the flags of supervised steps with `samples` problems each."""
    return [
        "--kd-ratio",
        0,
        "--pack",
        "none",
        "--global-batch-size",
        samples,
        "--train-iters",
        steps,
        "--lr",
        lr,
    ]


def grpo(prompts: int, group: int, steps: int, lr: float) -> list[object]:
    """Return the flags of steps with `group` completions of each of `prompts` problems."""
    flags = ["--reward", REWARD, "--kd-ratio", 0, "--on-policy-fraction", 1, "--max-new-tokens", NEW_TOKENS]
    flags += ["--rollout-prompts", prompts, "--samples-per-prompt", group, "--rollout-slots", 256]
    return [*flags, "--train-iters", steps, "--lr", lr, "--lr-decay-style", "constant"]


def reward_of(folder: Path, name: str, student: Path, more: Sequence[str]) -> float:
    """Return the mean reward of completions of all held-out problems, four each."""
    flags = ["--student-hf", student, "--prompt-data-path", folder / "held_out.jsonl", "--no-shuffle", *more]
    held_out = sum(1 for _ in (folder / "held_out.jsonl").open(encoding="utf-8"))
    run(folder, f"{name} held out", *flags, *grpo(held_out, 4, 1, 0.0))
    return read_records(folder / f"{name} held out")[0]["reward/mean"]


def compare(folder: Path, student: str, more: Sequence[str], args: argparse.Namespace) -> None:
    """Train the common start and both arms, and print their held-out rewards."""
    problems, samples = folder / "train.jsonl", args.prompts * args.group
    start, text = folder / "start" / "hf", ["--data-path", problems, *more]
    seconds = run(
        folder,
        "start",
        "--student-hf",
        student,
        "--export-hf",
        start,
        *text,
        *sft(samples, args.start, args.lr),
    )
    print(f"start: {args.start} SFT steps of {samples} problems, {seconds:.0f} s", flush=True)
    rewards = {"start": reward_of(folder, "start", start, more)}
    print(f"held-out reward {rewards['start']:.3f}", flush=True)
    arms = {
        "SFT": [*text, *sft(samples, args.steps, args.lr)],
        "GRPO": [
            "--prompt-data-path",
            problems,
            *more,
            *grpo(args.prompts, args.group, args.steps, args.rl_lr),
        ],
    }
    for name, flags in arms.items():
        out = folder / name / "hf"
        seconds = run(folder, name, "--student-hf", start, "--export-hf", out, *flags)
        rewards[name] = reward_of(folder, name, out, more)
        print(f"{name}: {args.steps} steps of {samples} samples, {seconds:.0f} s", flush=True)
        print(f"held-out reward {rewards[name]:.3f}", flush=True)
    curve = [line["reward/mean"] for line in read_records(folder / "GRPO") if "reward/mean" in line]
    print("GRPO's own samples:", *(f"{value:.2f}" for value in curve[:: max(1, len(curve) // 12)]))
    print("GRPO above SFT" if rewards["GRPO"] > rewards["SFT"] else "GRPO not above SFT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("problems", "compare"))
    parser.add_argument("--folder", required=True, help="problems and runs")
    parser.add_argument("--student-hf", help="folder of the student, with its tokenizer")
    parser.add_argument("--count", type=int, default=8192, help="training problems")
    parser.add_argument("--held-out", type=int, default=256, help="held-out problems")
    parser.add_argument("--terms", type=int, default=3, help="most terms of a sum")
    parser.add_argument("--digits", type=int, default=2, help="most digits of a term")
    parser.add_argument("--start", type=int, default=60, help="SFT steps of the common start")
    parser.add_argument("--steps", type=int, default=60, help="steps of each arm")
    parser.add_argument("--prompts", type=int, default=32, help="problems of a step of GRPO")
    parser.add_argument("--group", type=int, default=8, help="completions of each")
    parser.add_argument("--lr", type=float, default=1e-4, help="of SFT")
    parser.add_argument("--rl-lr", type=float, default=1e-5, help="of GRPO")
    args, more = parser.parse_known_args()  # the rest goes to pretrain_kd.py
    folder = Path(args.folder).absolute()
    if args.what == "problems":
        write_problems(folder, args.count, args.held_out, args.terms, args.digits)
    else:
        compare(folder, args.student_hf, more, args)


if __name__ == "__main__":
    main()
