"""Does training with a teacher repair a rounded model? Four arms of one model, at equal tokens.

    python -m tools.benchmarks.rounded_students --model FOLDER --out FOLDER

The arms: the model as it is, rounded without training, rounded and trained on the text (SFT), rounded and
trained on the predictions of the model as it was (QAD). Both kinds of training get the same learning rates.
Of each the best one, by what it minimises on held-out text, runs with further seeds. The text is the
standard library of the running interpreter. Runs are commands of mkd, several at a time, each on one
GPU. Lines appear as runs end, and what does not fit into --seconds is left out and named.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NO_TRAINING, SFT, QAD = "no training", "SFT", "QAD"
FORMATS = {
    "int4": ("--student-rounding", "int4", "--rounding-group", "64"),
    "nvfp4 W4A4": ("--student-rounding", "nvfp4", "--round-activations"),
}
ALMOST_NO_KD = 1e-6  # of SFT: the loss is cross entropy, and the divergence is still measured
HELD_OUT_EVERY = 10  # files
LINES_BEFORE = 12  # of a prompt whose next line is asked for


@dataclass(frozen=True)
class Arm:
    """One run."""

    rounding: str  # key of FORMATS
    training: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rounding.split()[0]}-{self.training.replace(' ', '-')}-{self.lr:g}-{self.seed}"


@dataclass
class Result:
    """Held-out figures of a run, by training tokens."""

    arm: Arm
    seconds: float
    curve: dict[int, dict[str, float]] = field(default_factory=dict)  # tokens -> figure
    original: dict[str, float] = field(default_factory=dict)  # of the model as it is

    @property
    def last(self) -> dict[str, float]:
        return self.curve[max(self.curve)]

    @property
    def minimised(self) -> float:
        """Held-out value of what its training minimises."""
        return self.last["ce"] if self.arm.training == SFT else self.last["kl"]


def write_text(folder: Path, max_characters: int) -> None:
    """Write training and held-out documents, and next lines of the latter."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    sources = [one for one in sources if "site-packages" not in one.parts and "test" not in one.parts]
    train, valid, lines = [], [], []
    for index, source in enumerate(sources):
        text = source.read_text(encoding="utf-8", errors="replace")[:max_characters]
        if index % HELD_OUT_EVERY:
            train.append({"text": text})
        elif len(text) > 200:
            valid.append({"text": text})
            lines += next_lines(text)
    for name, records in (("train", train), ("valid", valid), ("lines", lines[:400])):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def next_lines(text: str) -> Iterable[dict[str, str]]:
    """Yield two prompts of a document, with the line that follows."""
    lines = text.splitlines(keepends=True)
    for start in (len(lines) // 3, 2 * len(lines) // 3):
        prompt, following = lines[max(0, start - LINES_BEFORE) : start], lines[start : start + 1]
        if len(prompt) == LINES_BEFORE and following and len(following[0].strip()) > 3:
            yield {"prompt": "".join(prompt), "completion": following[0]}


@dataclass
class Bench:
    """Runs arms at the same time, and collects their results."""

    args: argparse.Namespace
    deadline: float
    results: list[Result] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of runs

    def command(self, arm: Arm) -> list[str]:
        args, out = self.args, self.args.out
        trained = arm.training != NO_TRAINING
        steps = args.steps if trained else args.calibration + 1
        ratio = ALMOST_NO_KD if arm.training == SFT else 1
        words: list[Any] = [sys.executable, "-m", "mkd", "train", "--student-hf", args.model]
        words += ["--teacher-hf", "student-initial", "--kd-ratio", ratio, *FORMATS[arm.rounding]]
        if "--round-activations" in FORMATS[arm.rounding]:
            words += ["--calibration-batches", args.calibration]
        words += ["--data-path", out / "train.jsonl", "--valid-data-path", out / "valid.jsonl"]
        words += ["--eval-completions", out / "lines.jsonl", "--data-cache-path", out / "cache"]
        words += ["--seq-length", args.seq_length, "--micro-batch-size", args.micro_batch_size]
        words += ["--global-batch-size", args.global_batch_size, "--eval-iters", args.eval_iters]
        words += ["--train-iters", steps, "--eval-interval", args.eval_interval if trained else steps]
        words += ["--lr", arm.lr, "--lr-warmup-iters", min(args.warmup, steps - 1), "--seed", arm.seed]
        words += ["--adam-beta2", 0.95, "--weight-decay", 0, "--cuda-graphs", "off", "--bf16", "--no-save"]
        words += ["--log-dir", out / arm.name, "--log-interval", 10]
        return list(map(str, words))

    def gpu(self, number: int) -> dict[str, str]:
        """Return the variable that gives a run one of the GPUs, in turns."""
        gpus = self.args.gpus
        return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}

    def run(self, arm: Arm) -> None:
        """Run one arm, unless too little time is left."""
        left = self.deadline - time.monotonic()
        longest = max((one.seconds for one in self.results if one.arm.training == arm.training), default=0)
        if left < longest:
            print(f"{arm.name}: left out, {left:.0f} s are left", flush=True)
            return
        start = time.monotonic()
        (self.args.out / arm.name).mkdir(exist_ok=True)
        with open(self.args.out / arm.name / "output.txt", "wb") as output:
            env = {**os.environ, "OMP_NUM_THREADS": "1", **self.gpu(next(self.numbers))}
            try:
                code = subprocess.run(
                    self.command(arm), stdout=output, stderr=output, env=env, timeout=max(1, left)
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        if code:
            tail = (self.args.out / arm.name / "output.txt").read_text(errors="replace")[-600:]
            print(f"{arm.name}: exit code {code}: {' | '.join(tail.splitlines()[-4:])}", flush=True)
            return
        result = self.read(arm, time.monotonic() - start)
        with self.lock:
            self.results.append(result)
        print(f"{arm.name}: {text_of(result.last)}  {result.seconds:.0f} s", flush=True)

    def read(self, arm: Arm, seconds: float) -> Result:
        result, bytes_of_token = Result(arm, seconds), self.bytes_of_token()
        path = self.args.out / arm.name / "metrics.jsonl"
        for record in map(json.loads, path.read_text().splitlines()):
            tokens = record["iteration"] * self.args.global_batch_size * self.args.seq_length
            figures = result.curve.setdefault(tokens, {})
            if record.get("split") == "valid":
                kl, same = record["kd_loss"], record["top1_agreement"]
                figures |= dict(kl=kl, same=same, ce=record["ce_loss"])
                figures["bits"] = record["ce_loss"] / math.log(2) / bytes_of_token
                result.original |= dict(kl=0.0, same=1.0, ce=record["teacher_ce"])
                result.original["bits"] = record["teacher_ce"] / math.log(2) / bytes_of_token
            elif record.get("split") == "tasks":
                figures["line"] = math.exp(-record["eval/lines/ce"])
                teacher = [key for key in record if key.startswith("eval/lines/") and key.endswith("/ce")]
                result.original |= {"line": math.exp(-record[teacher[0]])} if teacher else {}
        result.curve = {tokens: one for tokens, one in result.curve.items() if "kl" in one}
        return result

    def bytes_of_token(self) -> float:
        """Return the bytes that a token of the held-out text has on average."""
        from transformers import AutoTokenizer

        with self.lock:
            if not hasattr(self, "_bytes"):
                lines = (self.args.out / "valid.jsonl").read_text(encoding="utf-8").splitlines()
                texts = [json.loads(line)["text"] for line in lines]
                tokenizer = AutoTokenizer.from_pretrained(self.args.model)
                tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts)
                self._bytes = sum(len(text.encode()) for text in texts) / tokens
            return self._bytes

    def run_all(self, arms: Sequence[Arm]) -> None:
        with ThreadPoolExecutor(self.args.at_once) as pool:
            list(pool.map(self.run, arms))

    def best(self, rounding: str, training: str) -> float | None:
        """Return the learning rate with the lowest loss on held-out text."""
        found = [one for one in self.results if (one.arm.rounding, one.arm.training) == (rounding, training)]
        return min(found, key=lambda one: one.minimised).arm.lr if found else None


def text_of(figures: dict[str, float]) -> str:
    return "  ".join(
        f"{name} {figures[name]:.4f}" for name in ("kl", "same", "bits", "line") if name in figures
    )


def table(bench: Bench) -> list[str]:
    """Return the rows: mean and standard deviation over seeds."""
    lines = [
        "",
        "| model | rate | seeds | KL to the original | equal top tokens | bits per byte | next line |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    originals = [one.original for one in bench.results if "line" in one.original]
    rows = [("original, bf16", "", originals[:1])]
    for rounding in bench.args.formats:
        for training in (NO_TRAINING, SFT, QAD):
            lr = bench.best(rounding, training)
            chosen = [
                one.last
                for one in bench.results
                if (one.arm.rounding, one.arm.training, one.arm.lr) == (rounding, training, lr)
            ]
            rows.append((f"{rounding}, {training}", f"{lr:g}" if lr else "", chosen))
    for name, rate, found in rows:
        cells = [_mean([one[key] for one in found if key in one]) for key in ("kl", "same", "bits", "line")]
        lines.append(f"| {name} | {rate} | {len(found)} | {' | '.join(cells)} |")
    return lines


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" +- {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def curves(bench: Bench) -> list[str]:
    """Return the KL by training tokens, of the best rate of each training."""
    lines = ["", "KL by training tokens, mean over seeds"]
    for rounding in bench.args.formats:
        for training in (SFT, QAD):
            lr = bench.best(rounding, training)
            of_arm = [
                one.curve
                for one in bench.results
                if (one.arm.rounding, one.arm.training, one.arm.lr) == (rounding, training, lr)
            ]
            if of_arm:
                points = sorted(set.intersection(*(set(curve) for curve in of_arm)))
                means = (statistics.fmean(curve[one]["kl"] for curve in of_arm) for one in points)
                pairs = zip(points, means, strict=True)
                text = "  ".join(f"{tokens / 1e3:.0f}k {kl:.4f}" for tokens, kl in pairs)
                lines.append(f"{rounding}, {training}: {text}")
    return lines


def write_csv(bench: Bench) -> None:
    """Write every point of every run."""
    with open(bench.args.out / "rounded_students.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        keys = ("kl", "same", "ce", "bits", "line")
        rows.writerow(("format", "training", "lr", "seed", "tokens", *keys))
        for one in sorted(bench.results, key=lambda one: one.arm.name):
            for tokens, figures in one.curve.items():
                given = (one.arm.rounding, one.arm.training, one.arm.lr, one.arm.seed, tokens)
                rows.writerow((*given, *(figures.get(key, "") for key in keys)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for text, runs and the CSV file")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-5, 1e-4, 3e-4], help="learning rates")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--eval-interval", type=int, default=40)
    parser.add_argument("--eval-iters", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=10, help="steps of a rising rate")
    parser.add_argument("--calibration", type=int, default=8, help="batches that only measure inputs")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=4)
    parser.add_argument("--characters", type=int, default=20_000, help="length of a document, at most")
    parser.add_argument("--at-once", type=int, default=8, help="runs at the same time")
    parser.add_argument(
        "--gpus", nargs="+", help="numbers of the GPUs that take runs in turns (default: any)"
    )
    parser.add_argument("--seconds", type=float, default=380, help="for all runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out, args.characters)
    bench = Bench(args, start + args.seconds)
    first = args.seeds[0]
    # One run alone tokenises the text; the others find it in the cache.
    bench.run(Arm(args.formats[0], NO_TRAINING, 0.0, first))
    arms = [Arm(rounding, NO_TRAINING, 0.0, first) for rounding in args.formats[1:]]
    pairs = [(rounding, training) for rounding in reversed(args.formats) for training in (QAD, SFT)]
    arms += [Arm(*pair, lr, first) for lr in args.rates for pair in pairs]
    bench.run_all(arms)
    best = {pair: bench.best(*pair) for pair in pairs}
    bench.run_all([Arm(*pair, lr, seed) for seed in args.seeds[1:] for pair, lr in best.items() if lr])
    print("\n".join(table(bench) + curves(bench)), flush=True)
    write_csv(bench)
    tokens = args.steps * args.global_batch_size * args.seq_length
    print(f"{tokens:,} tokens a run; {time.monotonic() - start:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
