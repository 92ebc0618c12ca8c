"""Measure what distillation gains over cross entropy alone, with a real teacher, a cut of it and real text.

    python tools/benchmarks/distillation_pays.py --teacher-hf T --student-hf S --folder F

Arms: cross entropy alone (CE) and --kd-ratio 0.5, 0.9 and 1 at equal tokens, and CE at the time of the
distilled runs. Every arm has several seeds, which shuffle the data. The text is the Python sources of this
interpreter's library and installed packages. Files are held out by name, for bits per byte, top-1 agreement
with the teacher, KL, and a likelihood task: which of four lines of a held-out file comes next.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mkd.log.records import TRAIN, curve, read_records, split_of  # noqa: E402
from tools.benchmarks.benchmark_report import mean_and_spread, table  # noqa: E402

RATIOS = (0.0, 0.5, 0.9, 1.0)
ALMOST_CE = 1e-9  # --kd-ratio of CE runs: the teacher then runs along, so that they have its figures too
EQUAL_TIME = "CE, equal time"
NUM_QUESTIONS, NUM_HELD_OUT = 240, 120
MIN_CHARACTERS, MAX_CHARACTERS = 400, 40_000
TOKENS_A_STEP, CHARACTERS_A_TOKEN = 32_768, 4
BITS = "eval/held_out/bits_per_byte"
FIGURES = {BITS: "bits per byte", "kd_loss": "KL to the teacher", "top1_agreement": "top-1 agreement",
           "eval/next_line/accuracy_norm": "next line, of 4"}  # fmt: skip


def sources() -> Iterator[str]:
    """Yield the texts of Python files in the order of a hash of their names; each text once."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = {file.relative_to(root).as_posix(): file for root in roots for file in root.rglob("*.py")}
    seen = set()
    for name in sorted(files, key=lambda name: zlib.crc32(name.encode())):
        text = files[name].read_text(encoding="utf-8", errors="ignore")[:MAX_CHARACTERS]
        if len(text) >= MIN_CHARACTERS and text not in seen:
            seen.add(text)
            yield text


def write_data(folder: Path, max_characters: int) -> None:
    """Write train.jsonl, valid.jsonl and both tasks."""
    texts = sources()
    held_out = [next(texts) for _ in range(NUM_HELD_OUT)]
    write(
        folder / "held_out.jsonl", [{"prompt": text[:200], "completion": text[200:2200]} for text in held_out]
    )
    write(folder / "valid.jsonl", [{"text": text} for text in held_out])
    write(folder / "next_line.jsonl", questions(held_out))
    with open(folder / "train.jsonl", "w", encoding="utf-8") as out:
        for text in texts:
            out.write(json.dumps({"text": text}) + "\n")
            if out.tell() > max_characters:
                break


def write(path: Path, records: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def questions(texts: Sequence[str]) -> list[dict]:
    """Make questions: twelve lines of code, and four later lines of the file, one of which comes next."""
    chosen: list[dict] = []
    drawn = random.Random(0)
    while len(chosen) < NUM_QUESTIONS:
        lines = [line for line in drawn.choice(texts).splitlines() if line.strip()]
        if len(lines) < 60:
            continue
        at = drawn.randrange(12, len(lines) - 30)
        if max(map(len, lines[at - 12 :])) > 200:
            continue
        right = lines[at].strip()
        others = sorted({line.strip() for line in lines[at + 1 :]} - {right})
        if len(others) < 3 or len(right) < 8:
            continue
        answer = drawn.randrange(4)
        choices = drawn.sample(others, 3)
        choices.insert(answer, right)
        chosen.append({"question": "\n".join(lines[at - 12 : at]), "choices": choices, "answer": answer})
    return chosen


def command(args: argparse.Namespace, log_dir: Path, ratio: float, seed: int, steps: int) -> list[str]:
    """Return the training command of one run."""
    flags = {
        "student-hf": args.student_hf, "teacher-hf": args.teacher_hf, "kd-ratio": ratio, "seed": seed,
        "data-path": args.folder / "train.jsonl", "valid-data-path": args.folder / "valid.jsonl",
        "data-cache-path": args.folder / "cache", "log-dir": log_dir, "train-iters": steps, "lr": args.lr,
        "lr-decay-style": "cosine", "lr-warmup-iters": max(1, steps // 20), "seq-length": 2048,
        "micro-batch-size": 16, "global-batch-size": 16, "eval-interval": max(1, steps // 3), "eval-iters": 4,
        "eval-multiple-choice": args.folder / "next_line.jsonl",
        "eval-completions": args.folder / "held_out.jsonl",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [
        sys.executable,
        str(ROOT / "pretrain_kd.py"),
        "--no-save",
        "--overwrite",
        *words,
        *args.flags.split(),
    ]


def run(args: argparse.Namespace, name: str, ratio: float, seed: int, steps: int) -> Path:
    """Train, unless the run of the same command is there and complete, and return its log folder."""
    log_dir = args.folder / "runs" / f"{name} seed {seed}".replace(" ", "_").replace(",", "")
    words, done = command(args, log_dir, ratio, seed, steps), log_dir / "done"
    if not done.exists() or done.read_text(encoding="utf-8") != "\n".join(words):
        done.unlink(missing_ok=True)
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / "metrics.jsonl").unlink(missing_ok=True)
        with open(log_dir / "output.txt", "w", encoding="utf-8") as out:
            subprocess.run(words, check=True, stdout=out, stderr=out)
        done.write_text("\n".join(words), encoding="utf-8")
    return log_dir


def step_ms(args: argparse.Namespace, ratio: float) -> float:
    """Return the median time of a step, of a run that has the device to itself."""
    log_dir = run(args, f"alone {ratio}", ratio, 0, args.timed_steps)
    times = sorted(curve(read_records(log_dir), TRAIN, "step_time_ms").values())
    return times[len(times) // 2]


def held_out(log_dir: Path, iteration: int | None = None) -> dict[str, float]:
    """Return the held-out figures after `iteration` (default: the last)."""
    found: dict[str, float] = {}
    for record in read_records(log_dir):
        if split_of(record) != TRAIN and iteration in (None, record["iteration"]):
            found |= record
    return found


def draw(picture: Path, runs: dict, arms: Sequence[str], times: dict[float, float]) -> None:
    """Draw held-out curves by the time of training alone on the device: a line per arm, mean of its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = ("valid", "kd_loss"), ("valid", "top1_agreement"), ("tasks", BITS)
    for axis, (split, key) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for index, name in enumerate(arms):
            curves = [curve(read_records(log), split, key) for (arm, _), log in runs.items() if arm == name]
            steps = sorted(set.intersection(*(set(one) for one in curves)))
            seconds = times[0.0 if name.startswith("CE") else 0.9] / 1000
            values = [mean(one[step] for one in curves) for step in steps]
            axis.plot([step * seconds for step in steps], values, "o-", label=name, color=f"C{index}")
        axis.set(title=FIGURES[key] + ", held out", xlabel="seconds of training")
        axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(picture, dpi=110)


def of_teacher(key: str) -> str:
    """Return eval/TASK/METRIC for a teacher's eval/TASK/TEACHER/METRIC, and nothing for another key."""
    parts = key.split("/")
    return "/".join((*parts[:2], parts[3])) if len(parts) == 4 else ""


def cell(figures: dict, name: str, key: str) -> str:
    """Return the mean over an arm's seeds and the standard deviation."""
    values = [found[key] for (arm, _), found in figures.items() if arm == name]
    return mean_and_spread(values, 4)


def report(
    folder: Path, runs: dict[tuple[str, int], Path], steps: dict[str, int], times: dict[float, float]
) -> None:
    """Print the table of the runs so far, (arm, seed) -> log folder, and write figures and picture."""
    figures = {key: held_out(log_dir) for key, log_dir in runs.items()}
    before = held_out(next(iter(runs.values())), iteration=0)
    teacher = {key: value for key in FIGURES for name, value in before.items() if of_teacher(name) == key}
    rows = [
        [name, "", *(f"{one[key]:.4f}" if key in one else "" for key in FIGURES)]
        for name, one in (("teacher", teacher), ("student before", before))
    ]
    rows += [
        [name, str(count), *(cell(figures, name, key) for key in FIGURES)] for name, count in steps.items()
    ]
    title = "held out, after training: mean over seeds (standard deviation)"
    print(table(title, ["", "steps", *FIGURES.values()], rows), flush=True)
    results = {f"{name}, seed {seed}": values for (name, seed), values in figures.items()}
    (folder / "figures.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(folder / "distillation_pays.png", runs, list(steps), times)


def parser() -> argparse.ArgumentParser:
    """Build the parser."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--teacher-hf", type=Path, required=True, help="Hugging Face folder of the teacher")
    flags.add_argument("--student-hf", type=Path, required=True, help="folder of the student, a cut of it")
    flags.add_argument("--folder", type=Path, required=True, help="folder to write everything to")
    flags.add_argument("--steps", type=int, default=200, help="steps of 32,768 tokens (default: 200)")
    flags.add_argument("--timed-steps", type=int, default=30, help="steps of a timed run (default: 30)")
    flags.add_argument("--seeds", type=int, default=3, help="runs of each arm (default: 3)")
    flags.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    flags.add_argument("--lr", type=float, default=4e-4, help="highest learning rate (default: 4e-4)")
    flags.add_argument("--flags", default="--bf16", help="more flags of pretrain_kd.py (default: --bf16)")
    return flags


def main() -> None:
    args = parser().parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "train.jsonl").exists():
        write_data(args.folder, args.steps * TOKENS_A_STEP * CHARACTERS_A_TOKEN)
    times = {ratio: step_ms(args, ratio) for ratio in (0.0, 0.9)}
    print(f"a step: CE {times[0.0]:.1f} ms, distillation {times[0.9]:.1f} ms", flush=True)
    arms = {f"KD, ratio {ratio:g}" if ratio else "CE, equal tokens": (ratio, args.steps) for ratio in RATIOS}
    arms[EQUAL_TIME] = (0.0, max(2, round(args.steps * times[0.9] / times[0.0])))
    runs: dict[tuple[str, int], Path] = {}
    for seed in range(1, args.seeds + 1):
        begin = time.perf_counter()
        with ThreadPoolExecutor(args.jobs) as pool:
            futures = {
                (name, seed): pool.submit(run, args, name, ratio or ALMOST_CE, seed, steps)
                for name, (ratio, steps) in arms.items()
            }
            runs |= {key: future.result() for key, future in futures.items()}
        print(f"seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
        report(args.folder, runs, {name: steps for name, (_, steps) in arms.items()}, times)


if __name__ == "__main__":
    main()
