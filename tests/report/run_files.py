"""Write log folders as runs leave them."""

from __future__ import annotations

import json
import math
from pathlib import Path

CONFIG = """student:
  hf: "models/small"  # --student-hf
teachers:
  -
    name: "big"  # pair.yaml:4
    hf: "models/big"  # pair.yaml:5
    xtoken:
      loss: "prefix_kl"  # default
  -
    name: "other"  # pair.yaml:7
kd:
  kd_temperature: {temperature}  # --kd-temperature
training:
  train_iters: 100  # --train-iters
  micro_batch_size: 1  # default
dry_run: false  # default
"""


def write_run(folder: Path, records: list[dict], **files: str) -> Path:
    """Write metrics.jsonl, and other files by their names with `_` for `.`."""
    folder.mkdir(parents=True)
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def full_run(folder: Path, temperature: float = 1.0, size: int = 100) -> Path:
    """Write a run of `size` iterations with evaluations, tasks, teachers, events, a plan and samples."""
    records = []
    for step in range(size + 1):
        kd = temperature * (0.2 + math.exp(-step / 30))
        place = {"iteration": step, "consumed_tokens": 4096 * step}
        if step:
            losses = {"loss": kd + 1, "kd_loss": kd, "kd_loss/big": kd, "kd_loss/other": kd / 2}
            speed = {"step_time_ms": 500 if step == 1 else 200 + step % 3, "tokens_per_s_per_gpu": 20480}
            records.append({**place, **losses, "grad_norm": None if step == 7 else 1 / step, **speed})
        if step % 25 == 0:
            records += [{**place, "split": split, "kd_loss": kd} for split in ("valid", "valid/code")]
            tasks = {"eval/mmlu/accuracy": 0.4 + step / 1000, "eval/mmlu/num_questions": 12}
            teacher = {"eval/mmlu/big/accuracy": 0.75} if step == 0 else {}
            records.append({**place, "split": "tasks", **tasks, **teacher})
    events = [
        {"time": 1.7e9, "iteration": 0, "kind": "start", "text": "started"},
        {"time": 1.7e9, "iteration": 40, "kind": "loss spike", "text": "loss spike at iteration 40"},
        {"time": 1.7e9, "iteration": 50, "kind": "save", "text": "saved checkpoint"},
        {"time": 1.7e9, "iteration": 50, "kind": "resume", "text": "resumed from iteration 50"},
        {"time": 1.7e9, "iteration": size, "kind": "done", "text": "ended"},
    ]
    plan = {"step_time_ms": 100.0, "tokens_per_s_per_gpu": 40960.0, "text": "one plan", "device": "a CPU"}
    return write_run(
        folder,
        records,
        config_yaml=CONFIG.format(temperature=temperature),
        loss_card_txt=f"loss card\n  loss  0.5 CE + 0.5 KD\n  KD    T = {temperature}\n",
        plan_json=json.dumps(plan),
        events_jsonl="".join(json.dumps(one) + "\n" for one in events) + '{"time": 17',
        samples_jsonl=json.dumps({"iteration": 100, "prompt": "2+2?", "completion": "4"}) + "\n",
    )
