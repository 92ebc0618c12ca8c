"""`mkd compare A B --data FILE` against plain transformers, piece by piece in float64."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mkd.commands.compare import main
from mkd.evaluation import model_comparison
from mkd.evaluation.model_comparison import ComparedModel
from mkd.losses.standalone import language_head
from tests.losses.standalone.plain_loss import plain_divergence
from tests.tiny_models import add_tokenizer, make_model

SEQ_LENGTH = 16
RECORDS = [
    {"text": "the quick brown fox jumps over the lazy dog. " * 4},
    {"prompt": "the quick brown fox ", "completion": "jumps over the lazy dog."},
    {"text": "a lazy fox. the dog jumps."},
    {"prompt": "the dog " * 12, "completion": "jumps"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    add_tokenizer(make_model(folder / "a", "granite", seed=1))
    add_tokenizer(make_model(folder / "b", "llama", seed=2, num_hidden_layers=2, vocab_size=315))
    add_tokenizer(make_model(folder / "other", "llama", num_hidden_layers=1), text="another text. ")
    (folder / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return folder


def expected(folder):
    """Return (tokens, ce of A and B, KL(A || B), KL(B || A), top-1 agreement) of all pieces."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "a")
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval() for name in "ab"
    ]
    sums, count = torch.zeros(5, dtype=torch.float64), 0
    for record in RECORDS:
        prompt = tokenizer(record.get("prompt", ""))["input_ids"]
        answer = tokenizer(record.get("text", record.get("completion")))["input_ids"]
        ids = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        first = max(len(prompt) - 1, 0)  # row that predicts the first token with loss
        for start in range(0, len(ids) - 1, SEQ_LENGTH):
            piece = ids[start : start + SEQ_LENGTH + 1]
            with torch.no_grad():
                a, b = (model(piece[None, :-1]).logits[0, max(first - start, 0) :] for model in models)
            labels = piece[1 + max(first - start, 0) :]
            if len(labels) and len(a):
                shared = a, b[:, : a.shape[1]]
                ces = [torch.nn.functional.cross_entropy(one, labels, reduction="sum") for one in (a, b)]
                kls = [plain_divergence(name, None, *shared).sum() for name in ("forward_kl", "reverse_kl")]
                top1 = (shared[0].argmax(-1) == b.argmax(-1)).sum().double()
                sums += torch.stack([*ces, *kls, top1])
                count += len(labels)
    return count, *(sums / count).tolist()


def watch_shapes(monkeypatch):
    """Return a set that gets rows and columns of every batch, and whether all layers are kept."""
    found, states = set(), ComparedModel.states

    def watched(model, inputs, with_head):
        found.add((*inputs["input_ids"].shape, with_head and model.base is None))
        return states(model, inputs, with_head)

    monkeypatch.setattr(ComparedModel, "states", watched)
    return found


def compare(folder, *more):
    words = [folder / "a", folder / "b", "--data", folder / "text.jsonl", "--seq-length", SEQ_LENGTH, *more]
    return main([str(word) for word in words])


@pytest.mark.parametrize("known_scale", [True, False])
def test_equals_plain_transformers(folder, tmp_path, capsys, monkeypatch, known_scale):
    """Through the heads, and through logits where the head alone does not make them. Padding counts."""
    monkeypatch.setitem(model_comparison.BATCH_TOKENS, "cpu", 3 * SEQ_LENGTH + 1)
    shapes = watch_shapes(monkeypatch)
    if not known_scale:
        monkeypatch.setattr(language_head, "SCALES", {})  # of Granite: it divides its logits
    out = tmp_path / "figures.json"
    assert compare(folder, "--out", out) == 0
    shown = capsys.readouterr().out
    assert ("all logits are made" in shown) is not known_scale
    found = json.loads(out.read_text())
    count, *values = expected(folder)
    names = ("ce_a", "ce_b", "kl_a_b", "kl_b_a", "top1_agreement")
    assert found["num_tokens"] == count
    assert [found[name] for name in names] == pytest.approx(values, rel=1e-4)
    assert {rows for rows, *_ in shapes} >= {3} and not any(keeps_all for *_, keeps_all in shapes)
    assert all(rows * columns <= 3 * SEQ_LENGTH + 1 for rows, columns, _ in shapes)
    assert len({columns for _, columns, _ in shapes}) > 1
    assert found["perplexity_b"] == pytest.approx(math.exp(values[1]), rel=1e-4)
    assert f"KL(A || B), nats per token     {found['kl_a_b']:.6g}" in shown


def test_a_model_equals_itself(folder, capsys):
    assert main([str(folder / "a"), str(folder / "a"), "--data", str(folder / "text.jsonl")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines if line[:1] in (["KL(A"], ["KL(B"])] == ["0", "0"]
    assert ["top-1", "agreement", "1.0000"] in lines


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("a", "other", "--data", "text.jsonl"), "tokenizers-differ"),
        (("a", "b", "--data", "none.jsonl"), "data-path-not-found"),
        (("a", "b", "--data", "text.jsonl", "--eps", "0"), "remove-flag"),
        (("a", "b", "--dtype", "bf16"), "remove-flag"),
        (("a", "b"), "add-flag"),
        (("a", "b", "--data", "text.jsonl", "--out", "text.jsonl"), "already-exists"),
    ],
)
def test_refuses(folder, capsys, monkeypatch, words, code):
    monkeypatch.chdir(folder)
    assert main(list(words)) in (64, 65)
    assert f"error[{code}]" in capsys.readouterr().err
