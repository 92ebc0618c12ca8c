"""Refusals of `mkd generate`, before torch is imported where that is possible."""

from __future__ import annotations

import json

import pytest
from megatron.core import parallel_state

from tests.chat.small_pair import make_chat_model, run_command, run_directly
from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate-limits")
    make_chat_model(folder / "model", max_position_embeddings=64)
    add_tokenizer(make_model(folder / "base", "llama"))
    make_chat_model(folder / "latent", "moonlight")
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    (folder / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "one_two_three_four " * 20}) + "\n")
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "x"}]
    (folder / "images.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n"
    )
    (folder / "taken.jsonl").write_text("mine\n")
    (folder / "text").mkdir()
    return folder


GOOD = "--teacher model --prompts prompts.jsonl --out out.jsonl"
REWARD = "--reward tests.kinds.sampled.reward_functions:of_length --samples-per-prompt 2"


@pytest.mark.parametrize(
    "argv, codes",
    [
        ("--teacher nowhere --prompts prompts.jsonl --out out.jsonl", ["hf-model-not-found: --teacher"]),
        ("--teacher model --prompts none.jsonl --out out.jsonl", ["data-path-not-found: --prompts"]),
        ("--teacher model --prompts prompts.jsonl --out out.json", ["value-not-valid: --out"]),
        ("--teacher model --prompts prompts.jsonl --out none/out.jsonl", ["not-writable: --out"]),
        ("--prompts prompts.jsonl --out out.jsonl", ["command-line-not-valid: --teacher"]),
        (f"{GOOD} --temperature -1", ["out-of-range: --temperature"]),
        (f"{GOOD} --temperature 0 --samples-per-prompt 2", ["exclude-each-other"]),
        (f"{GOOD} --min-reward 1", ["remove-flag: --min-reward"]),
        (f"{GOOD} --keep-best 1 --samples-per-prompt 2", ["remove-flag: --keep-best"]),
        (f"{GOOD} --max-failed-rewards 1", ["remove-flag: --max-failed-rewards"]),
        (f"{GOOD} {REWARD} --keep-best 2", ["numbers-contradict: --keep-best"]),
        (f"{GOOD} {REWARD} --min-reward nan", ["out-of-range: --min-reward"]),
        (f"{GOOD} --reward exact", ["value-not-valid: --reward"]),
        (f"{GOOD} --tensor-model-parallel-size 2", ["world-not-divisible"]),
        ("--teacher model --prompts prompts.jsonl --out taken.jsonl", ["already-exists: --out"]),
        (f"{GOOD} --seed -1 --top-p 0", ["out-of-range: --top-p", "out-of-range: --seed"]),
    ],
)
def test_refused_early(argv, codes, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exit_code, stderr = run_directly("generate", argv.split())
    assert exit_code in (64, 65, 66)
    assert reported_codes(stderr) == codes, stderr
    assert not (folder / "out.jsonl.generated").exists()


LATE = (
    (
        "--teacher model --prompts images.jsonl --out out.jsonl",
        "images-not-read: the prompt has 1 image, and",
    ),
    ("--teacher model --prompts prompts.jsonl --out out.jsonl", "record-field-not-text: prompts.jsonl:2"),
    ("--teacher base --prompts chat.jsonl --out out.jsonl", "chat-template-missing"),
    ("--teacher model --prompts long.jsonl --out out.jsonl", "longer-than-seq-length: long.jsonl:1"),
    (f"{GOOD} --system y --max-bad-records 1", "remove-flag: --system"),
    (f"{GOOD} --reward nothing:here --max-bad-records 1", "reward-not-found"),
    (
        "--teacher latent --prompts chat.jsonl --out out.jsonl",
        "model-feature-not-supported: latent attention",
    ),
)


def late_results(folder) -> list[tuple[int, str, str]]:
    with pytest.MonkeyPatch.context() as patch:  # the ranks serve other tests, too
        patch.chdir(folder)
        found = []
        for argv in (*(argv for argv, _ in LATE), f"{GOOD} --max-bad-records 1 --dry-run"):
            found.append(run_command("generate", argv.split()))
            parallel_state.destroy_model_parallel()  # which a process that fails leaves as they are
        return found


def test_refused_by_models_and_records(folder, ranks):
    ((*results, dry),) = ranks.run(late_results, 1, folder)
    for (*_, expected), (code, _, stderr) in zip(LATE, results, strict=True):
        assert code in (64, 65, 66) and reported_codes(stderr) == [expected], stderr
    assert dry[0] == 0 and "1 prompt of" in dry[1] and "the first prompt" in dry[1], dry
    assert "prompts.jsonl:2" in dry[1]
    assert not (folder / "out.jsonl").exists() and (folder / "taken.jsonl").read_text() == "mine\n"
