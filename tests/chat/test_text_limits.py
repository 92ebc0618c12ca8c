"""Refusals of `mkd chat` and `mkd sample`, before torch is imported where that is possible."""

from __future__ import annotations

import json

import pytest

from tests.chat.small_pair import make_chat_model, run_command, run_directly
from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    make_chat_model(folder / "model", max_position_embeddings=32)
    add_tokenizer(make_model(folder / "base", "llama"))
    for name in ("planned", "adapter", "empty", "no-weights", "run"):
        (folder / name).mkdir()
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "planned" / "config.json").write_text(json.dumps({**config, "mkd_planned": True}))
    (folder / "no-weights" / "config.json").write_text(json.dumps(config))
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "run" / "config.yaml").write_text('checkpoint:\n  save: "runs/none"  # --save\n')
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    return folder


@pytest.mark.parametrize(
    "command, argv, code",
    [
        ("sample", "nowhere --prompt x", "hf-model-not-found: STUDENT"),
        ("sample", "empty --prompt x", "checkpoint-missing: holds no model"),
        ("chat", "run", "checkpoint-missing: the run saves to runs/none"),
        ("chat", "planned", "hf-weights-missing: only planned"),
        ("chat", "model --teacher adapter", "checkpoint-missing"),
        ("sample", "model", "add-flag: no prompt"),
        ("sample", "model --prompt x --temperature -1", "out-of-range: --temperature"),
        ("sample", "model --prompt x --top-p 0", "out-of-range: --top-p"),
        ("chat", "model --seed -1", "out-of-range: --seed"),
        ("sample", "model --prompt x --temperature 0 --samples-per-prompt 2", "exclude-each-other"),
        ("sample", "model --prompts nothing.jsonl", "data-path-not-found"),
    ],
)
def test_refused_early(command, argv, code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exit_code, stderr = run_directly(command, argv.split())
    assert exit_code in (64, 65, 66)
    assert reported_codes(stderr) == [code], stderr


LATE = (
    ("sample", "no-weights --prompt x", "hf-weights-missing"),
    ("chat", "base", "chat-template-missing"),
    ("sample", "base --prompt x --chat", "chat-template-missing"),
    ("sample", "model --prompt x --system y", "remove-flag: --system"),
    ("sample", "model --prompts prompts.jsonl", "record-field-not-text: prompts.jsonl:2"),
    ("sample", "model --prompt one_two_three_four_five_six_seven_eight_nine_ten", "longer-than-seq-length"),
)


def late_errors(folder) -> list[tuple[int, str, str]]:
    with pytest.MonkeyPatch.context() as patch:  # the ranks serve other tests, too
        patch.chdir(folder)
        return [run_command(command, argv.split()) for command, argv, _ in LATE]


def test_refused_by_the_models(folder, ranks):
    (results,) = ranks.run(late_errors, 1, folder)
    for (*_, expected), (code, _, stderr) in zip(LATE, results, strict=True):
        assert code in (64, 65, 66) and reported_codes(stderr) == [expected], stderr
