"""Run the code of docs/loss-library.md with tiny models, and compare its losses with the plain formula."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import TrainingArguments

from tests.losses.standalone.plain_loss import plain_rows

PAGE = Path(__file__).parents[2] / "docs" / "loss-library.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
LENGTHS = (12, 7, 9, 15)


def build(layers, hidden):
    torch.manual_seed(layers)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=hidden, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def names():
    """Return what the page takes for granted; the optimizer changes nothing."""
    torch.manual_seed(0)
    rows = [dict(input_ids=torch.randint(60, (length,))) for length in LENGTHS]
    for row in rows:
        row["labels"] = row["input_ids"].clone()
        row["labels"][:3] = -100
    student = build(1, 16)
    return dict(
        torch=torch,
        student=student,
        teacher=build(2, 32),
        optimizer=torch.optim.SGD(student.parameters(), lr=0.0),
        rows=rows,
        batches=[{name: value[None] for name, value in row.items()} for row in rows],
    )


def expected(names, row, **settings):
    """Return (sum of the row losses, their number)."""
    ids, labels = row["input_ids"][None], row["labels"][None]
    targets = torch.cat([labels[:, 1:], torch.full((1, 1), -100)], dim=1)
    with torch.no_grad():
        logits = (names[name](input_ids=ids).logits.double() for name in ("student", "teacher"))
        rows = plain_rows(*logits, targets, **settings)
    return rows[targets != -100].sum(), int((targets != -100).sum())


def test_the_page_s_code(names, tmp_path):
    loop, logits, trainer, check = BLOCKS
    exec(loop, names)
    total, count = expected(names, names["rows"][-1], kd_ratio=0.9, temperature=2.0)
    torch.testing.assert_close(names["output"].loss.double(), total / count, rtol=1e-5, atol=0.0)
    exec(logits, names)
    torch.testing.assert_close(names["output"].loss.double(), total / count, rtol=1e-5, atol=0.0)
    exec(check, names)
    exec(trainer, names)
    parts = [expected(names, row, kd_ratio=0.9) for row in names["rows"]]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=1, per_device_eval_batch_size=1,
        gradient_accumulation_steps=4, max_steps=2, logging_steps=1, learning_rate=5e-3, report_to=[],
        use_cpu=True, save_strategy="no",
    )  # fmt: skip
    trained = names["DistillationTrainer"](
        model=names["student"], args=arguments, train_dataset=names["rows"], eval_dataset=names["rows"]
    )
    trained.train()
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(float(sum(s for s, _ in parts) / sum(n for _, n in parts)), rel=1e-4)
    assert losses[1] < losses[0]
    assert trained.evaluate()["eval_loss"] < losses[0]
