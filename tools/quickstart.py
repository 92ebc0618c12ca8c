"""Distil a real model on this machine's CPU, from nothing to a Hugging Face folder, in a few minutes.

Fetch SmolLM2-135M-Instruct, make an 8-layer student from its layers, and distil it for 30 steps on two ranks.
Evaluate before and after, draw the curves, export the student, reload it with transformers, and let all three
models write.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.commands.plot import plot  # noqa: E402
from mkd.config.flags import FlagParser  # noqa: E402
from mkd.errors import returns_exit_code  # noqa: E402
from mkd.log.records import read_records, split_of  # noqa: E402
from tools.fetch_smollm2 import fetch_smollm2  # noqa: E402
from tools.make_student import make_student  # noqa: E402

PROMPT = "def read_lines(path):\n    "
HELD_OUT_EVERY = 10


def write_text(folder: Path, max_characters: int = 6000) -> tuple[Path, Path]:
    """Write training and held-out JSONL from the sources of the interpreter's standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    paths = folder / "train.jsonl", folder / "valid.jsonl"
    with open(paths[0], "w", encoding="utf-8") as train, open(paths[1], "w", encoding="utf-8") as valid:
        for index, source in enumerate(sources):
            text = source.read_text(encoding="utf-8", errors="replace")[:max_characters]
            out = valid if index % HELD_OUT_EVERY == 0 else train
            out.write(json.dumps({"text": text}) + "\n")
    return paths


def distil(folder: Path, parallel: str) -> Path:
    """Run pretrain_kd.py on two ranks from the beginning and return the exported student."""
    export, checkpoints = folder / "distilled", folder / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    flag = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size"}[parallel]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(ROOT / "pretrain_kd.py"),
    ]
    command += ["--config", str(ROOT / "configs" / "quickstart.yaml"), flag, "2"]
    command += ["--teacher-hf", str(folder / "teacher"), "--student-hf", str(folder / "student")]
    command += ["--data-path", str(folder / "train.jsonl"), "--valid-data-path", str(folder / "valid.jsonl")]
    command += ["--data-cache-path", str(folder / "cache"), "--log-dir", str(folder)]
    command += ["--save", str(checkpoints), "--export-hf", str(export)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return export


def report(folder: Path, export: Path) -> None:
    """Print values before and after, draw the curves, and print a continuation by each model."""
    valid = [record for record in read_records(folder) if split_of(record) == "valid"]
    before, after = valid[0], valid[-1]
    print("\nheld-out text            before      after")
    for key, label in (
        ("kd_loss", "KL to the teacher"),
        ("ce_loss", "cross entropy"),
        ("top1_agreement", "top-1 agreement"),
    ):
        print(f"{label:20} {before[key]:10.4f} {after[key]:10.4f}")
    print(f"KL fell by {100 * (1 - after['kd_loss'] / before['kd_loss']):.1f} %")
    plot([folder], folder / "curves.png")
    print(f"curves: {folder / 'curves.png'}\nexported student: {export}")
    models = (
        ("teacher", folder / "teacher"),
        ("student before", folder / "student"),
        ("student after", export),
    )
    for name, path in models:
        print(f"\n--- {name} continues {PROMPT!r}\n{continuation(path)}")


def continuation(path: Path) -> str:
    """Return a greedy continuation by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        output = model.generate(ids, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0])


@returns_exit_code
def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "runs" / "quickstart",
        help="folder to write everything to (default: runs/quickstart)",
    )
    parser.add_argument(
        "--parallel",
        choices=("tp", "pp"),
        default="tp",
        help="tensor or pipeline parallelism over 2 ranks (default: tp)",
    )
    args = parser.parse_args()
    start = time.perf_counter()
    args.folder.mkdir(parents=True, exist_ok=True)
    fetch_smollm2(args.folder / "teacher")
    layers = make_student(args.folder / "teacher", args.folder / "student", num_layers=8)
    print(f"student: teacher layers {layers}")
    write_text(args.folder)
    export = distil(args.folder, args.parallel)
    print("\nthe exported student in transformers against the trained checkpoint in mkd:")
    parity = [sys.executable, str(ROOT / "tools" / "check_parity.py"), "--hf", str(export)]
    subprocess.run([*parity, "--load", str(args.folder / "checkpoints")], check=True)
    report(args.folder, export)
    print(f"\nquickstart took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
