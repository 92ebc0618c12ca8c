"""Run two steps of every configuration of docs/algorithms.md, with tiny models and short texts."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import read_metrics, run_main, write_records
from tests.train.context_run import TEMPLATE, make_files, said

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"`configs/([\w.]+)\.yaml` \|$", (ROOT / "docs" / "algorithms.md").read_text(), re.MULTILINE
)
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
SMALLER = dict(  # sections that say how large a run is
    training=dict(train_iters=2, seq_length=256, micro_batch_size=1, global_batch_size=2, eval_iters=0),
    rollout=dict(rollout_prompts=3, samples_per_prompt=2, max_new_tokens=6, rollout_slots=3),
    optimizer=dict(lr=1e-3, lr_warmup_iters=0),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("algorithms"))
    sizes = dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128
    )
    add_tokenizer(make_model(folder / "even", "qwen3", seed=1, **sizes))  # groups of 32 elements fit its rows
    (folder / "even" / "chat_template.jinja").write_text(TEMPLATE)
    keys = ("solution", "demonstration")
    texts = [" ".join(WORDS[(i + k) % 9] for k in range(3 + i % 5)) for i in range(40)]
    chats = [[said("user", f"{i}?"), said("assistant", text)] for i, text in enumerate(texts)]
    known = [
        dict.fromkeys(keys, text) | {"domain": ("math", "code")[i % 2], "answer": i}
        for i, text in enumerate(texts)
    ]
    records = [{"messages": chat} | more for chat, more in zip(chats, known, strict=True)]
    write_records(folder / "chats.jsonl", *records)
    write_records(folder / "prompts.jsonl", *({**one, "messages": one["messages"][:1]} for one in records))
    pairs = [{"prompt": f"{i}?", "chosen": text, "rejected": "lazy"} for i, text in enumerate(texts)]
    write_records(folder / "pairs.jsonl", *pairs)
    return folder


def smaller(config: dict, files: Path) -> dict:
    """Return the configuration with tiny models, short texts and one process; its algorithm is the same."""
    for section, values in SMALLER.items():
        config[section] = config.get(section, {}) | values if section in config else config.get(section)
    config = {name: section for name, section in config.items() if section is not None and name != "parallel"}
    config["student"]["hf"] = str(files / ("even" if "rounding" in config else "student"))
    for teacher in config.get("teachers", ()):
        if "/" in teacher.get("hf", ""):
            teacher["hf"] = str(files / "teacher")
        teacher.pop("residency", None)
        if "xtoken" in teacher:
            teacher["xtoken"]["seq_length"] = 512
    data = config.setdefault("data", {})
    data.pop("valid_data_path", None)
    config["training"].pop("eval_interval", None)
    config["training"]["bf16"] = "rounding" in config  # whose weights are copies of fp32 weights
    if "data_path" in data:
        data["data_path"] = [str(files / ("pairs.jsonl" if "dpo" in config else "chats.jsonl"))]
    if "data_tags" in data:
        del data["data_tags"]
    if "rollout" in config:
        config["rollout"]["prompt_data_path"] = [str(files / "prompts.jsonl")]
        config["rollout"].pop("rollout_temperature", None)
    if "grpo" in config:
        judge = "with_feedback" if "sibling" in str(config) else "of_length"
        config["grpo"]["reward"] = f"tests.kinds.sampled.reward_functions:{judge}"
    if "rounding" in config:
        config["rounding"]["rounding_group"] = 32
    data |= dict(data_cache_path=str(files / "cache"))
    del config["checkpoint"]
    if "lora" in config:
        config["lora"].pop("export_lora", None)
        config["lora"]["lora_rank"] = 4
    return config


@pytest.mark.parametrize("row", ROWS)
def test_the_algorithm_of_a_row_runs(row, files, ranks):
    config = smaller(yaml.safe_load((ROOT / "configs" / f"{row}.yaml").read_text()), files)
    config["log"] = dict(log_dir=str(files / row), log_interval=1)
    path = files / f"{row}.yaml"
    path.write_text(yaml.safe_dump(config))
    (result,) = run_main(ranks, ["--config", str(path), "--no-save"])
    assert result.exit_code == 0, result.stderr
    steps = [one for one in read_metrics(files / row) if "loss" in one]
    assert len(steps) == 2 and all(math.isfinite(one["loss"]) and one["grad_norm"] > 0 for one in steps)


def test_every_recipe_of_the_table_exists_once():
    assert len(ROWS) == len(set(ROWS)) == 12
