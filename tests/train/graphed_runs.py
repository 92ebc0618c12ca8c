"""Run the training command with and without CUDA graphs, for kinds of runs that make their rows themselves.

    timeout 600 python -m tests.train.graphed_runs [WORD ...]

prints a line for every run whose name has one of the words. On a CPU both runs go without graphs.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.fixed_runs import MEASURED
from tests.ranks import RankPool
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import call_main, read_metrics, write_records

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=512)
SIZES = dict(hidden_size=256, num_hidden_layers=4, max_position_embeddings=512, eos_token_id=0, **HEADS)
COMMON = (
    "--seq-length 256 --global-batch-size 4 --train-iters 8 --lr 1e-3 --seed 7 --bf16 --deterministic-mode "
    "--no-save"
)
OWN_TEXT = "--on-policy-fraction 1 --prompt-data-path {files}/prompts.jsonl --max-new-tokens 48"
EVALUATED = "--eval-interval 4 --split 90,10,0"
TEXT = f"--data-path {{files}}/text.jsonl {EVALUATED}"
RUNS = {  # flags beside the student's
    "another tokenizer": f"{TEXT} --teacher-hf {{files}}/foreign --xtoken-loss partition_kl",
    "two tokenizers, two teachers": f"{TEXT} --config {{files}}/two.yaml",
    "own text": f"{OWN_TEXT} --teacher-hf {{files}}/twin --kd-ratio 1 --rollout-prompts 16",
    "average of the student": f"{TEXT} --self-teacher ema",
    "DPO": f"--dpo-beta 0.2 --kd-ratio 0 --data-path {{files}}/pairs.jsonl {EVALUATED}",
    "GRPO": f"{OWN_TEXT} --teacher-hf {{files}}/twin --kd-ratio 0.1 --kd-divergence reverse_kl "
    "--reward tests.kinds.sampled.reward_functions:of_length --rollout-prompts 8 --samples-per-prompt 3 "
    "--rollout-updates 2",
}


def make_files(files: Path) -> Path:
    """Make models, texts, prompts and pairs below `files`."""
    for name, family, seed in (("student", "qwen3", 1), ("twin", "qwen3", 5), ("teacher", "llama", 2)):
        tied = dict(tie_word_embeddings=name == "student")
        add_tokenizer(make_model(files / name, family, seed=seed, **SIZES, **tied))
    foreign = make_model(files / "foreign", "llama", seed=4, **SIZES | dict(vocab_size=420))
    add_tokenizer(foreign, vocab_size=400, text="a slow green turtle walks around the dog. ")
    (files / "two.yaml").write_text(
        f"teachers:\n  - {{name: near, hf: {files}/teacher, weight: 2}}\n"
        f"  - {{name: far, hf: {files}/foreign, xtoken: {{loss: prefix_kl}}}}\nkd: {{kd_ratio: 0.7}}\n",
        encoding="utf-8",
    )
    words = "the quick brown fox meets a slow green turtle. "
    write_records(files / "text.jsonl", *({"text": f"{i}: " + words * (i % 5 + 1)} for i in range(400)))
    write_records(files / "prompts.jsonl", *({"prompt": f"{i}: " + words, "answer": i} for i in range(200)))
    pairs = (
        {
            "prompt": f"{i}: {words}",
            "chosen": " brown fox" * (i % 9 + 1),
            "rejected": f" dog{i}" * (i % 5 + 1),
        }
        for i in range(300)
    )
    write_records(files / "pairs.jsonl", *pairs)
    return files


def compared(pool: RankPool, files: Path, name: str) -> tuple[dict[str, float], int, str]:
    """Return the largest relative difference by figure, the number of graphs, and warnings about graphs."""
    records, said = [], ""
    for graphs in ("off", "auto"):
        log = files / f"log-{graphs}"
        shutil.rmtree(log, ignore_errors=True)
        flags = f"--student-hf {{files}}/student {COMMON} --cuda-graphs {graphs} --log-dir {log} {RUNS[name]}"
        argv = [*flags.format(files=files).split(), "--data-cache-path", str(files / "cache")]
        ((code, stdout, stderr),) = pool.run(call_main, 1, argv)
        assert code == 0, (stdout + stderr)[-1500:]
        records.append(read_metrics(log))
        said = stdout + stderr
    lines = said.splitlines()
    warnings = " ".join(line for line in lines if "continues without CUDA graphs" in line)
    return away(*records), sum("CUDA graphs of" in one or "CUDA graph of" in one for one in lines), warnings


def away(one: list[dict], other: list[dict]) -> dict[str, float]:
    """Return the largest relative difference of each figure that is not measured, if there is one."""
    found = {"steps": abs(len(one) - len(other)) * 1.0}
    for first, second in zip(one, other, strict=False):
        for key, value in first.items():
            if key not in MEASURED and isinstance(value, int | float) and not key.endswith("_ms"):
                gap = abs(value - second[key]) / max(abs(value), 1e-12)
                found[key] = max(found.get(key, 0.0), gap)
    return {key: gap for key, gap in found.items() if gap}


def rows(words: list[str]) -> Iterator[str]:
    """Yield a line for each run whose name has one of the words; all without words."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        files, pool = make_files(Path(folder)), RankPool(on_gpus=torch.cuda.is_available())
        for name in RUNS:
            if words and not any(word in name for word in words):
                continue
            try:
                gaps, graphs, warnings = compared(pool, files, name)
                worst = dict(sorted(gaps.items(), key=lambda pair: -pair[1])[:4])
                yield f"ROW {name}: different {worst or 'nothing'}, {graphs} graphs {warnings[:200]}"
            except Exception as error:
                yield f"ROW {name}: FAILED {type(error).__name__}: {str(error)[-800:]}"
        pool.close()


if __name__ == "__main__":
    for row in rows(sys.argv[1:]):
        print(row, flush=True)
