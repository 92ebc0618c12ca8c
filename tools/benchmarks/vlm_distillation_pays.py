"""Measure whether distillation pays for a model with images, at equal tokens.

    python tools/benchmarks/vlm_distillation_pays.py --folder build/vlm --prepare      # needs npm and PyPI
    python tools/benchmarks/vlm_distillation_pays.py --folder build/vlm --device cuda  # needs no network

A teacher learns to name emoji as Twitter draws them. Students lose layers of its text model and of its
tower, and train on the same packs with cross entropy alone or with --kd-ratio 0.9. Every arm has several
seeds, which shuffle the data. All are examined on Google's pictures, which none was trained
on: KL to the teacher, names and groups by likelihood, and the same while they see swapped pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from tools.benchmarks.benchmark_report import mean_and_spread, table  # noqa: E402
from tools.fetch_smollm2 import fetch_smollm2  # noqa: E402
from tools.vlm import emoji_pictures, vlm_training  # noqa: E402
from tools.vlm.emoji_pictures import STYLES, Named  # noqa: E402
from tools.vlm.picture_answers import Examiner, ExamResult, PictureExam  # noqa: E402
from tools.vlm.picture_pretraining import pretrain  # noqa: E402
from tools.vlm.small_vlm import VLMSizes, cut_vlm, make_vlm, num_parameters  # noqa: E402

ARMS = {"cross entropy": 0.0, "distilled": 0.9}
"""Name -> --kd-ratio."""
SIZES = VLMSizes(text_layers=4, tower_layers=6, patch=8)  # 4 tokens a picture
TOKENISERS = 2  # processes: each reads a thousand pictures a second, and starts for several seconds
TEACHER, BEFORE = "teacher", "student before"
RIGHT, SWAPPED = "right pictures", "swapped pictures"
FIGURES = {
    "kl": "KL to the teacher", "top1": "top-1 agreement", "ce": "cross entropy",
    "name_of_4": "name of 4", "group": "group of 9", "exact_name": "exact name",
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Write pictures and the untrained teacher, in bf16: what travels to a machine without a network."""
    emoji_pictures.fetch_pictures(folder / "pictures")
    make_vlm(fetch_smollm2(folder / "smollm2"), folder / "base", SIZES, seed=1, dtype=torch.bfloat16)


def write_corpus(args: argparse.Namespace, named: Sequence[Named]) -> vlm_training.Corpus:
    """Write the conversations."""
    work = args.folder / "work"
    work.mkdir(exist_ok=True)
    corpus = vlm_training.Corpus(
        args.folder / "pictures", work / "train.jsonl", work / "held_out.jsonl", work / "cache"
    )
    emoji_pictures.write_training(corpus.image_root, corpus.train, named, args.copies, seed=1)
    emoji_pictures.write_held_out(corpus.held_out, named)
    return corpus


def train(args: argparse.Namespace, corpus: vlm_training.Corpus, name: str, **flags: Any) -> Path:
    """Train one model and return its folder."""
    log_dir = args.folder / "work" / name.replace(" ", "_").replace(",", "")
    steps = flags["train_iters"]
    given = dict(micro_batch_size=args.batch, global_batch_size=args.batch, lr=args.lr, log_interval=20)
    given |= dict(lr_warmup_iters=max(1, steps // 20), eval_iters=args.eval_iters, eval_interval=steps)
    given |= dict(num_workers=args.workers)
    words = vlm_training.command(corpus, log_dir, export=log_dir / "hf", **given, **flags)
    vlm_training.run([*words, *args.flags.split()], log_dir, is_quiet=True)
    return log_dir / "hf"


def pretrain_teacher(args: argparse.Namespace, corpus: vlm_training.Corpus, named: Sequence[Named]) -> Path:
    """Pretrain a copy of the base model on names, and return its folder."""
    base = args.folder / "work" / "base"
    cut_vlm(args.folder / "base", base, SIZES.text_layers, SIZES.tower_layers)  # a copy in fp32
    pixels = emoji_pictures.read_pixels(corpus.image_root, STYLES[0], named)
    pretrain(
        base, pixels, named, args.matched, args.captions,
        seed=1, batch_size=args.pretraining_batch, device=args.device,
    )  # fmt: skip
    return base


def examine(
    args: argparse.Namespace, folder: Path, exam: PictureExam, of_teacher: Sequence = ()
) -> tuple[dict[str, ExamResult], list]:
    """Return the results of a model with right and swapped pictures, and its log-probabilities."""
    examiner = Examiner(folder, args.device)
    right, logps = examiner.examine(exam, teacher=of_teacher)
    swapped, _ = examiner.examine(exam, is_swapped=True, teacher=of_teacher or logps)
    return {RIGHT: right, SWAPPED: swapped}, logps


def cells(results: Sequence[Mapping[str, ExamResult]], part: str) -> list[str]:
    """Return the mean over seeds and the standard deviation of every figure."""
    return [mean_and_spread([getattr(one[part], key) for one in results]) for key in FIGURES]


def report(folder: Path, results: Mapping[str, Sequence[Mapping[str, ExamResult]]]) -> None:
    """Print a table for right and for swapped pictures, and write all figures."""
    for part in (RIGHT, SWAPPED):
        rows = [[name, *cells(each, part)] for name, each in results.items()]
        title = f"{part}, drawing style not trained on: mean over seeds (standard deviation)"
        print(table(title, ["", *FIGURES.values()], rows), flush=True)
    figures = {
        name: [{part: vars(result) for part, result in one.items()} for one in each]
        for name, each in results.items()
    }
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure(args: argparse.Namespace) -> None:
    """Make the teacher, train all arms and examine all models."""
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:5.0f} s] {text}", flush=True)

    torch.set_float32_matmul_precision("high")
    named = emoji_pictures.fetch_pictures(args.folder / "pictures")[:: args.every]
    corpus = write_corpus(args, named)
    say(f"{len(named)} names, {args.copies} varied pictures each")
    corpus = vlm_training.tokenised(corpus, args.folder / "base", TOKENISERS)
    say("conversations are tokenised")
    base = pretrain_teacher(args, corpus, named)
    say("the teacher's tower has seen all names")
    teacher = train(args, corpus, TEACHER, student=base, train_iters=args.teacher_steps)
    say("the teacher is trained")
    student = args.folder / "work" / "student"
    cut_vlm(teacher, student, args.text_layers, args.tower_layers)
    for name, one in ((TEACHER, teacher), ("student", student)):
        say(f"{name}: parameters {num_parameters(one)}")
    pixels = emoji_pictures.read_pixels(corpus.image_root, STYLES[1], named)
    exam = PictureExam.of(pixels, named)
    results: dict[str, list] = {}
    of_teacher, logps = examine(args, teacher, exam)
    results[TEACHER], results[BEFORE] = [of_teacher], [examine(args, student, exam, logps)[0]]
    report(args.folder, results)
    say("both are examined")
    runs = [(name, seed) for seed in range(1, args.seeds + 1) for name in ARMS]

    def one_run(run: tuple[str, int]) -> Path:
        name, seed = run
        flags: dict[str, Any] = dict(student=student, seed=seed, train_iters=args.steps)
        if ARMS[name]:
            flags |= dict(teacher=teacher, kd_ratio=ARMS[name])
        out = train(args, corpus, f"{name} seed {seed}", **flags)
        say(f"{name}, seed {seed}: trained")
        return out

    with ThreadPoolExecutor(args.jobs) as pool:
        for (name, seed), folder in zip(runs, pool.map(one_run, runs), strict=True):
            found = examine(args, folder, exam, logps)[0]
            results.setdefault(name, []).append(found)
            right, swapped = found[RIGHT], found[SWAPPED]
            kl = f"KL {right.kl:.3f}, swapped {swapped.kl:.3f}"
            names = f"name of 4 {right.name_of_4:.3f}, swapped {swapped.name_of_4:.3f}"
            say(f"{name}, seed {seed}: {kl}; {names}")
    report(args.folder, results)


def parser() -> argparse.ArgumentParser:
    """Build the parser."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--folder", type=Path, required=True, help="folder of everything read and written")
    flags.add_argument("--prepare", action="store_true", help="fetch pictures and text model, then stop")
    flags.add_argument("--device", default="cpu", help="device of pretraining and exams (default: cpu)")
    flags.add_argument(
        "--workers", type=int, help="processes that decode the pictures of a run (default: 4, on a CPU 0)"
    )
    flags.add_argument("--flags", default="--bf16", help="more flags of pretrain_kd.py (default: --bf16)")
    flags.add_argument("--lr", type=float, default=6e-4, help="highest learning rate (default: 6e-4)")
    for name, value, text in (
        ("seeds", 3, "runs of each arm"),
        ("jobs", 6, "runs at the same time"),
        ("batch", 32, "packs of 256 tokens in a step"),
        ("steps", 200, "steps of a student"),
        ("teacher-steps", 500, "steps of the teacher"),
        ("pretraining-batch", 256, "pictures in a step of the pretraining"),
        ("matched", 128_000, "pictures that the teacher's tower matches with names"),
        ("captions", 64_000, "pictures that the teacher names before it reads conversations"),
        ("copies", 16, "varied pictures of each name"),
        ("text-layers", 3, "layers of the student's text model, of 4"),
        ("tower-layers", 3, "layers of the student's tower, of 6"),
        ("eval-iters", 0, "steps of the evaluations before and after a run, for its log"),
        ("every", 1, "take every n-th name"),
    ):
        flags.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    return flags


def main() -> None:
    args = parser().parse_args()
    if args.workers is None:
        args.workers = 0 if args.device == "cpu" else 4
    disable_progress_bar()
    args.folder.mkdir(parents=True, exist_ok=True)
    (prepare if args.prepare else lambda _: measure(args))(args.folder)


if __name__ == "__main__":
    main()
