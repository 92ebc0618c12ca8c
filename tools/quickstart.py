"""Distil a real model on this machine's CPU, from nothing to a Hugging Face folder, in a few minutes.

Fetch SmolLM2-135M-Instruct, cut out the 6 of its 30 layers that hurt least, and distil the rest for 30 steps
on two ranks. Evaluate before and after, export the student, reload it with transformers, draw one picture,
and let all three models write.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.config.flags import FlagParser  # noqa: E402
from mkd.errors import returns_exit_code  # noqa: E402
from mkd.log.records import read_records, split_of  # noqa: E402
from mkd.report.curves import draw, new_figure, save_figure  # noqa: E402
from tools.fetch_smollm2 import fetch_smollm2  # noqa: E402

NUM_LAYERS = 24
MEASURED_TOKENS = 1024  # to choose the layers on
HELD_OUT_EVERY = 10
PROMPT = "import os\n\ndef list_files(folder):\n"
NUM_NEW_TOKENS = 32
ROWS = (("kd_loss", "KL to the teacher"), ("ce_loss", "cross entropy"), ("top1_agreement", "top-1 agreement"))
PANELS = ("kd_loss", "top1_agreement")
NAMES = ("teacher", "student before", "student after")


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


def cut_student(folder: Path) -> None:
    """Write the student: the teacher without the block of layers that hurts least."""
    command = [sys.executable, str(ROOT / "tools" / "make_student.py"), "--num-layers", str(NUM_LAYERS)]
    command += ["--hf", str(folder / "teacher"), "--out", str(folder / "student"), "--overwrite"]
    command += ["--data-path", str(folder / "train.jsonl"), "--tokens", str(MEASURED_TOKENS)]
    subprocess.run(command, check=True)


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
    command += ["--save", str(checkpoints), "--export-hf", str(export), "--overwrite"]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return export


def report(folder: Path, export: Path) -> None:
    """Print values and continuations, draw `quickstart.png`, and say what to do next.

    `folder` holds the teacher, the student before training and metrics.jsonl; `export` the student after.
    """
    valid = [record for record in read_records(folder) if split_of(record) == "valid"]
    models = three_models(valid)
    print("\n--- held-out text\n" + "\n".join(table_lines(models)))
    before, after = (models[name]["kd_loss"] for name in NAMES[1:])
    print(f"The KL fell by {100 * (1 - after / before):.0f} %.")
    draw_picture(folder, models)
    for name, path in zip(NAMES, (folder / "teacher", folder / "student", export), strict=True):
        print(f"\n--- {name} writes\n{continuation(path)}")
    print(f"\npicture: {folder / 'quickstart.png'}\nexported student: {export}\n{next_steps(folder, export)}")


def three_models(valid: list[dict]) -> dict[str, Mapping[str, float]]:
    """Return name -> held-out values of the teacher and of the student before and after training."""
    first, last = valid[0], valid[-1]
    teacher = {"kd_loss": 0.0, "ce_loss": last["teacher_ce"], "top1_agreement": 1.0}
    return dict(zip(NAMES, (teacher, first, last), strict=True))


def table_lines(models: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the values as lines, a model a column."""
    lines = [" " * 20 + "".join(f"{name:>16}" for name in models)]
    for key, label in ROWS:
        lines.append(f"{label:20}" + "".join(f"{values[key]:16.3f}" for values in models.values()))
    return lines


def draw_picture(folder: Path, models: Mapping[str, Mapping[str, float]]) -> None:
    """Write `quickstart.png`: the curves of the run, and the three models side by side."""
    picture = folder / "quickstart.png"
    figure = new_figure(picture, "--folder")
    figure.set_size_inches(13, 3.8)
    axes = figure.subplots(1, 3)
    records = {"quickstart": read_records(folder)}
    for axis, key, title in zip(axes, PANELS, ("KL to the teacher", "top-1 agreement"), strict=False):
        draw(axis, key, records)
        axis.set_title(title + (", nats per token" if key == "kd_loss" else " with the teacher"))
        axis.lines[0].set_alpha(0.4)  # one batch is noisy: the held-out values are what counts
    bars = axes[2]
    heights = [values["ce_loss"] for values in models.values()]
    drawn = bars.bar(list(models), heights, color=["C7", "C1", "C0"], width=0.6)
    bars.bar_label(drawn, [f"{height:.2f}" for height in heights], padding=2)
    bars.set(title="cross entropy of held-out text, nats per token", ylim=(0, 1.15 * max(heights)))
    save_figure(figure, picture, "--folder")


def continuation(path: Path) -> str:
    """Return a greedy continuation by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    return tokenizer.decode(output[0])


def next_steps(folder: Path, export: Path) -> str:
    """Return what to try next, as commands."""
    mkd = Path(sys.executable).with_name("mkd")  # .venv/bin is rarely on the path
    return f"""
next:
  {mkd} report {folder}     # the run as one page
  {mkd} make-student --hf {folder / "teacher"} --out {folder / "narrow"} --target-params 113M \\
      --data-path {folder / "train.jsonl"}         # another cut of the same size (docs/make-student.md)
  {mkd} evaluate --student-hf {export} --completions FILE.jsonl     # your own task (docs/evaluation.md)
  docs/quickstart.md explains this output; README.md has the command for your own models"""


@returns_exit_code
def main() -> None:
    parser = FlagParser(description=__doc__)
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
    write_text(args.folder)
    print(f"\n--- the student: {NUM_LAYERS} of the teacher's layers", flush=True)
    cut_student(args.folder)
    export = distil(args.folder, args.parallel)
    print("\n--- the exported student in transformers against the trained checkpoint in mkd", flush=True)
    parity = [sys.executable, str(ROOT / "tools" / "check_parity.py"), "--hf", str(export)]
    subprocess.run([*parity, "--load", str(args.folder / "checkpoints")], check=True)
    report(args.folder, export)
    print(f"\nquickstart took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
