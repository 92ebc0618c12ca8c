"""Complete known lines with a real tiny model, and show what came out."""

from __future__ import annotations

import json

from mkd.quickstart.demo_picture import draw_off_policy
from mkd.quickstart.known_lines import (
    NUM_SEEDS,
    PROMPTS,
    KnownLines,
    complete,
    line_end,
    lines_table,
    write_samples,
)
from mkd.quickstart.off_policy_demo import NAMES, ROWS
from tests.tiny_models import add_tokenizer, make_model

RIGHT = KnownLines(tuple((expected,) * NUM_SEEDS for _, expected in PROMPTS), 1.0)


def test_models_complete_every_prompt_with_every_seed(tmp_path):
    model = add_tokenizer(make_model(tmp_path / "model", family="llama", seed=2))
    found = complete(model)
    assert len(found.ends) == len(PROMPTS) and found.num_all == NUM_SEEDS * len(PROMPTS)
    assert found == complete(model), "seeds decide"
    assert found.num_right < found.num_all and RIGHT.num_right == RIGHT.num_all
    models = dict(zip(NAMES, (RIGHT, found, found), strict=True))
    table = lines_table(models)
    assert table[0] == "teacher         36 of 36 right; probability of the expected end 1.000"
    assert 0 < found.probability < 0.1 and "ok 'depth'" in "\n".join(table)
    write_samples(models, tmp_path / "samples.jsonl")
    first = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    assert first["teacher"] == "right: depth\n" * (NUM_SEEDS - 1) + "right: depth"
    valid = [{"iteration": n, "split": "valid", **{key: 0.5 for key, _ in ROWS}} for n in (0, 2)]
    train = [{"iteration": n, **{key: 0.5 for key, _ in ROWS}} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (*train, *valid)))
    picture = draw_off_policy(tmp_path, {name: valid[0] for name in NAMES}, models)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_line_ends_where_it_ends():
    assert line_end(" value)\n    next") == " value)" and line_end("") == ""
