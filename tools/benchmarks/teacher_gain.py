"""Do teachers that read references, and experts by tag, pay? Two tables of one model, three seeds each.

    python -m tools.benchmarks.teacher_gain --model FOLDER --out FOLDER

Self-teachers: a start, which solves sums badly, learns from problems with reference solutions. Arms:
supervised steps on the references; the start as a teacher that reads them, on stored references and on the
student's own text; the student itself as such a teacher; an expert without references, on the student's own
text. Every arm sees each problem equally often. With the first seed it runs with each learning rate; the one
that solves most validation problems runs with the other seeds.

Experts: the model becomes an expert for sums and one for code. A copy of it learns both from the teachers
of the tag, from the average of both teachers, or from the text alone. Two more rows need no training: each
expert, and the mean of their weights.

Runs are commands of mkd, several at a time on each GPU. A call with the same --out continues: complete runs
are kept, and runs that do not fit into --seconds are left out and named. For a GPU without network see
docs/decisions/2026-11-27-what-teachers-gain.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.benchmarks.fp8_loss_curves import TINY, write_model, write_tokenizer  # noqa: E402
from tools.benchmarks.gain_report import EXPERTS, SELF, Run, best_rate, tables, write_csv  # noqa: E402
from tools.benchmarks.gain_texts import (  # noqa: E402
    CONTEXT,
    PLAIN,
    TextSizes,
    average_weights,
    judge,
    read_lines,
    write_texts,
)

REFERENCES = {"user": CONTEXT}
OWN_TEXT = {
    "initial self-teacher with references, own text": {"hf": "student-initial", "context": REFERENCES},
    "live self-teacher with references, own text": {"weights": "live", "context": REFERENCES},
    "ema self-teacher with references, own text": {"weights": "ema", "context": REFERENCES},
    "expert without references, own text": {"hf": "{out}/sums expert/hf"},
}
STORED = "initial self-teacher with references, stored text"
SFT = "SFT on the references"
SELF_ARMS = (SFT, STORED, *OWN_TEXT)
MERGES = ("route", "average", "SFT on both texts")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparison."""

    texts: TextSizes
    starts: tuple[int, ...]  # steps of the starts to choose from
    expert_steps: int
    steps: int  # of the arms with self-teachers
    merge_steps: int
    samples: int = 128  # of a step
    row: int = 96  # tokens of a problem with its solution, at most
    new_tokens: int = 68
    own_pack: int = 256  # tokens of a pack of own text: each slot has room for as many keys and values
    seq_length: int = 1024
    packs: int = 16  # of a step of experts and their students
    micro_batch: int = 4


FULL = Sizes(TextSizes(24_000, 960, 48_000, 256, 512), (20, 40, 80, 160), 200, 45, 150)
SMALL = TextSizes(
    60, 16, 120, 4, 8, document=2_000, characters=60_000, held_out_files=3, held_out_document=600
)
DRY = Sizes(SMALL, (1, 2), 2, 2, 2, samples=4, row=160, new_tokens=12, seq_length=256, packs=2, micro_batch=1)


@dataclass
class Bench:
    """Runs commands at the same time, and collects figures of their models."""

    args: argparse.Namespace
    sizes: Sizes
    deadline: float
    figures: dict[Run, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # arm -> of its longest run
    start: str = ""  # name of the chosen start

    def flags(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the flags of a run, and its configuration file."""
        out, sizes = self.args.out, self.sizes
        student = self.args.model if run.part != SELF else out / self.start / "hf"
        flags = {
            "student-hf": student, "seed": run.seed, "lr": run.lr, "lr-decay-style": "cosine",
            "adam-beta2": 0.95, "weight-decay": 0, "kd-ratio": 0, "seq-length": sizes.seq_length,
            "micro-batch-size": sizes.micro_batch, "global-batch-size": sizes.packs,
            "eval-iters": 0, "log-interval": 5,
        }  # fmt: skip
        config: dict[str, Any] = {}
        if run.part == SELF:
            self.add_self_teacher(run.arm, flags, config)
        elif run.part == EXPERTS:
            self.add_experts(run.arm, flags, config)
        elif run.arm.startswith("start"):
            flags |= {"data-path": out / "start.jsonl", "train-iters": int(run.arm.split()[1])}
        else:
            name = "code.jsonl" if run.arm == "code expert" else "sums.jsonl"
            flags |= {"data-path": out / name, "train-iters": sizes.expert_steps}
        flags["lr-warmup-iters"] = min(5, flags["train-iters"] - 1)
        return flags, config

    def add_self_teacher(self, arm: str, flags: dict[str, Any], config: dict[str, Any]) -> None:
        out, sizes = self.args.out, self.sizes
        flags["train-iters"] = sizes.steps
        if arm == SFT:
            one_each = {"data-path": out / "arms.jsonl"}
        else:
            flags["kd-ratio"] = 1
            one_each = {"data-path": out / "references.jsonl"}
            teacher = dict(OWN_TEXT.get(arm) or OWN_TEXT[SELF_ARMS[2]])
            if "context" not in teacher:
                teacher["hf"] = teacher["hf"].format(out=out)
            config["teachers"] = [{"name": "self" if "context" in teacher else "expert", **teacher}]
        if arm in OWN_TEXT:
            prompts = "prompts" if "context" in OWN_TEXT[arm] else "plain_prompts"
            flags |= {
                "on-policy-fraction": 1, "prompt-data-path": out / f"{prompts}.jsonl",
                "rollout-prompts": sizes.samples, "samples-per-prompt": 1,
                "rollout-slots": sizes.samples, "max-new-tokens": sizes.new_tokens,
                "kd-divergence": self.args.divergence, "seq-length": sizes.own_pack,
                "micro-batch-size": 4 * sizes.micro_batch, "global-batch-size": 4 * sizes.micro_batch,
            }  # fmt: skip
        else:
            of_step = {"pack": "none", "seq-length": sizes.row, "global-batch-size": sizes.samples}
            flags |= {**one_each, **of_step, "micro-batch-size": min(32, sizes.samples)}

    def add_experts(self, arm: str, flags: dict[str, Any], config: dict[str, Any]) -> None:
        out = self.args.out
        flags["train-iters"] = self.sizes.merge_steps
        config["data"] = {"data_path": [1, str(out / "sums.jsonl"), 1, str(out / "code.jsonl")]}
        if arm == MERGES[-1]:
            return
        flags["kd-ratio"] = 1
        config["kd"] = {"teacher_combination": arm}
        names = {"sums": "adder", "code": "coder"}
        config["teachers"] = [
            {"name": name, "hf": f"{out}/{tag} expert/hf", **({"tags": [tag]} if arm == "route" else {})}
            for tag, name in names.items()
        ]
        if arm == "route":
            config["kd"]["tag_key"] = "domain"

    def command(self, run: Run) -> list[str]:
        flags, config = self.flags(run)
        folder = self.args.out / run.name
        flags |= {"log-dir": folder, "export-hf": folder / "hf"}
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        if config:
            folder.mkdir(exist_ok=True)
            (folder / "config.yaml").write_text(json.dumps(config, indent=1), encoding="utf-8")
            words += ["--config", str(folder / "config.yaml")]
        return [sys.executable, "-m", "mkd", "train", "--no-save", *words, *self.args.flags.split()]

    def run(self, run: Run) -> None:
        """Run one arm and judge its model, unless it is complete or too little time is left."""
        folder, kept = self.args.out / run.name, self.args.out / run.name / "figures.json"
        if not kept.exists():
            left, begin = self.deadline - time.monotonic(), time.monotonic()
            if left < self.seconds.get(run.arm, 0):
                print(f"{run.name}: left out, {left:.0f} s are left", flush=True)
                return
            folder.mkdir(exist_ok=True)
            if code := self.call([*self.command(run), "--overwrite"], folder / "output.txt", left):
                tail = (folder / "output.txt").read_text(errors="replace").splitlines()[-8:]
                print(f"{run.name}: exit code {code}: {' | '.join(tail)[-1200:]}", flush=True)
                return
            trained = time.monotonic() - begin
            kept.write_text(json.dumps({**self.judge(folder / "hf"), "seconds": trained}), encoding="utf-8")
            self.seconds[run.arm] = max(self.seconds.get(run.arm, 0), time.monotonic() - begin)
        self.figures[run] = json.loads(kept.read_text(encoding="utf-8"))
        cells = (f"{key} {value:.3f}" for key, value in self.figures[run].items())
        print(f"{run.name}: {'  '.join(cells)}", flush=True)

    def call(self, words: Sequence[str], output: Path, seconds: float) -> int:
        """Run a command on the next GPU, and return its exit code; -1 if it took too long."""
        gpus = self.args.gpus or [os.environ.get("CUDA_VISIBLE_DEVICES", "0")]
        gpu = gpus[hash(output) % len(gpus)]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": paths}
        with open(output, "wb") as out:
            try:
                return subprocess.run(
                    words, stdout=out, stderr=out, env=env, timeout=max(1, seconds)
                ).returncode
            except subprocess.TimeoutExpired:
                return -1

    def judge(self, model: Path, prompt: str = PLAIN) -> dict[str, float]:
        return judge(model, self.args.out, self.sizes.new_tokens, prompt)

    def judge_as_is(self, part: str, arm: str, model: Path, prompt: str = PLAIN) -> None:
        """Add a row of a model that no run of the part trains."""
        kept = self.args.out / f"{part} {arm}.json"
        if not kept.exists() and (model / "config.json").exists():
            kept.write_text(json.dumps({**self.judge(model, prompt), "seconds": 0}), encoding="utf-8")
        if kept.exists():
            self.figures[Run(part, arm, 0, 0)] = json.loads(kept.read_text(encoding="utf-8"))

    def run_all(self, runs: Iterable[Run]) -> None:
        with ThreadPoolExecutor(self.args.at_once) as pool:
            list(pool.map(self.run, runs))


def prepare(bench: Bench) -> None:
    """Write texts, train the starts and the experts, and choose the start."""
    args, sizes, begin = bench.args, bench.sizes, time.monotonic()
    if not (args.out / "code.jsonl").exists():
        write_texts(args.out, sizes.texts)
    if args.tiny and not (args.model / "config.json").exists():
        texts = [one["completion"] for one in read_lines(args.out / "sums.jsonl")]
        texts += [one["text"] for one in read_lines(args.out / "code.jsonl")]
        write_model(args.model, write_tokenizer(args.model, texts, TINY["vocab_size"]), TINY, 2, 1)
    rate, first = args.expert_lr, args.seeds[0]
    experts = [Run("", f"{what} expert", rate, first) for what in ("sums", "code")]
    starts = [Run("", f"start {steps}", args.start_lr, first) for steps in args.starts or sizes.starts]
    bench.run_all(experts + (starts if SELF in args.parts else []))
    found = {run.name: bench.figures[run]["valid"] for run in starts if run in bench.figures}
    if found:
        bench.start = min(found, key=lambda name: abs(found[name] - args.start_accuracy))
        print(f"the start of {bench.start.split()[1]} steps is taken", flush=True)
    print(f"{time.monotonic() - begin:.0f} s until starts and experts were ready", flush=True)


def compare(bench: Bench) -> None:
    """Run all arms: the first seed of self-teachers with each rate, the experts' students, then the rest."""
    args, first = bench.args, bench.args.seeds[0]
    arms = args.arms if bench.start else []
    runs = [Run(SELF, arm, lr, first) for arm in arms for lr in args.rates]
    if EXPERTS in args.parts:
        runs += [Run(EXPERTS, arm, args.merge_lr, seed) for seed in args.seeds for arm in MERGES]
    bench.run_all(runs)
    best = {arm: best_rate(bench.figures, SELF, arm) for arm in arms}
    bench.run_all(Run(SELF, arm, lr, seed) for seed in args.seeds[1:] for arm, lr in best.items() if lr)
    judge_untrained(bench)


def judge_untrained(bench: Bench) -> None:
    out = bench.args.out
    experts = {what: out / f"{what} expert" / "hf" for what in ("sums", "code")}
    if bench.start:
        bench.judge_as_is(SELF, "start", out / bench.start / "hf")
        bench.judge_as_is(SELF, "start, reading the reference", out / bench.start / "hf", CONTEXT)
        bench.judge_as_is(SELF, "expert", experts["sums"])
    if EXPERTS in bench.args.parts and all((one / "config.json").exists() for one in experts.values()):
        bench.judge_as_is(EXPERTS, "model as it is", bench.args.model)
        for what, model in experts.items():
            bench.judge_as_is(EXPERTS, f"{what} expert", model)
        if not (out / "mean" / "config.json").exists():
            average_weights(*experts.values(), out / "mean")
        bench.judge_as_is(EXPERTS, "mean of the experts' weights", out / "mean")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="Hugging Face folder (with --tiny, made in --out)")
    parser.add_argument("--out", type=Path, required=True, help="folder for texts, runs and gain.csv")
    parser.add_argument("--parts", nargs="+", choices=(SELF, EXPERTS), default=[SELF, EXPERTS])
    arms = [one for one in SELF_ARMS if not one.startswith("ema")]
    parser.add_argument("--arms", nargs="+", choices=SELF_ARMS, default=arms, help="arms with self-teachers")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[3e-5, 1e-4],
        help="learning rates of the arms with self-teachers",
    )
    parser.add_argument("--starts", nargs="+", type=int, help="steps of the starts (default: 20 40 80 160)")
    parser.add_argument("--start-lr", type=float, default=1e-4)
    parser.add_argument("--expert-lr", type=float, default=3e-4)
    parser.add_argument(
        "--merge-lr", type=float, default=3e-4, help="learning rate of the students of experts"
    )
    parser.add_argument(
        "--start-accuracy", type=float, default=0.4, help="the start that comes closest is taken"
    )
    parser.add_argument("--divergence", default="reverse_kl", help="divergence of the arms on own text")
    parser.add_argument("--at-once", type=int, default=7, help="runs at the same time")
    parser.add_argument("--gpus", nargs="+", help="numbers of GPUs (default: the first visible one)")
    parser.add_argument("--flags", default="", help="more flags of all runs, such as --flags=--bf16")
    parser.add_argument("--machine", default="NVIDIA H100 80GB HBM3", help="name in gain.csv")
    parser.add_argument("--seconds", type=float, default=520, help="for everything")
    parser.add_argument("--prepare", action="store_true", help="end after the starts and the experts")
    parser.add_argument("--tiny", action="store_true", help="a random model and two steps a run")
    args = parser.parse_args(argv)
    if args.model is None and not args.tiny:
        parser.error("--model is missing")
    args.out, args.model = args.out.absolute(), (args.model or args.out / "model").absolute()
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, start = parse(argv), time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, DRY if args.tiny else FULL, start + args.seconds)
    prepare(bench)
    if not args.prepare:
        compare(bench)
        print("\n".join(tables(bench.figures, args.parts)), flush=True)
        write_csv(bench.figures, args.parts, args.machine, args.out / "gain.csv")
    print(f"{time.monotonic() - start:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
