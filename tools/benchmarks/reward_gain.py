"""Measure what GRPO gains over SFT at equal samples, on arithmetic problems with a checker.

    pip install reasoning-gym==0.1.25   # in a venv of its own; only this first command needs it
    python tools/benchmarks/reward_gain.py problems --folder F
    python tools/benchmarks/reward_gain.py start --folder F --student-hf S     # prints its reward
    python tools/benchmarks/reward_gain.py compare --folder F --student-hf S   # goes on from there

A problem is a sum of several terms. Half of the demonstrations give the answer alone, half the partial sums
first. A student learns both forms by supervised steps. Then three arms start from it, with equally many
samples a step: GRPO on its own completions, which `arithmetic_reward.py` judges; SFT on the demonstrations of
the same problems, as many epochs as GRPO has completions of one; SFT on as many demonstrations as GRPO has
completions, each used once. SFT keeps the proportion of the forms. GRPO is to find by its rewards which form
serves this student. Every arm has several seeds, and all runs share the device. The figure is the mean reward
of completions of held-out problems at T = 1, which transformers samples, and the fraction with partial sums.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain, product
from pathlib import Path
from random import Random
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mkd.log.records import read_records  # noqa: E402
from tools.benchmarks.arithmetic_reward import exact  # noqa: E402
from tools.benchmarks.benchmark_report import mean_and_spread, table  # noqa: E402

REWARD = "tools.benchmarks.arithmetic_reward:exact"
SAME, NEW = "SFT, same problems", "SFT, more problems"
SEQ_LENGTH, NEW_TOKENS, JUDGED = 32, 16, 8  # tokens; completions of a held-out problem
WARM_UP, SHOWN = 5, 10  # steps; points of a curve
FIGURES = "reward", "with partial sums", "reward of these", "reward of others"


def write_problems(args: argparse.Namespace) -> None:
    """Write held_out.jsonl, and train.jsonl without its problems: {"prompt", "completion", "answer"}."""
    import reasoning_gym

    sizes = dict(min_terms=3, max_terms=args.terms, min_digits=1, max_digits=args.digits)
    random, size = Random(1), 2 * (args.count + args.held_out)
    held_out: dict[str, str] = {}
    training: list[str] = []
    for item in reasoning_gym.create_dataset("chain_sum", size=size, seed=1, **sizes):
        prompt, answer = item["question"].rpartition(": ")[2], item["answer"]  # "4 - 1 - 7 =", "-4"
        completion = partial_sums(prompt) if random.random() < 0.5 else f" {answer}"
        line = json.dumps({"prompt": prompt, "completion": completion, "answer": answer})
        if len(held_out) < args.held_out:
            held_out[prompt] = line
        elif prompt not in held_out and len(training) < args.count:
            training.append(line)
    args.folder.mkdir(parents=True, exist_ok=True)
    write_lines(args.folder / "held_out.jsonl", list(held_out.values()))
    write_lines(args.folder / "train.jsonl", training)


def partial_sums(prompt: str) -> str:
    """Return the sums after the second, third ... term, a line each: "\\n3\\n-4" of "4 - 1 - 7 ="."""
    first, *rest = prompt.removesuffix(" =").split()
    total, lines = int(first), ""
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        lines += f"\n{total}"
    return lines


def write_lines(file: Path, lines: Sequence[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def split(args: argparse.Namespace) -> None:
    """Write the problems of the start and of the arms, which differ, from train.jsonl."""
    lines = (args.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    samples, asked = args.prompts * args.group, args.steps * args.prompts
    needed = args.start * samples, args.steps * samples
    if len(lines) < sum(needed):
        raise SystemExit(f"train.jsonl has {len(lines)} problems, {sum(needed)} are needed: raise --count")
    write_lines(args.folder / "start.jsonl", lines[: needed[0]])
    write_lines(args.folder / "same.jsonl", lines[needed[0] : needed[0] + asked])
    write_lines(args.folder / "new.jsonl", lines[needed[0] : sum(needed)])


def train(args: argparse.Namespace, name: str, student: Path, flags: dict[str, object]) -> Path:
    """Train, unless the same run is complete, and return the exported student."""
    log_dir = args.folder / name
    flags = {
        "student-hf": student, "log-dir": log_dir, "export-hf": log_dir / "hf", "seq-length": SEQ_LENGTH,
        "data-cache-path": log_dir / "cache", "kd-ratio": 0, "micro-batch-size": args.micro_batch_size,
        "lr-warmup-iters": WARM_UP, **flags,
    }  # fmt: skip
    if "data-path" in flags:
        flags |= {"pack": "none", "global-batch-size": args.prompts * args.group}
    words = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    command = [
        sys.executable,
        str(ROOT / "pretrain_kd.py"),
        "--no-save",
        "--overwrite",
        *words,
        *args.flags.split(),
    ]
    done, output = log_dir / "done", log_dir / "output.txt"
    if done.exists() and done.read_text(encoding="utf-8") == "\n".join(command):
        return log_dir / "hf"
    log_dir.mkdir(parents=True, exist_ok=True)
    with open(output, "w", encoding="utf-8") as out:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, env=environment).returncode
    if code:
        raise SystemExit(f"{name} failed:\n{output.read_text(encoding='utf-8')[-4000:]}")
    done.write_text("\n".join(command), encoding="utf-8")
    return log_dir / "hf"


def grpo_arms(args: argparse.Namespace) -> dict[str, float]:
    """Return the learning rate of each arm of GRPO."""
    return {f"GRPO, lr {lr:g}": lr for lr in args.rl_lr}


def arm(args: argparse.Namespace, name: str, seed: int, start: Path) -> Path:
    """Train one arm with one seed from the common start, and return its folder."""
    flags: dict[str, object] = {"seed": seed, "train-iters": args.steps, "lr": args.sft_lr}
    if name in grpo_arms(args):
        flags |= {
            "reward": REWARD, "on-policy-fraction": 1, "prompt-data-path": args.folder / "same.jsonl",
            "max-new-tokens": NEW_TOKENS, "rollout-prompts": args.prompts, "samples-per-prompt": args.group,
            "rollout-slots": args.prompts * args.group, "lr": grpo_arms(args)[name],
            "lr-decay-style": "constant",
        }  # fmt: skip
    else:
        flags["data-path"] = args.folder / ("same.jsonl" if name == SAME else "new.jsonl")
    begin = time.perf_counter()
    folder = train(args, f"{name} {seed}", start, flags).parent
    print(f"{name}, seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
    return folder


def judge(args: argparse.Namespace, student: Path) -> dict[str, float]:
    """Return the figures of a student's held-out completions at T = 1: see `FIGURES`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = (args.folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(student, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).eval().to(device)
    prompts = [problem["prompt"] for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
    settings = dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW_TOKENS)
    settings |= dict(num_return_sequences=JUDGED, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    rows = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
    by_form: dict[bool, list[float]] = {True: [], False: []}  # whether it has partial sums
    for i, text in enumerate(tokenizer.batch_decode(rows, skip_special_tokens=True)):
        by_form[len(text.split()) > 1].append(exact("", text, problems[i // JUDGED]))
    both = by_form[True] + by_form[False]
    of_forms = (mean(one or [0.0]) for one in by_form.values())
    return dict(zip(FIGURES, (mean(both), len(by_form[True]) / len(both), *of_forms), strict=True))


def report(results: dict[str, list[dict[str, float]]]) -> str:
    """Return the table of the arms: mean and standard deviation over seeds."""
    rows = []
    for name, of_seeds in results.items():
        cells = (mean_and_spread([one[key] for one in of_seeds]) for key in FIGURES)
        rows.append([name, str(len(of_seeds)), *cells])
    return table("held-out problems, completions at T = 1", ["arm", "seeds", *FIGURES], rows)


def train_start(args: argparse.Namespace) -> Path:
    """Train the common start, unless it is complete, and return it."""
    split(args)
    flags = {"data-path": args.folder / "start.jsonl", "train-iters": args.start, "lr": args.lr}
    return train(args, "start", args.student_hf, flags)


def compare(args: argparse.Namespace) -> None:
    """Train the common start and all arms, and print the table of held-out figures after each."""
    begin = time.perf_counter()
    start = train_start(args)
    names = SAME, NEW, *grpo_arms(args)
    with ThreadPoolExecutor(args.parallel) as pool:
        jobs = {pool.submit(arm, args, name, seed, start): name for seed in args.seeds for name in names}
        results = {"start": [judge(args, start)], **{name: [] for name in names}}
        for job in chain((None,), as_completed(jobs)):
            if job is not None:
                results[jobs[job]].append(judge(args, job.result() / "hf"))
            print(f"\nafter {time.perf_counter() - begin:.0f} s\n{report(results)}", flush=True)
    for name, seed in product(grpo_arms(args), args.seeds):
        records = read_records(args.folder / f"{name} {seed}")
        curve = [line["reward/mean"] for line in records if "reward/mean" in line]
        parts = [curve[i * len(curve) // SHOWN : (i + 1) * len(curve) // SHOWN] for i in range(SHOWN)]
        print(f"own samples of {name}, seed {seed}:", *(f"{mean(part):.3f}" for part in parts if part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("problems", "start", "compare"))
    parser.add_argument("--folder", type=Path, required=True, help="problems and runs")
    parser.add_argument("--student-hf", type=Path, help="folder of the student, with its tokenizer")
    parser.add_argument("--count", type=int, default=60000, help="training problems")
    parser.add_argument("--held-out", type=int, default=512, help="held-out problems")
    parser.add_argument("--terms", type=int, default=4, help="most terms of a sum")
    parser.add_argument("--digits", type=int, default=1, help="most digits of a term")
    parser.add_argument("--start", type=int, default=160, help="SFT steps of the common start")
    parser.add_argument("--steps", type=int, default=60, help="steps of each arm")
    parser.add_argument("--prompts", type=int, default=32, help="problems of a step of GRPO")
    parser.add_argument("--group", type=int, default=8, help="completions of each problem")
    parser.add_argument("--micro-batch-size", type=int, default=128, help="rows that a step runs together")
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="learning rate of the start, with cosine decay"
    )
    parser.add_argument("--sft-lr", type=float, default=1e-4, help="learning rate of SFT, with cosine decay")
    parser.add_argument(
        "--rl-lr", type=float, nargs="+", default=[1e-5], help="learning rates of GRPO, constant: an arm each"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--parallel", type=int, default=9, help="runs at the same time, planned at 7 GiB each"
    )
    parser.add_argument("--flags", default="", help="more flags of pretrain_kd.py")
    args = parser.parse_args()
    args.folder = args.folder.absolute()
    if args.what == "problems":
        write_problems(args)
    elif args.what == "start":
        print(report({f"start, lr {args.lr:g}": [judge(args, train_start(args))]}))
    else:
        compare(args)


if __name__ == "__main__":
    main()
