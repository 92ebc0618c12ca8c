"""Let real tiny models write bodies of functions, and show what came out."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mkd.quickstart.demo_picture import draw_off_policy, draw_on_policy
from mkd.quickstart.function_bodies import (
    NUM_FUNCTIONS,
    NUM_SEEDS,
    Bodies,
    bodies_table,
    body_of,
    held_out_heads,
    write_bodies,
    write_samples,
)
from mkd.quickstart.off_policy_demo import NAMES, ROWS
from mkd.quickstart.on_policy_demo import ROWS as FIGURES
from tests.tiny_models import add_tokenizer, make_model

SOURCE = "class Area:\n    def of(self, width):\n        return width\n\n"


@pytest.mark.parametrize(
    "head, text, body, parses",
    [
        ("def f(x):", "\n    return x\n\n\nclass Next:\n", "    return x", True),
        ("def f(x):", " return x\nprint(x)\n", " return x", True),
        ("x = 1\n    def f(self):", "\n        if x:\n            return 1\n    y = 2\n", None, True),
        ("def f(x):", "\n    return x\n    y = (1,", "    return x", True),  # cut off in a line
        ("def f(x):", "\n    y = {\n        1: 2,\n", None, True),  # cut off in a dictionary
        ("def f(x):", "\n    y = {\n        1: 2,\ndef g():", None, False),
        ("def f(x):", "\n    return (x\n    y = 1\n", "    return (x\n    y = 1", False),
        ("def f(x):", "\n    if x:\n    return 1\n", None, False),
        ("def f(x):", "\nreturn x\n", "", False),
        ("def f(x):", "", "", False),
        ("def f(x):", "\n    return '\x00'\n", None, False),
    ],
)
def test_a_body_ends_where_the_indentation_does(head, text, body, parses):
    found = body_of(head, text)
    assert found.parses == parses and body in (None, found.text)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bodies")
    for seed, name in enumerate(("teacher", "student")):
        add_tokenizer(make_model(folder / name, family="llama", seed=seed))
    records = [{"text": SOURCE * 2} for _ in range(NUM_FUNCTIONS)]
    (folder / "valid.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    heads = held_out_heads(folder / "valid.jsonl")
    paths = dict(zip(NAMES, (folder / "teacher", folder / "student", folder / "student"), strict=True))
    return folder, heads, write_bodies(paths, folder / "teacher", heads)


def test_models_write_every_body_with_every_seed(models):
    folder, heads, found = models
    assert len(heads) == NUM_FUNCTIONS and all(one.endswith("def of(self, width):") for one in heads)
    assert [one.num_all for one in found.values()] == [NUM_FUNCTIONS * NUM_SEEDS] * 3
    assert found[NAMES[1]] == found[NAMES[2]] != found[NAMES[0]], "models and seeds decide"


@torch.no_grad()
def test_the_teacher_scores_what_was_written(models):
    """Against one sequence at a time, without padding."""
    folder, heads, found = models
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    tokenizer.pad_token = tokenizer.eos_token
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("student", "teacher")
    )
    nll, count = 0.0, 0
    for seed in range(NUM_SEEDS):
        torch.manual_seed(seed)
        inputs = tokenizer(heads, return_tensors="pt", padding=True, padding_side="left")
        settings = dict(do_sample=True, temperature=0.5, top_k=0, top_p=1.0, max_new_tokens=40)
        rows = student.generate(**inputs, **settings, pad_token_id=tokenizer.eos_token_id)
        for row, mask in zip(rows, inputs["attention_mask"], strict=True):
            ids = row[len(mask) - int(mask.sum()) :]
            first = int(mask.sum())
            ends = (ids[first:] == tokenizer.eos_token_id).nonzero().flatten().tolist()
            ids = ids[: first + ends[0] + 1] if ends else ids
            scores = teacher(ids[None]).logits[0, first - 1 : -1].log_softmax(-1)
            nll -= scores.gather(1, ids[first:, None]).sum().item()
            count += len(ids) - first
    assert found[NAMES[1]].teacher_nll == pytest.approx(nll / count, rel=1e-4)


def test_table_samples_and_pictures(models, tmp_path):
    _, heads, found = models
    right = tuple((body_of(head, "\n        return 1\n"),) * NUM_SEEDS for head in heads)
    shown = {**found, NAMES[0]: Bodies(tuple(heads), right, 0.5)}
    table = bodies_table(shown)
    assert table[0] == "teacher         24 of 24 parse; to the teacher the text costs 0.50 nats a token"
    assert "  teacher (parses parses parses):" in table and "      return 1" in table
    write_samples(shown, tmp_path / "samples.jsonl")
    first = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    assert first["teacher"].startswith("[parses, seed 0]\n        return 1\n\n[parses, seed 1]")
    valid = [{"iteration": n, "split": "valid", **{key: 0.5 for key, _ in ROWS}} for n in (0, 2)]
    train = [{"iteration": n, **{key: 0.5 for key, _ in ROWS}} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (*train, *valid)))
    pictures = [draw_off_policy(tmp_path, {name: valid[0] for name in NAMES}, shown)]
    pictures.append(draw_on_policy(tmp_path, [{key: 0.5 for key, _ in FIGURES}] * 2, FIGURES, shown))
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
