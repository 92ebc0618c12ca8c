"""Let a small real model learn from its own text on this machine's CPU, in ten minutes at most.

Take the student of the quickstart, or make it: 24 of SmolLM2's 30 layers, after 30 steps on stored text. Then
it completes the beginnings of Python functions itself, and the teacher judges every token, for 12 steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkd.config.packaged import packaged
from mkd.log.records import read_records, split_of
from mkd.operations.launch.child_command import ChildCommands
from mkd.progress_bars import without_progress_bars
from mkd.quickstart.demo_picture import draw_on_policy
from mkd.quickstart.demo_text import write_prompts
from mkd.quickstart.function_bodies import bodies_table, held_out_heads, write_bodies, write_samples
from mkd.quickstart.off_policy_demo import HEAD_OF_BODIES, distil, prepare, run
from mkd.run_command import mkd_command, quoted

HELD_OUT_PROMPTS, NEW_TOKENS = 20, 32
ROWS = (("kl", "KL(student || teacher)"), ("teacher_nll", "teacher NLL"), ("entropy", "entropy"))
SHOWN_METRICS = "rollout/teacher_nll", "rollout/kl_quarter_1", "rollout/kl_quarter_4", "rollout/entropy"


def quickstart_on_policy(folder: Path, quickstart_folder: Path) -> int:
    """Run everything, and return the exit code of what failed."""
    folder.mkdir(parents=True, exist_ok=True)
    commands, start = ChildCommands(), quickstart_folder
    with commands.signals_forwarded():
        if (start / "distilled" / "config.json").exists():
            print(f"starting from the student of {start}", flush=True)
        else:
            start = folder / "off-policy"
            if code := prepare(start, commands) or distil(start, "tp", commands):
                return code
        write_prompts(start / "train.jsonl", folder / "prompts.jsonl")
        held_out = write_prompts(start / "valid.jsonl", folder / "held_out.jsonl")[:HELD_OUT_PROMPTS]
        before = measure(start / "distilled", start / "teacher", held_out)
        if code := learn(folder, start, commands):
            return code
    after = measure(folder / "distilled", start / "teacher", held_out)
    show(folder, start, (before, after))
    return run(commands, "report", folder)


def learn(folder: Path, start: Path, commands: ChildCommands) -> int:
    """Train on the student's own text, and export. Return the exit code."""
    words = ["train", "--nproc-per-node", 2, "--config", packaged("configs") / "quickstart_on_policy.yaml"]
    words += ["--teacher-hf", start / "teacher", "--student-hf", start / "distilled"]
    words += ["--prompt-data-path", folder / "prompts.jsonl", "--log-dir", folder]
    return run(commands, *words, "--export-hf", folder / "distilled", "--overwrite", "--no-save")


@without_progress_bars()
def measure(student_dir: Path, teacher_dir: Path, prompts: Sequence[str]) -> dict[str, float]:
    """Return the mean figures of the student's own samples of `prompts`, nats per token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(student_dir, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
        for path in (student_dir, teacher_dir)
    )
    torch.manual_seed(0)
    sums, count = dict.fromkeys(("kl", "teacher_nll", "entropy"), 0.0), 0
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS)
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(device)
    first = inputs["input_ids"].shape[1]
    with torch.no_grad():
        rows = student.generate(**inputs, **settings, pad_token_id=tokenizer.pad_token_id)
        for row, mask in zip(rows, inputs["attention_mask"], strict=True):
            length = int(mask.sum())
            ends = (row[first:] == tokenizer.eos_token_id).nonzero().flatten().tolist()
            row = row[first - length : first + (ends[0] + 1 if ends else NEW_TOKENS)]
            ours, theirs = (
                model(row[None]).logits[0, length - 1 : -1].log_softmax(1) for model in (student, teacher)
            )
            sums["kl"] += (ours.exp() * (ours - theirs)).sum().item()
            sums["entropy"] -= (ours.exp() * ours).sum().item()
            sums["teacher_nll"] -= theirs.gather(1, row[length:, None]).sum().item()
            count += len(row) - length
    return {name: total / count for name, total in sums.items()}


def show(folder: Path, start: Path, figures: Sequence[dict[str, float]]) -> None:
    """Print the run's metrics, completed lines and the figures before and after; say what to do next."""
    steps = [record for record in read_records(folder) if split_of(record) == "train"]
    print("\n--- the student's own text, step by step\n" + "".join(f"{name:>22}" for name in SHOWN_METRICS))
    for record in steps[:: max(1, len(steps) // 5)]:
        print("".join(f"{record[name]:22.3f}" for name in SHOWN_METRICS))
    print(f"\n--- own samples of {HELD_OUT_PROMPTS} held-out functions, nats per token")
    print(" " * 24 + f"{'before':>12}{'after':>12}")
    for key, label in ROWS:
        print(f"{label:24}" + "".join(f"{one[key]:12.3f}" for one in figures))
    print(HEAD_OF_BODIES, flush=True)
    paths = {"teacher": start / "teacher", "before": start / "distilled", "after": folder / "distilled"}
    heads = held_out_heads(start / "valid.jsonl")
    written = write_bodies(paths, start / "teacher", heads)
    print("\n".join(bodies_table(written)))
    write_samples(written, folder / "samples.jsonl")
    picture = draw_on_policy(folder, figures, ROWS, written)
    mkd, export = mkd_command(), quoted(folder / "distilled")
    teacher, held_out = quoted(start / "teacher"), quoted(folder / "held_out.jsonl")
    print(
        f"""
picture: {picture}
exported student: {folder / "distilled"}

next:
  {mkd} chat {export} --teacher {teacher}    # talk with both
  {mkd} sample {export} --teacher {teacher} --prompts {held_out} --max-new-tokens 32    # functions
  {mkd} compare {teacher} {export} --data {quoted(start / "valid.jsonl")} --tokens 4096    # KL, perplexity
  {mkd} evaluate --student-hf {export} --completions FILE.jsonl    # your own task
  {mkd} train --config qwen3_1.7b_on_policy --help    # the same for larger models: docs/on-policy.md

report: """,
        end="",
        flush=True,
    )
