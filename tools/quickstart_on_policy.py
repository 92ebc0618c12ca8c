"""Let a small real model learn from its own text on this machine's CPU, in ten minutes at most.

Make the student of `make quickstart` (or take it, if it is there): 24 of SmolLM2's 30 layers, after 30 steps
on stored text. Then it completes the beginnings of Python functions itself, and the teacher judges every
token, for 12 steps. Before and after, the script samples held-out functions and prints what the teacher
thinks of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.config.flags import FlagParser  # noqa: E402
from mkd.errors import returns_exit_code  # noqa: E402
from mkd.log.records import read_records, split_of  # noqa: E402
from tools.fetch_smollm2 import fetch_smollm2  # noqa: E402
from tools.quickstart import cut_student, distil, write_text  # noqa: E402

CONTEXT_LINES = 4  # before the head of a function
PROMPTS_OF_FILE, HELD_OUT_PROMPTS, NEW_TOKENS, SHOWN = 4, 20, 32, 2
ROWS = (("kl", "KL(student || teacher)"), ("teacher_nll", "teacher NLL"), ("entropy", "entropy"))
SHOWN_METRICS = "rollout/teacher_nll", "rollout/kl_quarter_1", "rollout/kl_quarter_4", "rollout/entropy"


def write_prompts(text: Path, out: Path) -> list[str]:
    """Write the beginnings of functions in the documents of `text` as prompts, and return them."""
    lines = text.read_text(encoding="utf-8").splitlines()
    prompts = [prompt for line in lines for prompt in _heads(json.loads(line)["text"])]
    with open(out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    return prompts


def _heads(source: str) -> Iterator[str]:
    """Yield up to PROMPTS_OF_FILE heads of functions, each with the lines before it."""
    lines, found = source.splitlines(keepends=True), 0
    for number, line in enumerate(lines):
        if line.lstrip().startswith("def ") and line.rstrip().endswith(":") and found < PROMPTS_OF_FILE:
            found += 1
            yield "".join(lines[max(0, number - CONTEXT_LINES) : number + 1])


def make_start(folder: Path) -> Path:
    """Return the folder of a quickstart: that of `make quickstart`, or one that is made now."""
    done = ROOT / "runs" / "quickstart"
    if (done / "distilled" / "config.json").exists():
        print(f"starting from the student of {done}", flush=True)
        return done
    start = folder / "off-policy"
    start.mkdir(parents=True, exist_ok=True)
    fetch_smollm2(start / "teacher")
    write_text(start)
    if not (start / "student" / "config.json").exists():
        cut_student(start)
    distil(start, "tp")
    return start


def learn(folder: Path, start: Path) -> Path:
    """Train on the student's own text and return the exported student."""
    export = folder / "distilled"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(ROOT / "pretrain_kd.py"), "--config", str(ROOT / "configs" / "quickstart_on_policy.yaml")]
    command += ["--teacher-hf", str(start / "teacher"), "--student-hf", str(start / "distilled")]
    command += ["--prompt-data-path", str(folder / "prompts.jsonl"), "--log-dir", str(folder)]
    command += ["--export-hf", str(export), "--overwrite", "--no-save"]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return export


def measure(
    student_dir: Path, teacher_dir: Path, prompts: Sequence[str]
) -> tuple[dict[str, float], list[str]]:
    """Return the mean figures of the student's own samples, nats per token, and the samples."""
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
    sums, count, texts = dict.fromkeys(("kl", "teacher_nll", "entropy"), 0.0), 0, []
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
            texts.append(tokenizer.decode(row))
    return {name: total / count for name, total in sums.items()}, texts


def report(folder: Path, figures: Sequence[dict[str, float]], texts: Sequence[Sequence[str]]) -> None:
    """Print the run's metrics, the samples, and the figures before and after."""
    steps = [record for record in read_records(folder) if split_of(record) == "train"]
    print("\n--- the student's own text, step by step\n" + "".join(f"{name:>22}" for name in SHOWN_METRICS))
    for record in steps[:: max(1, len(steps) // 5)]:
        print("".join(f"{record[name]:22.3f}" for name in SHOWN_METRICS))
    for number in range(SHOWN):
        for name, of_model in zip(("before", "after"), texts, strict=True):
            print(f"\n--- sample {number + 1} {name}\n{of_model[number]}")
    print(f"\n--- own samples of {HELD_OUT_PROMPTS} held-out functions, nats per token")
    print(" " * 24 + f"{'before':>12}{'after':>12}")
    for key, label in ROWS:
        print(f"{label:24}" + "".join(f"{one[key]:12.3f}" for one in figures))


@returns_exit_code
def main() -> None:
    parser = FlagParser(description=__doc__)
    default = ROOT / "runs" / "quickstart-on-policy"
    text = "folder to write everything to (default: runs/quickstart-on-policy)"
    parser.add_argument("--folder", type=Path, default=default, help=text)
    args = parser.parse_args()
    begin = time.perf_counter()
    args.folder.mkdir(parents=True, exist_ok=True)
    start = make_start(args.folder)
    write_prompts(start / "train.jsonl", args.folder / "prompts.jsonl")
    held_out = write_prompts(start / "valid.jsonl", args.folder / "held_out.jsonl")[:HELD_OUT_PROMPTS]
    before = measure(start / "distilled", start / "teacher", held_out)
    export = learn(args.folder, start)
    after = measure(export, start / "teacher", held_out)
    report(args.folder, *zip(before, after, strict=True))
    print(f"\nexported student: {export}\ndocs/on-policy.md explains this run")
    print(f"quickstart-on-policy took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
