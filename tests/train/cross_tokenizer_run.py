"""Run real cross-tokenizer training: SmolLM2-135M teaches a small random student that reads Mistral's tokens.

The student is trained twice from the same weights on the same packs in the same order: with the distillation
loss, and with the cross entropy alone. Both are measured in bits per byte of held-out text, before, during
and after training. Text and tokenizer need a network and can be made elsewhere, by `--prepare`:

    python -m tests.train.cross_tokenizer_run --size gpu --teacher SMOLLM2 --prepare FOLDER
    python -m tests.train.cross_tokenizer_run --size gpu --teacher SMOLLM2 --data FOLDER --work WORK \\
        --out results.json

The folder SMOLLM2 is made if it is missing (tools/fetch_smollm2.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mkd.quickstart.fetch_smollm2 import fetch_smollm2
from tests.train.command import write_records
from tests.xtoken.real_tokenizers import downloads_folder, fetch_tokenizers

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTATION = "python3.11-doc"  # Debian package: 11 MB of reStructuredText
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
HELD_OUT_EVERY = 20  # one file in so many is held out
PROMPT_BYTES = 100  # bytes of a held-out text that are not scored, at least
METRIC = "eval/heldout/bits_per_byte"


@dataclass(frozen=True)
class Size:
    """One setting of the comparison; `flags` are those of pretrain_kd.py."""

    student: dict[str, int]  # sizes of a Llama
    flags: dict[str, object]
    train_bytes: int  # bytes of training text, at most
    held_out_texts: int
    text_bytes: int  # bytes of a held-out text, at most
    kd_ratios: tuple[float, ...] = (0.0, 0.9)
    seeds: tuple[int, ...] = (1,)
    parallel: int = 1  # concurrent runs
    xtoken_loss: str = "partition_kl"
    documentation: bool = False  # add it to the standard library

    @property
    def step_tokens(self) -> int:
        """Student tokens of one optimizer step."""
        return self.flags["seq_length"] * self.flags["global_batch_size"]


SIZES = {
    "ci": Size(
        student=dict(
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        ),
        flags=dict(
            seq_length=256, global_batch_size=1, train_iters=12, eval_interval=6, lr=1e-2, lr_warmup_iters=2
        ),
        train_bytes=100_000,
        held_out_texts=16,
        text_bytes=500,
        parallel=2,
    ),
    "gpu": Size(
        student=dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8)
        | dict(num_key_value_heads=4),
        flags=dict(
            seq_length=1024,
            micro_batch_size=16,
            global_batch_size=16,
            train_iters=400,
            eval_interval=50,
            lr=1e-3,
        )
        | dict(lr_warmup_iters=40, bf16=True, num_workers=1, log_interval=50),
        train_bytes=25_000_000,
        held_out_texts=200,
        text_bytes=2000,
        seeds=(1, 2, 3),
        parallel=3,
        documentation=True,
    ),
}


def prepare(size: Size, folder: Path) -> Path:
    """Make train.jsonl, heldout.jsonl and tokenizer.model in `folder`, and return it; needs a network."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        tokenizer = fetch_tokenizers(downloads_folder(scratch), ("mistral",))["mistral"]
        shutil.copyfile(tokenizer, folder / "tokenizer.model")
        library = Path(sysconfig.get_path("stdlib"))
        files = [
            file
            for file in sorted(library.rglob("*.py"))
            if not SKIPPED.intersection(file.relative_to(library).parts)
        ]
        if size.documentation:
            subprocess.run(["apt-get", "download", DOCUMENTATION], check=True, cwd=scratch)
            subprocess.run(["dpkg-deb", "-x", next(scratch.glob("*.deb")), scratch], check=True)
            files += sorted(scratch.rglob("*.rst.txt"))
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    train = [piece for i, text in enumerate(texts) if i % HELD_OUT_EVERY for piece in pieces(text, 4000)]
    train = evenly(train, size.train_bytes * len(train) // sum(map(len, train)))
    held_out = [piece for text in texts[::HELD_OUT_EVERY] for piece in pieces(text, size.text_bytes)]
    held_out = [record for record in map(completion, held_out) if record is not None]
    write_records(folder / "train.jsonl", *({"text": text} for text in train))
    write_records(folder / "heldout.jsonl", *evenly(held_out, size.held_out_texts))
    return folder


def tokenise(folder: Path, teacher: Path) -> None:
    """Fill the cache of `folder` for the runs if it is empty: text in tokens of both models, aligned."""
    from mkd.data.aligned.teacher_side import TeacherText
    from mkd.tokenizers.load import open_tokenizer
    from mkd.xtoken import build_projection
    from tests.data.datasets import open_datasets

    student, own, cache = (
        open_tokenizer(folder / "tokenizer.model"),
        open_tokenizer(teacher),
        folder / "cache",
    )
    relation = build_projection(student, own, cache_dir=cache)
    text = TeacherText(tokenizer=own, vocab_size=own.vocab_size, spellings=relation.spellings)
    open_datasets(
        data_path=[str(folder / "train.jsonl")],
        tokenizer=student,
        seq_length=1024,
        vocab_size=student.vocab_size,
        cache_dir=str(cache),
        teachers=[text],
    )


def pieces(text: str, max_bytes: int) -> Iterator[str]:
    """Yield `text` cut at ends of lines, in parts of at most `max_bytes` bytes (or one line)."""
    part, length = [], 0
    for line in text.splitlines(keepends=True):
        if part and length + len(line.encode()) > max_bytes:
            yield "".join(part)
            part, length = [], 0
        part.append(line)
        length += len(line.encode())
    yield "".join(part)


def completion(text: str) -> dict[str, str] | None:
    """Return a record of --eval-completions, cut at a boundary of both tokenizers; None if too short."""
    cut = text.find(" ", PROMPT_BYTES)
    while cut >= 0 and not (text[cut - 1].isalnum() and text[cut + 1 : cut + 2].isalnum()):
        cut = text.find(" ", cut + 1)
    return {"prompt": text[:cut], "completion": text[cut:]} if 0 <= cut < len(text) // 2 else None


def evenly(values: list, count: int) -> list:
    """Return at most `count` of the values, evenly spaced."""
    return [values[i * len(values) // count] for i in range(count)] if count < len(values) else values


def make_student(size: Size, seed: int, folder: Path) -> None:
    """Save a random Llama with a row for each of Mistral's 32,000 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    rows = dict(vocab_size=32000, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True)
    LlamaForCausalLM(LlamaConfig(**size.student, **rows, max_position_embeddings=2048)).save_pretrained(
        folder
    )


def run_command(size: Size, ratio: float, seed: int, data: Path, teacher: Path, work: Path) -> list[str]:
    """Return the command line of one run."""
    paths = dict(
        student_hf=work / f"student-{seed}", data_path=data / "train.jsonl", data_cache_path=data / "cache"
    )
    paths |= dict(tokenizer_type="SentencePieceTokenizer", tokenizer_model=data / "tokenizer.model")
    paths |= dict(eval_completions=data / "heldout.jsonl", log_dir=run_folder(work, ratio, seed))
    if ratio > 0:
        paths |= dict(teacher_hf=teacher, xtoken_loss=size.xtoken_loss)
    return words(ROOT / "pretrain_kd.py", **paths, kd_ratio=ratio, seed=seed, **size.flags)


def teacher_command(size: Size, data: Path, teacher: Path, work: Path) -> list[str]:
    """Return the command line that scores the teacher on the held-out text, in its own tokens."""
    flags = dict(bf16=True) if size.flags.get("bf16") else {}
    paths = dict(student_hf=teacher, completions=data / "heldout.jsonl", out=work / "teacher.json")
    return words(ROOT / "tools" / "evaluate.py", **paths, seq_length=2048, **flags)


def words(script: Path, **flags) -> list[str]:
    """Return a command line; a flag that is True has no value."""
    pairs = (
        [f"--{name.replace('_', '-')}", *([] if value is True else [value])] for name, value in flags.items()
    )
    return [str(word) for word in (sys.executable, script, *(word for pair in pairs for word in pair))]


def run_folder(work: Path, ratio: float, seed: int) -> Path:
    return work / f"ratio-{ratio:g}-seed-{seed}"


def run_all(size: Size, data: Path, teacher: Path, work: Path, score_teacher: bool) -> None:
    """Start all runs, `size.parallel` at a time, each with its output beside its metrics.

    Raises subprocess.CalledProcessError for a run that fails.
    """
    for seed in size.seeds:
        make_student(size, seed, work / f"student-{seed}")
    ratios = sorted(size.kd_ratios, reverse=True)  # those with a teacher take longest
    jobs = [
        (run_folder(work, ratio, seed), run_command(size, ratio, seed, data, teacher, work))
        for ratio in ratios
        for seed in size.seeds
    ]
    if score_teacher:
        jobs.append((work / "teacher", teacher_command(size, data, teacher, work)))
    tokenise(data, teacher)  # once for all runs, which do not wait for each other
    with ThreadPoolExecutor(size.parallel) as pool:
        for done in [pool.submit(run_job, *job) for job in jobs]:
            done.result()


def run_job(folder: Path, command: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    start = time.perf_counter()
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    print(f"{time.perf_counter() - start:5.0f} s: {' '.join(command[1:])}", flush=True)
    if done.returncode:
        print((folder / "output.txt").read_text(encoding="utf-8")[-3000:], flush=True)
    done.check_returncode()


def read_curve(folder: Path, step_tokens: int) -> list[dict]:
    """Return step, tokens and held-out bits per byte of every evaluation of one run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record.get("split") == "tasks"]
    keys = dict(num_bytes="eval/heldout/num_bytes", bits_per_byte=METRIC)
    return [
        {"step": r["iteration"], "tokens": r["iteration"] * step_tokens}
        | {key: r[name] for key, name in keys.items()}
        for r in records
    ]


def compare(size: Size, data: Path, teacher: Path, work: Path, score_teacher: bool = False) -> dict:
    """Run everything; return curves by kd-ratio and seed, and mean and deviation of the last points."""
    start = time.perf_counter()
    run_all(size, data, teacher, work, score_teacher)
    curves = {
        f"{ratio:g}": {
            str(seed): read_curve(run_folder(work, ratio, seed), size.step_tokens) for seed in size.seeds
        }
        for ratio in size.kd_ratios
    }
    final = {
        ratio: summary([curve[-1]["bits_per_byte"] for curve in of.values()]) for ratio, of in curves.items()
    }
    scored = json.loads((work / "teacher.json").read_text())[METRIC] if score_teacher else None
    commands = [run_command(size, ratio, size.seeds[0], data, teacher, work)[1:] for ratio in size.kd_ratios]
    return {
        "seconds": time.perf_counter() - start,
        "commands": [" ".join(command) for command in commands],
        "teacher_bits_per_byte": scored,
        "final_bits_per_byte": final,
        "curves": curves,
    }


def summary(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"mean": statistics.mean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def show(results: dict) -> None:
    """Print the curves, one column per run, and the figures at their ends."""
    runs = {
        f"kd {ratio}, seed {seed}": curve
        for ratio, of in results["curves"].items()
        for seed, curve in of.items()
    }
    print(
        "\nbits per byte of held-out text\n\n"
        + f"{'step':>8}{'tokens':>12}"
        + "".join(f"{name:>18}" for name in runs)
    )
    for points in zip(*runs.values(), strict=True):
        values = "".join(f"{point['bits_per_byte']:18.4f}" for point in points)
        print(f"{points[0]['step']:8}{points[0]['tokens']:12}{values}")
    print()
    for ratio, final in results["final_bits_per_byte"].items():
        print(f"kd-ratio {ratio:4} {final['mean']:.4f} +- {final['std']:.4f}")
    if results["teacher_bits_per_byte"] is not None:
        print(f"teacher       {results['teacher_bits_per_byte']:.4f}")
    print(f"\n{results['seconds']:.0f} s in all; one run of each kind:\n\n" + "\n".join(results["commands"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make --data in this folder and stop")
    parser.add_argument(
        "--data", type=Path, help="folder with text, tokenizer and cache (default: made below --work)"
    )
    parser.add_argument(
        "--teacher", type=Path, help="folder of SmolLM2-135M-Instruct (default: below --work)"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "cross_tokenizer", help="folder to write everything to"
    )
    parser.add_argument("--out", type=Path, help="file to write results to (default: results.json in --work)")
    parser.add_argument(
        "--score-teacher", action="store_true", help="also score the teacher on the held-out text"
    )
    for name in ("train-iters", "eval-interval", "lr"):
        parser.add_argument(
            f"--{name}", type=float if name == "lr" else int, help="override the size's value"
        )
    parser.add_argument(
        "--kd-ratios",
        type=float,
        nargs="+",
        help="kd-ratios of the runs to compare; 0 is cross entropy alone",
    )
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--parallel", type=int, help="concurrent runs")
    parser.add_argument("--xtoken-loss", help="loss of the runs with the teacher")
    args = parser.parse_args()
    size = SIZES[args.size]
    given = {name: value for name, value in vars(args).items() if value is not None}
    flags = size.flags | {
        name: given[name] for name in ("train_iters", "eval_interval", "lr") if name in given
    }
    fields = ("kd_ratios", "seeds", "parallel", "xtoken_loss")
    size = replace(size, flags=flags, **{name: given[name] for name in fields if name in given})
    teacher = fetch_smollm2(args.teacher or args.work / "teacher")
    if args.prepare:
        tokenise(prepare(size, args.prepare), teacher)
        return 0
    results = compare(
        size, args.data or prepare(size, args.work / "data"), teacher, args.work, args.score_teacher
    )
    show(results)
    out = args.out or args.work / "results.json"
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
