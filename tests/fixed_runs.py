"""Run one fixed run of every kind, and print the SHA-256 of its losses.

    python -m tests.fixed_runs [--work DIR] [--only KIND ...]

A refactoring must not change a bit of any of them. Run it before and after on the same machine with the same
`--work`, whose models and text are made once. Everything goes through the command line, so that the script
outlives the code that it measures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURED = (
    *("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "teacher_share", "peak_memory_gib"),
    "rollout/time_ms",
)
"""Keys of metrics.jsonl whose values differ in every run."""

STUDENT = dict(family="qwen3", seed=1, num_hidden_layers=4, tie_word_embeddings=True)
TEACHER = dict(family="llama", seed=2, num_hidden_layers=8, hidden_size=72)
TWIN = dict(STUDENT, seed=5)  # ends its texts as the student does
OTHER = dict(family="mistral", seed=3, num_hidden_layers=4)
FOREIGN = dict(family="llama", seed=4, num_hidden_layers=4, vocab_size=420)
COMMON = (
    "--seq-length 64 --global-batch-size 8 --train-iters 4 --lr 1e-3 --eval-interval 2 "
    "--split 90,10,0 --seed 7"
)

OWN_TEXT = "--on-policy-fraction 1 --prompt-data-path {prompts} --max-new-tokens 12 --rollout-prompts 4"
KINDS: dict[str, tuple[int, str]] = {  # name -> (processes, flags)
    "same_tokens_tp2_pp2_vpp2": (
        4,
        "--teacher-hf {teacher} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--sequence-parallel --num-virtual-stages-per-pipeline-rank 2 --kd-temperature 2",
    ),
    "jsd_dp2": (
        2,
        "--teacher-hf {teacher} --kd-divergence jsd --kd-jsd-beta 0.3 --use-distributed-optimizer",
    ),
    "cross_tokenizer_dp2": (2, "--teacher-hf {foreign} --xtoken-loss partition_kl --micro-batch-size 2"),
    "cross_tokenizer_gold": (1, "--teacher-hf {foreign} --xtoken-loss gold --kd-divergence mixed_kl"),
    "two_teachers": (1, "--config {two}"),
    "stored_teacher": (1, "--teacher-hf {teacher} --teacher-topk {topk}"),
    "residency_host": (1, "--teacher-hf {teacher} --teacher-residency host --optimizer-residency host"),
    "resume": (
        1,
        "--teacher-hf {teacher} --kd-divergence reverse_kl --save {save} --load {save} --save-interval 2",
    ),
    "preferences_pp2": (
        2,
        "--dpo-beta 0.2 --kd-ratio 0 --data-path {pairs} --pipeline-model-parallel-size 2",
    ),
    "own_text": (1, f"--teacher-hf {{twin}} --kd-ratio 1 {OWN_TEXT}"),
    "rewards_dp2": (
        2,
        "--reward tests.kinds.sampled.reward_functions:of_length --kd-ratio 0.1 --kd-divergence reverse_kl "
        f"--samples-per-prompt 3 --rollout-updates 2 {OWN_TEXT}",
    ),
}


def make_files(work: Path) -> None:
    """Make models, tokenizers and text below `work` that are missing."""
    from tests.tiny_models import add_tokenizer, make_model

    pairs = [
        {"prompt": f"{i}: the quick", "chosen": " brown fox" * (i % 3 + 1), "rejected": f" dog{i}"}
        for i in range(60)
    ]
    write_records(work / "pairs.jsonl", pairs)
    write_records(
        work / "prompts.jsonl", [{"prompt": f"{i}: the quick brown", "answer": i} for i in range(40)]
    )
    if (work / "text.jsonl").exists():
        return
    for name, model in (("student", STUDENT), ("teacher", TEACHER), ("other", OTHER), ("twin", TWIN)):
        add_tokenizer(make_model(work / name, **model))
    add_tokenizer(
        make_model(work / "foreign", **FOREIGN),
        vocab_size=400,
        text="a slow green turtle walks around the dog. ",
    )
    write_two_teachers(work)
    texts = [f"{i}: " + "the quick brown fox meets a slow green turtle. " * (i % 7 + 1) for i in range(120)]
    write_records(work / "text.jsonl", [{"text": text} for text in texts])


def write_records(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def write_two_teachers(work: Path) -> None:
    (work / "two.yaml").write_text(
        f"teachers:\n  - {{name: wide, hf: {work}/teacher, weight: 2}}\n"
        f"  - {{name: foreign, hf: {work}/foreign, temperature: 1.5, xtoken: {{loss: prefix_kl}}}}\n"
        "kd: {kd_ratio: 0.7, teacher_weighting: ce}\n",
        encoding="utf-8",
    )


def run_kind(kind: str, work: Path) -> str:
    """Return the SHA-256 of the losses of a fresh run."""
    log, processes = work / "runs" / kind, KINDS[kind][0]
    shutil.rmtree(log, ignore_errors=True)
    save = log / "save"
    paths = {name: work / name for name in ("teacher", "foreign")} | {"save": save, "twin": work / "twin"}
    paths |= {name: work / f"{name}.jsonl" for name in ("pairs", "prompts")}
    paths |= {"two": work / "two.yaml", "topk": log / "topk"}
    flags = (
        f"--student-hf {work}/student --data-path {work}/text.jsonl --data-cache-path {work}/cache {COMMON} "
    )
    flags += KINDS[kind][1].format(**paths)
    if kind == "stored_teacher":
        export = flags.replace(f"--teacher-topk {paths['topk']}", f"--out {paths['topk']} --k 32")
        command(["tools/export_teacher_topk.py", *export.split(), "--log-dir", str(log / "export")], 1)
    if kind == "resume":
        command(["pretrain_kd.py", *flags.split(), "--log-dir", str(log), "--exit-interval", "2"], processes)
    command(["pretrain_kd.py", *flags.split(), "--log-dir", str(log)], processes)
    return digest(log / "metrics.jsonl")


def command(words: list[str], processes: int) -> None:
    """Run a script of this checkout on `processes` processes; show its output only if it fails."""
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        if processes > 1
        else []
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *torchrun, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")


def digest(metrics: Path) -> str:
    """Return the hash of every record without measured values."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    kept = [{key: value for key, value in record.items() if key not in MEASURED} for record in records]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/fixed"))
    parser.add_argument("--only", nargs="*", choices=tuple(KINDS), default=tuple(KINDS))
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_files(work)
    for kind in arguments.only:
        print(f"{run_kind(kind, work)}  {kind}", flush=True)


if __name__ == "__main__":
    main()
