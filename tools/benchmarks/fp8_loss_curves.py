"""Does a student in FP8 learn as one in bf16? Held-out losses of both recipes beside bf16, for several seeds.

    python -m tools.benchmarks.fp8_loss_curves --out FOLDER --gpus 0 1 2 3

A teacher of 30 layers with random weights learns Python sources of this machine. Students of 15 layers then
learn from it and from the text, in bf16 and in FP8. Students of one seed have the same first weights and the
same data. A second run in bf16 shows what another order of sums does. Runs are commands of mkd, one a GPU
at a time. Lines appear as runs end, and what does not fit into --seconds is left out and named. `--dry`
runs the same on a CPU, tiny and without FP8.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import queue
import site
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AGAIN = "bf16 again"
ARMS = {
    "bf16": (),
    AGAIN: (),  # kernels add in another order: differences that mean nothing
    "tensorwise": ("--student-precision", "fp8", "--student-fp8-recipe", "tensorwise"),
    "blockwise": ("--student-precision", "fp8", "--student-fp8-recipe", "blockwise"),
}
HELD_OUT_EVERY = 10  # files
EOS = "<|endoftext|>"
SMOLLM2_135M = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    rope_theta=1e5,
)
TINY = dict(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparison."""

    shape: dict[str, Any]
    student_layers: int
    teacher_layers: int
    seq_length: int
    steps: int
    teacher_steps: int
    eval_interval: int
    eval_iters: int
    log_interval: int
    characters: int  # of training text

    packs = 8  # of a step


FULL = Sizes(SMOLLM2_135M, 15, 30, 2048, 200, 300, 50, 6, 10, 24_000_000)
DRY = Sizes(TINY, 2, 3, 64, 4, 4, 2, 1, 2, 200_000)


def sources() -> Iterator[str]:
    """Yield Python files of the standard library and of installed packages, in a fixed order."""
    roots = [sysconfig.get_path("stdlib"), *site.getsitepackages(), *sys.path]
    seen = set()
    for root in dict.fromkeys(Path(one) for one in roots if one and Path(one).is_dir()):
        for path in sorted(root.rglob("*.py")):
            if path.is_file() and path.resolve() not in seen and path.stat().st_size > 2000:
                seen.add(path.resolve())
                yield path.read_text(encoding="utf-8", errors="replace")[:60_000]


def write_text(folder: Path, characters: int) -> list[str]:
    """Write training and held-out documents; return the former."""
    train: list[str] = []
    valid: list[str] = []
    written = 0
    for index, text in enumerate(sources()):
        if index % HELD_OUT_EVERY == 0:
            valid.append(text)
            continue
        train.append(text)
        written += len(text)
        if written > characters:
            break
    for name, texts in (("train", train), ("valid", valid)):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{written / 1e6:.1f} million characters of {len(train)} files, {len(valid)} held out", flush=True)
    return train


def write_tokenizer(folder: Path, texts: Sequence[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer on a part of the texts, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], show_progress=False, initial_alphabet=alphabet
    )
    sample = list(itertools.islice(texts, 0, len(texts), 3))
    tokenizer.train_from_iterator(sample, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    print(f"tokenizer of {len(fast)} tokens", flush=True)
    return fast


def write_model(folder: Path, tokenizer: Any, shape: dict[str, Any], layers: int, seed: int) -> None:
    """Write a model with random weights, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **shape,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        eos_token_id=0,
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Run:
    """One run of the comparison."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.replace(' ', '-')}-{self.seed}"


@dataclass
class Curve:
    """Losses of a run."""

    held_out: dict[int, tuple[float, float]] = field(default_factory=dict)  # step -> cross entropy, KL
    training: dict[int, float] = field(default_factory=dict)  # last step of an interval -> mean loss


@dataclass
class Bench:
    """Runs the arms, and collects their curves."""

    args: argparse.Namespace
    sizes: Sizes
    deadline: float
    curves: dict[Run, Curve] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def prepare(self) -> None:
        """Write texts and models, and train the teacher, unless an earlier call has done so."""
        out, sizes = self.args.out, self.sizes
        if (out / "teacher" / "config.json").exists():
            return
        tokenizer = write_tokenizer(out, write_text(out, sizes.characters), sizes.shape["vocab_size"])
        write_model(out / "teacher-start", tokenizer, sizes.shape, sizes.teacher_layers, 0)
        for seed in self.args.seeds:
            write_model(out / f"student-{seed}", tokenizer, sizes.shape, sizes.student_layers, seed)
        words = ["--student-hf", out / "teacher-start", "--kd-ratio", 0, "--export-hf", out / "teacher"]
        words += ["--train-iters", sizes.teacher_steps, "--eval-interval", sizes.teacher_steps]
        self.command("teacher", words, 0, self.args.gpus[0])
        held_out = read(out / "teacher").held_out
        print("teacher: held-out cross entropy", {step: one[0] for step, one in held_out.items()}, flush=True)

    def run(self, run: Run, gpu: str) -> None:
        """Run one arm, unless too little time is left."""
        start, out = time.monotonic(), self.args.out
        least = max(self.seconds, default=0) / 3  # the start of a curve is better than none
        if self.deadline - start < least:
            print(f"{run.name}: left out, {self.deadline - start:.0f} s are left", flush=True)
            return
        words = ["--student-hf", out / f"student-{run.seed}", "--teacher-hf", out / "teacher"]
        words += ["--kd-ratio", 0.5, "--train-iters", self.sizes.steps]
        words += ["--eval-interval", self.sizes.eval_interval, *([] if self.args.dry else ARMS[run.arm])]
        name = f"{run.name}-{self.args.lr:g}"
        is_whole = self.command(name, words, run.seed, gpu)
        curve = self.curves[run] = read(out / name)
        if is_whole:
            self.seconds.append(time.monotonic() - start)
        print(f"{run.name}: {held_out_text(curve)}  {time.monotonic() - start:.0f} s", flush=True)

    def command(self, name: str, words: list[Any], seed: int, gpu: str) -> bool:
        """Run a command of mkd, and return True if it succeeded."""
        out, sizes = self.args.out, self.sizes
        argv: list[Any] = [sys.executable, "-m", "mkd", "train", *words, "--data-path", out / "train.jsonl"]
        argv += ["--valid-data-path", out / "valid.jsonl", "--data-cache-path", out / "cache"]
        argv += ["--seq-length", sizes.seq_length, "--global-batch-size", sizes.packs, "--bf16"]
        argv += ["--eval-iters", sizes.eval_iters, "--log-interval", sizes.log_interval, "--seed", seed]
        argv += ["--lr", self.args.lr, "--lr-warmup-iters", min(20, sizes.steps // 2), "--adam-beta2", 0.95]
        argv += ["--no-save", "--log-dir", out / name]
        (out / name).mkdir(exist_ok=True)
        env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "4"}
        left = max(1.0, self.deadline - time.monotonic())
        with open(out / name / "output.txt", "wb") as output:
            try:
                done = subprocess.run(
                    list(map(str, argv)), stdout=output, stderr=output, env=env, timeout=left
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = -1
        if code:
            tail = (out / name / "output.txt").read_text(errors="replace").splitlines()[-6:]
            print(f"{name}: exit code {code}: {' | '.join(tail)[-700:]}", flush=True)
        return code == 0

    def run_all(self) -> None:
        """Run all arms, seed by seed, on the GPUs that are free; runs that are made again come last."""
        waiting: queue.Queue[Run] = queue.Queue()
        runs = [Run(arm, seed) for seed in self.args.seeds for arm in self.args.arms]
        for run in sorted(runs, key=lambda one: one.arm == AGAIN):
            waiting.put(run)

        def lane(gpu: str) -> None:
            while True:
                try:
                    run = waiting.get_nowait()
                except queue.Empty:
                    return
                self.run(run, gpu)

        lanes = [threading.Thread(target=lane, args=(gpu,)) for gpu in self.args.gpus]
        for one in lanes:
            one.start()
        for one in lanes:
            one.join()


def read(folder: Path) -> Curve:
    """Return the losses that a run has logged."""
    curve, path = Curve(), folder / "metrics.jsonl"
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        if record.get("split") == "valid":
            curve.held_out[record["iteration"]] = record["ce_loss"], record.get("kd_loss", 0.0)
        elif "split" not in record or record["split"] == "train":
            curve.training[record["iteration"]] = record["loss"]
    return curve


def held_out_text(curve: Curve) -> str:
    return "  ".join(f"step {step} CE {ce:.4f} KL {kl:.4f}" for step, (ce, kl) in curve.held_out.items())


def tables(bench: Bench) -> Iterator[str]:
    """Yield the lines of the tables: held-out losses, mean training losses, and differences from bf16."""
    runs = sorted(bench.curves, key=lambda one: (one.seed, list(ARMS).index(one.arm)))
    interval = bench.sizes.eval_interval
    steps = range(0, bench.sizes.steps + 1, interval)
    figures: dict[str, Callable[[Run, int], float | None]] = {
        "held-out cross entropy": lambda run, step: bench.curves[run].held_out.get(step, (None,) * 2)[0],
        "held-out KL": lambda run, step: bench.curves[run].held_out.get(step, (None,) * 2)[1],
        f"training loss, mean of the {interval} steps before": lambda run, step: mean_before(
            bench.curves[run], step, interval
        ),
    }
    for title, figure in figures.items():
        yield from ("", f"| {title} | {' | '.join(f'step {step}' for step in steps)} |")
        yield "|---|" + "---|" * len(steps)
        for run in runs:
            yield f"| seed {run.seed}, {run.arm} | {' | '.join(cell(figure(run, step)) for step in steps)} |"
        for arm in [one for one in bench.args.arms if one != "bf16"]:
            cells = [
                differences(figure, [run for run in runs if run.arm == arm], step, bench.curves)
                for step in steps
            ]
            yield f"| {arm} - bf16: mean (largest) | {' | '.join(cells)} |"


def mean_before(curve: Curve, step: int, interval: int) -> float | None:
    """Return the mean training loss of the interval that ends with `step`."""
    found = [loss for last, loss in curve.training.items() if step - interval < last <= step]
    return statistics.fmean(found) if found else None


def differences(
    figure: Callable[[Run, int], float | None], runs: Sequence[Run], step: int, curves: dict[Run, Curve]
) -> str:
    """Return mean and largest difference from the runs in bf16 with the same seeds."""
    found = []
    for run in runs:
        base = Run("bf16", run.seed)
        pair = figure(run, step), figure(base, step) if base in curves else None
        if None not in pair:
            found.append(pair[0] - pair[1])  # type: ignore[operator]
    if not found:
        return "-"
    return f"{statistics.fmean(found):+.4f} ({max(found, key=abs):+.4f})"


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def write_csv(bench: Bench) -> None:
    """Write every point of every run."""
    path = bench.args.out / f"fp8_loss_curves_{bench.args.lr:g}.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("arm", "seed", "step", "held_out_ce", "held_out_kl", "training_loss"))
        for run, curve in bench.curves.items():
            for step in sorted({*curve.held_out, *curve.training}):
                figures = *curve.held_out.get(step, ("", "")), curve.training.get(step, "")
                rows.writerow((run.arm, run.seed, step, *figures))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for text, models, runs and the CSV")
    parser.add_argument(
        "--gpus", nargs="+", default=["0"], help="numbers of GPUs, for one run at a time each"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate, also the teacher's")
    parser.add_argument("--seconds", type=float, default=290, help="for everything")
    parser.add_argument("--dry", action="store_true", help="tiny models, and bf16 in all arms")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args, start = parse(argv), time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, DRY if args.dry else FULL, start + args.seconds)
    bench.prepare()
    print(f"{time.monotonic() - start:.0f} s until the teacher was ready", flush=True)
    bench.run_all()
    print("\n".join(tables(bench)), flush=True)
    write_csv(bench)
    print(f"{time.monotonic() - start:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
