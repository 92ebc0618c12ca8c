"""Measure what a teacher in FP8 changes, with a real model and text: probabilities, and students.

    python tools/fetch_smollm2.py T
    python tools/benchmarks/fp8_quality.py --teacher-hf T --folder F

First KL(bf16 || FP8) per token on held-out files for both recipes, and KL(fp32 || bf16) as a measure. Then
students (every second layer of the teacher) are distilled from the teacher in bf16 and in FP8, with several
seeds that shuffle the data. They are compared by KL(teacher in fp32 || student) on held-out files, and by
their loss curves. The text is that of distillation_pays.py.

Without a GPU the rounding of weights and activations is simulated in fp32. --only-teacher leaves out the
students.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mkd.log.records import TRAIN, curve, read_records  # noqa: E402
from tools.benchmarks.benchmark_report import mean_and_spread, table  # noqa: E402
from tools.benchmarks.distillation_pays import CHARACTERS_A_TOKEN, TOKENS_A_STEP, write_data  # noqa: E402

BF16, FP8 = "bf16", "fp8"
ARMS = {BF16: (), FP8: ("--teacher-precision", "fp8")}
DOCUMENT = 1024  # tokens
START_S = time.time()


def say(text: str) -> None:
    print(f"[{time.time() - START_S:5.1f} s] {text}", flush=True)


def held_out_rows(folder: Path, teacher: Path, limit: int, length: int) -> Tensor:
    """Return the first tokens of held-out files, int64 [files, length]; shorter files are left out."""
    import json

    from transformers import AutoTokenizer

    tokenizer, rows = AutoTokenizer.from_pretrained(teacher), []
    for line in (folder / "valid.jsonl").read_text(encoding="utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"])["input_ids"][:length]
        if len(ids) == length and len(rows) < limit:
            rows.append(ids)
    return torch.tensor(rows)


@torch.no_grad()
def reference_logits(model: torch.nn.Module, rows: Tensor) -> Iterator[Tensor]:
    """Yield the logits of each row by transformers, fp32 [length, v]."""
    for row in rows:
        yield model(row[None]).logits[0].float()


@torch.no_grad()
def mkd_logits(part: torch.nn.Module, rows: Tensor) -> Iterator[Tensor]:
    """Yield the logits of each row by a model part of mkd, whose head runs in fp32: [length, v]."""
    from mkd.models.packed import packed_documents

    length = rows.shape[1]
    bounds = torch.tensor([0, length], dtype=torch.int32, device=rows.device)
    packed = packed_documents(bounds, bounds, length, padding_joins_document=rows.is_cuda)
    positions = torch.arange(length, device=rows.device)[None]
    head = part.head_weight().float()[: part.shape.vocab_size]
    for row in rows:
        yield part(row[None], positions, packed_seq_params=packed)[:, 0].float() @ head.t()


def compare(ours: Iterator[Tensor], theirs: Iterator[Tensor]) -> tuple[float, float]:
    """Return (KL(ours || theirs) per token, proportion of equal most probable tokens)."""
    divergences, agreements = [], []
    for one, other in zip(ours, theirs, strict=True):
        p, q = one.log_softmax(-1), other.log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1).mean().item())
        agreements.append((one.argmax(-1) == other.argmax(-1)).float().mean().item())
    return mean(divergences), mean(agreements)


def hugging_face(folder: Path, device: torch.device) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def of_teacher(args: argparse.Namespace, rows: Tensor) -> None:
    """Print the divergences between the teacher's precisions."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.config.models import TeacherConfig
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.model_shape import ModelShape
    from mkd.platform import detect
    from mkd.run.build_engine import build_teacher_parts
    from mkd.run.model_source import ModelSource

    platform = detect()
    context = ParallelContext.create(platform)
    rows = rows.to(context.device)
    shape = ModelShape.from_hf_dir(args.teacher_hf)
    source = ModelSource(shape, args.teacher_hf, HFCheckpoint(args.teacher_hf), None)
    layout = PipelineLayout.even(shape.num_layers, 1)

    def part(settings: TeacherConfig) -> torch.nn.Module:
        if not platform.is_cuda:
            from tests.models.fp8_stand_in import round_activations, stand_in_recipes
        with nullcontext() if platform.is_cuda else stand_in_recipes():
            options = ModelOptions(dtype=torch.bfloat16 if platform.is_cuda else torch.float32)
            built = build_teacher_parts(source, settings, layout, options, context)[0].eval()
        if settings.precision == "fp8" and not platform.is_cuda:
            round_activations(built, settings.fp8_recipe)
        return built

    exact, plain = hugging_face(args.teacher_hf, context.device), part(TeacherConfig())
    found = {"fp32 || bf16": compare(reference_logits(exact, rows), mkd_logits(plain, rows))}
    for recipe in ("tensorwise", "blockwise"):
        rounded = part(TeacherConfig(precision="fp8", fp8_recipe=recipe))
        logits = reference_logits(exact, rows), mkd_logits(rounded, rows)
        found[f"bf16 || fp8 {recipe}"] = compare(mkd_logits(plain, rows), mkd_logits(rounded, rows))
        found[f"fp32 || fp8 {recipe}"] = compare(*logits)
    printed = [[name, f"{kl:.2e}", f"{agreement:.4f}"] for name, (kl, agreement) in found.items()]
    title = f"teacher, {rows.numel()} tokens of held-out files"
    say(table(title, ["", "KL per token", "top-1 agreement"], printed))
    context.leave()


def write_student(teacher: Path, folder: Path) -> None:
    """Write every second layer of the teacher as a model, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    model.model.layers = model.model.layers[::2]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(model.model.layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[::2]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)


def train(args: argparse.Namespace, arm: str, seed: int) -> Path:
    """Distil one student and return its log folder; the student is in hf/ there."""
    log_dir = args.folder / "runs" / f"{arm}_{seed}"
    log_dir.mkdir(parents=True, exist_ok=True)
    flags = {
        "student-hf": args.folder / "student", "teacher-hf": args.teacher_hf, "kd-ratio": 0.9, "seed": seed,
        "data-path": args.folder / "train.jsonl", "data-cache-path": args.folder / "cache",
        "log-dir": log_dir, "train-iters": args.steps, "lr": args.lr, "lr-decay-style": "cosine",
        "lr-warmup-iters": max(1, args.steps // 20), "seq-length": args.seq_length, "micro-batch-size": 16,
        "global-batch-size": 16, "export-hf": log_dir / "hf",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable,
        str(ROOT / "pretrain_kd.py"),
        "--no-save",
        "--overwrite",
        *words,
        *args.flags.split(),
        *ARMS[arm],
    ]
    with open(log_dir / "output.txt", "w", encoding="utf-8") as out:
        subprocess.run(command, check=False, stdout=out, stderr=out)
    return log_dir


def of_students(args: argparse.Namespace, rows: Tensor, arms: list[str]) -> None:
    """Distil students from each teacher and print how they differ, beside the spread of the seeds."""
    from mkd.platform import detect

    device = detect().device
    seeds = range(1, args.seeds + 1)
    train(args, arms[0], 1) if not (args.folder / "cache").exists() and args.jobs > 1 and args.warm else None
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {(arm, seed): pool.submit(train, args, arm, seed) for seed in seeds for arm in arms}
        logs = {key: run.result() for key, run in runs.items()}
    say("trained")
    for log in logs.values():
        if not (log / "hf" / "config.json").exists():
            say(f"{log.name} failed: {(log / 'output.txt').read_text(encoding='utf-8')[-1500:]}")
            return
    exact, rows = hugging_face(args.teacher_hf, device), rows.to(device)
    figures: dict[str, dict[tuple[str, int], float]] = {}
    for key, log in logs.items():
        kl, agreement = compare(
            reference_logits(exact, rows), reference_logits(hugging_face(log / "hf", device), rows)
        )
        losses = curve(read_records(log), TRAIN, "kd_loss")
        late = [value for step, value in losses.items() if step > args.steps // 2]
        found = {"KL to the teacher": kl, "top-1 agreement": agreement}
        found |= {"training KD loss, second half": mean(late), "training KD loss, last": late[-1]}
        for name, value in found.items():
            figures.setdefault(name, {})[key] = value
    printed = [_row(name, values, arms, list(seeds)) for name, values in figures.items()]
    columns = ["", *(f"{arm}: mean (spread)" for arm in arms), "differ by", "differ by, seed by seed"]
    say(table(f"students after {args.steps} steps, {len(seeds)} seeds", columns, printed))


def _row(name: str, values: dict[tuple[str, int], float], arms: list[str], seeds: list[int]) -> list[str]:
    columns = [[values[arm, seed] for seed in seeds] for arm in arms]
    cells = [mean_and_spread(one, 5) for one in columns]
    pairs = [other - one for one, other in zip(columns[0], columns[-1], strict=True)]
    return [name, *cells, f"{mean(pairs):+.5f}", ", ".join(f"{pair:+.5f}" for pair in pairs)]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--teacher-hf", type=Path, required=True, help="Hugging Face folder of the teacher")
    flags.add_argument("--folder", type=Path, required=True, help="folder to write everything to")
    flags.add_argument("--steps", type=int, default=80, help="steps of 32,768 tokens (default: 80)")
    flags.add_argument("--seeds", type=int, default=3, help="runs of each arm (default: 3)")
    flags.add_argument("--jobs", type=int, default=6, help="runs at the same time (default: 6)")
    flags.add_argument("--files", type=int, default=60, help="held-out files (default: 60)")
    flags.add_argument("--lr", type=float, default=4e-4, help="highest learning rate (default: 4e-4)")
    flags.add_argument("--seq-length", type=int, default=2048, help="tokens of a pack (default: 2048)")
    flags.add_argument("--length", type=int, default=DOCUMENT, help=f"tokens read of a file ({DOCUMENT})")
    flags.add_argument("--flags", default="--bf16", help="more flags of pretrain_kd.py (default: --bf16)")
    flags.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="teachers (default: both)")
    flags.add_argument("--warm", action="store_true", help="run one student first, which makes the cache")
    flags.add_argument("--only-teacher", action="store_true", help="leave out the students")
    args = flags.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "train.jsonl").exists():
        write_data(args.folder, args.steps * TOKENS_A_STEP * CHARACTERS_A_TOKEN)
    write_student(args.teacher_hf, args.folder / "student")
    rows = held_out_rows(args.folder, args.teacher_hf, args.files, args.length)
    say("data and student written")
    of_teacher(args, rows)
    if not args.only_teacher:
        of_students(args, rows, args.arms)


if __name__ == "__main__":
    main()
