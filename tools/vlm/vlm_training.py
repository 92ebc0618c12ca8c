"""Training and distillation of the models of this folder by pretrain_kd.py."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ALL_PARTS = ("tower", "projector", "text")
LAST_LINES = 30  # of the output of a run that failed


@dataclass(frozen=True)
class Corpus:
    """Conversations about pictures below one folder."""

    image_root: Path
    train: Path  # JSON lines
    held_out: Path
    cache: Path


def command(
    corpus: Corpus,
    log_dir: Path,
    *,
    student: Path,
    export: Path,
    teacher: Path | None = None,  # None: cross entropy alone
    processes: int = 1,
    **flags: Any,  # of pretrain_kd.py, with underscores; True: a flag without a value
) -> list[str]:
    """Return the command of a run that trains all parts of the student."""
    given = {
        "student_hf": student, "export_hf": export, "log_dir": log_dir, "data_path": corpus.train,
        "valid_data_path": corpus.held_out, "image_root": corpus.image_root,
        "data_cache_path": corpus.cache, "seq_length": 256, "lr_decay_style": "cosine",
        "no_save": True, "overwrite": True,
    }  # fmt: skip
    given |= {"kd_ratio": 0} if teacher is None else {"teacher_hf": teacher}
    words = [str(ROOT / "pretrain_kd.py"), "--student-train-parts", *ALL_PARTS]
    for name, value in (given | flags).items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if processes == 1:
        return [sys.executable, *words]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, *words]


def run(words: list[str], log_dir: Path, threads: int = 1, is_quiet: bool = False) -> None:
    """Run a command anew. If `is_quiet`, only a failure prints output."""
    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / "metrics.jsonl").unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if not is_quiet:
        subprocess.run(words, check=True, env=environment)
        return
    output = log_dir / "output.txt"
    try:
        with open(output, "w", encoding="utf-8") as out:
            subprocess.run(words, check=True, env=environment, stdout=out, stderr=out)
    except subprocess.CalledProcessError:
        print("\n".join(output.read_text(encoding="utf-8").splitlines()[-LAST_LINES:]), file=sys.stderr)
        raise
