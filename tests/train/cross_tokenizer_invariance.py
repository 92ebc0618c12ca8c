"""Print the invariance table for cross-tokenizer teachers.

    python -m tests.train.cross_tokenizer_invariance

One of them runs beside a teacher with the student's tokenizer, under every layout. The fixed global batch is
real text, aligned by the real loader. The student's head has more rows than its tokenizer has ids.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.ranks import RankPool
from tests.tiny_models import make_model
from tests.tokenizers.trained import SENTENCES, train_hf_tokenizer
from tests.train.invariance import (
    DISTRIBUTED,
    NUM_PACKS,
    NUM_UPDATES,
    SEQ_LENGTH,
    SP,
    TOLERANCE,
    Layout,
    errors_of,
    measure,
)
from tests.xtoken.small_tokenizers import SAMPLE, SOURCE, train_byte_level

LOSSES = ("partition_kl", "prefix_kl", "p_kl", "gold")
SPAN_MULTIPLE = 4  # required by CP2
COLUMNS = ("loss", "gradient", "evaluation", "grad norm", "updated")
SINGLE = Layout("one process")
LAYOUTS = (
    Layout("TP2 + sequence parallel", 2, tp=2, flags=SP),
    Layout("TP4, micro-batch 2", 4, tp=4, micro=2),
    Layout("PP2", 2, pp=2),
    Layout("PP2 VPP2, micro-batch 2", 2, pp=2, vp=2, micro=2),
    Layout("DP2 + distributed optimizer", 2, flags=DISTRIBUTED),
    Layout("CP2", 2, cp=2),
    Layout("TP2 CP2 + sequence parallel, micro-batch 4", 4, tp=2, cp=2, micro=4, flags=SP),
    Layout("PP2 CP2", 4, pp=2, cp=2),
    Layout("TP2 PP2 DP2", 8, tp=2, pp=2),
    Layout("micro-batch 4, packs permuted", micro=4, permuted=True),
)
SELECT = ("--teacher-combination", "select")
BY_ENTROPY = ("--teacher-weighting", "entropy", "--teacher-weighting-temperature", "2")


def make_files(
    folder: Path, sizes: dict | None = None, families: tuple[str, str, str] = ("qwen3", "llama", "qwen2")
) -> Path:
    """Make student, two teachers and a text, and a configuration for each loss."""
    sizes = sizes or {}
    of_student, of_cross, of_same = families
    student = dict(num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3, head_dim=8)
    make_model(
        folder / "student", of_student, seed=1, vocab_size=371, tie_word_embeddings=True, **student | sizes
    )
    cross = dict(hidden_size=72, tie_word_embeddings=True)
    make_model(folder / "cross", of_cross, seed=2, vocab_size=460, **cross | sizes)
    make_model(folder / "same", of_same, seed=3, vocab_size=352, **sizes)
    for name in ("student", "same"):
        train_hf_tokenizer(vocab_size=350).save_pretrained(folder / name)
    train_byte_level(vocab_size=450).save_pretrained(folder / "cross")  # trained on other text
    random, words = np.random.default_rng(0), (" ".join(SENTENCES) + SAMPLE + SOURCE[:4000]).split()
    texts = [" ".join(random.choice(words, random.integers(2, 25))) for _ in range(40)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    for loss in LOSSES:
        teachers = [
            {"name": "cross", "hf": str(folder / "cross"), "weight": 2, "xtoken": {"loss": loss}},
            {"name": "same", "hf": str(folder / "same"), "divergence": "jsd", "temperature": 1.5},
        ]
        (folder / f"{loss}.yaml").write_text(
            json.dumps({"student": {"hf": str(folder / "student")}, "teachers": teachers})
        )
    return folder


def run_layout(layout: Layout, files: Path, loss: str, out_dir: Path, num_updates: int = NUM_UPDATES) -> dict:
    """Return the result of `measure`; called on every rank."""
    engine, state, batches, _ = build(layout, files, loss)
    return measure(engine, state, batches, files / "student", out_dir, num_updates)


def build(layout: Layout, files: Path, loss: str):
    """Return engine, training state, this rank's micro-batches, and tokens of each teacher's packs."""
    from mkd.config.load import load_config
    from mkd.data.batch import collate
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run
    from mkd.tokenizers.load import load_tokenizer
    from tests.data.datasets import open_datasets

    argv = layout.argv(files / "student", files / "cross")[4:]  # the models come from the file
    argv += ["--config", str(files / f"{loss}.yaml"), "--data-path", str(files / "text.jsonl")]
    plan = plan_run(load_config([*argv, "--data-cache-path", str(files / "cache")]).config, layout.ranks)
    context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(files / "student"))
    teachers = [one.meet(plan.config, plan.tokenizers, context) for one in plan.setups]
    packs, _ = open_datasets(
        data_path=[str(files / "text.jsonl")],
        tokenizer=tokenizer,
        seq_length=SEQ_LENGTH,
        vocab_size=350,
        cache_dir=str(files / "cache"),
        document_multiple=SPAN_MULTIPLE,
        teachers=[one.text for one in teachers],
        is_builder=context.rank == 0,
        share=context.broadcast_object,
    )
    lengths = zip(teachers, packs.teacher_seq_lengths, strict=True)
    engine, state = build_engine(plan, context, [replace(one, seq_length=length) for one, length in lengths])
    order = np.random.default_rng(1).permutation(NUM_PACKS) if layout.permuted else np.arange(NUM_PACKS)
    groups = order.reshape(-1, layout.micro)[context.dp_rank :: context.dp_size]
    batches = [collate([packs[int(i)] for i in group]) for group in groups]
    kinds = np.concatenate([batch.teacher_inputs[0].chunks.kinds for batch in batches])
    assert context.dp_size > 1 or len(set(kinds)) == 4, "the batch must have chunks of every kind"
    shards = [batch.shard(context.row_shard) for batch in batches]
    return engine, state, [batch.to(context.device) for batch in shards], packs.teacher_seq_lengths


def main() -> int:
    pool, failed = RankPool(), 0
    with tempfile.TemporaryDirectory() as name:
        files = make_files(Path(name))
        print(f"relative error to one process, fp32 (allowed {TOLERANCE:.0e})\n")
        print(f"{'loss, layout':58}{'ranks':>6}" + "".join(f"{column:>12}" for column in COLUMNS))
        for loss in LOSSES:
            (single,) = pool.run(run_layout, 1, SINGLE, files, loss, files / "single")
            for layout in LAYOUTS:
                results = pool.run(run_layout, layout.ranks, layout, files, loss, files / "layout")
                errors = errors_of(results, files, single)
                ok = all(errors[column] <= TOLERANCE for column in COLUMNS)
                failed += not ok
                values = "".join(f"{errors[column]:12.1e}" for column in COLUMNS)
                end = "" if ok else "  FAILED " + errors["where"]
                print(f"{loss + ', ' + layout.name:58}{layout.ranks:6}{values}{end}", flush=True)
    pool.close()
    total = len(LOSSES) * len(LAYOUTS)
    print(f"\n{total - failed} of {total} layouts within {TOLERANCE:.0e}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
