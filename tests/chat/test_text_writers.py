"""Texts outside a run: against transformers' `generate`, on two ranks, from every kind of folder."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.chat.small_pair import (
    NEW_TOKENS,
    TEXT,
    generated,
    greedy_ids,
    make_chat_model,
    run_command,
    sampled,
)

FAMILIES = ("llama3.2", "gemma4", "qwen3_5", "nemotron_h")  # the last two have recurrent states
ENDS = ["<|endoftext|>", "<|im_end|>"]


def prompts_of(folder) -> list[list[int]]:
    """Return the ids of TEXT, and of a conversation with it, as transformers makes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [tokenizer(TEXT)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_greedy_texts_are_those_of_transformers(tmp_path, ranks):
    folders = [make_chat_model(tmp_path / family, family) for family in FAMILIES]
    (found,) = ranks.run(greedy_ids, 1, folders, TEXT)
    expected = [ids for folder in folders for ids in generated(folder, prompts_of(folder), ENDS)]
    assert found == expected
    assert max(map(len, found)) == NEW_TOKENS


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    make_chat_model(folder / "student", num_hidden_layers=2)
    make_chat_model(folder / "teacher", "qwen3", seed=1)
    return folder


def test_samples_of_student_and_teacher_on_one_and_two_ranks(pair, ranks):
    """Samples differ, a seed and a file of records give the same ones, and so do two ranks."""
    records = [{"prompt": TEXT, "answer": "jumps"}, {"messages": [{"role": "user", "content": "Questions"}]}]
    (pair / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    argv = [pair / "student", "--teacher", pair / "teacher", "--prompts", pair / "prompts.jsonl"]
    argv += ["--samples-per-prompt", "3", "--top-p", "0.8", "--max-new-tokens", "9", "--slots", "2"]
    (found,) = ranks.run(sampled, 1, argv, pair / "one.jsonl")
    assert [one["sample"] for one in found] == [0, 1, 2] * 2
    assert [one.get("prompt") for one in found] == [TEXT] * 3 + [None] * 3
    assert found[0]["answer"] == "jumps" and found[3]["messages"][0]["content"] == "Questions"
    for role in ("student", "teacher"):
        assert len({one[role] for one in found}) == 6
        ends = [(one[f"{role}_end"], one[f"{role}_tokens"]) for one in found]
        assert all(count == 9 if end == "length" else end == "stop" and count <= 9 for end, count in ends)
    several = ranks.run(sampled, 2, argv, pair / "two.jsonl")[0]
    for one, other in zip(found, several, strict=True):
        assert {key: value for key, value in one.items() if not key.endswith("_logp")} == {
            key: value for key, value in other.items() if not key.endswith("_logp")
        }
        assert one["student_logp"] == pytest.approx(other["student_logp"], abs=1e-3)
    (again,) = ranks.run(sampled, 1, [*argv, "--seed", "1"], pair / "again.jsonl")
    assert [one["student"] for one in again] != [one["student"] for one in found]


def converted_and_sampled(pair, argv):
    """Save the student as a Megatron checkpoint, and sample from the folders that lead to it."""
    code, _, stderr = run_command("convert", ["--hf", pair / "student", "--save", pair / "checkpoints"])
    assert code == 0, stderr
    log = pair / "log"
    log.mkdir()
    saved = json.dumps(str(pair / "checkpoints"))
    (log / "config.yaml").write_text(f"checkpoint:\n  save: {saved}  # --save\n")
    places = [pair / "student", pair / "checkpoints", pair / "checkpoints" / "iter_0000000", log]
    return [run_command("sample", [place, *argv]) for place in places]


def test_checkpoints_and_runs_write_as_their_export(pair, ranks):
    argv = ["--prompt", TEXT, "--temperature", "0", "--max-new-tokens", "8"]
    (results,) = ranks.run(converted_and_sampled, 1, pair, argv)
    assert [code for code, *_ in results] == [0] * 4, results
    texts = {stdout for _, stdout, _ in results}
    assert len(texts) == 1 and texts.pop().startswith("student> ")
    assert all(f"{pair / 'checkpoints' / 'iter_0000000'}, iteration 0" in err for _, _, err in results[1:])
