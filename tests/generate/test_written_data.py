"""Data that a teacher writes: the road to a trained student, layouts, kills and rewards."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from tests.chat.small_pair import NEW_TOKENS, TEXT, make_chat_model
from tests.chat.small_pair import generated as completed_by_transformers
from tests.generate.written_data import (
    RECORDS,
    arguments,
    generated,
    make_teacher,
    records_in,
    torn,
    without_logp,
    write_ascii,
)
from tests.reported import reported_codes
from tests.train.command import call_main, read_metrics

ENDS = ["<|endoftext|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("written"))


def written_and_trained(folder, *more):
    """Run the two commands of docs/generate.md on this rank."""
    argv = arguments(folder, "greedy.jsonl", "--temperature", 0, "--max-new-tokens", NEW_TOKENS)
    written = call_main(list(map(str, argv)), "mkd.commands.generate")
    train = ["--student-hf", folder / "student", "--data-path", folder / "greedy.jsonl", "--kd-ratio", 0]
    train += ["--seq-length", 128, "--global-batch-size", 4, "--train-iters", 2, "--lr", 1e-3]
    train += ["--log-interval", 1, "--pack", "none", "--log-dir", folder / "log", "--no-save", *more]
    return written, call_main(list(map(str, train)))


def test_two_commands_from_a_teacher_to_a_student(folder, ranks):
    """The teacher's greedy text is that of transformers, and all of it, and nothing else, has loss."""
    ((written, trained),) = ranks.run(written_and_trained, 1, folder)
    assert written[0] == 0, written
    records = records_in((folder / "greedy.jsonl").read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    prompts = [tokenizer(TEXT)["input_ids"], tokenizer("Hello")["input_ids"]]
    for one in RECORDS[1:3]:
        asked = one["messages"][:-1] if len(one["messages"]) > 1 else one["messages"]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompts.insert(-1, tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = completed_by_transformers(folder / "teacher", prompts, ENDS)
    texts = [one.get("completion") or one["messages"][-1]["content"] for one in records]
    assert texts == [tokenizer.decode(one, skip_special_tokens=False) for one in ids]
    assert [one["generated"]["tokens"] for one in records] == [NEW_TOKENS] * 4
    assert trained[0] == 0, trained[2]
    assert "ignored keys: answer (4), tag (1)" in trained[1]
    learnt = [len(tokenizer(one, add_special_tokens=False)["input_ids"]) + 1 for one in texts]
    assert [one["num_loss_tokens"] for one in read_metrics(folder / "log")] == [sum(learnt)] * 2


def on_one_rank(folder, samples):
    """Return outputs of one process: at once, after three kills, of other samples, and again."""
    whole = generated(folder, "whole.jsonl", *samples)
    killed = [torn(folder, "killed.jsonl", lines, *samples, "--slots", 2) for lines in (4, 0, 3)]
    killed.append(generated(folder, "killed.jsonl", *samples, "--slots", 5))
    again = generated(folder, "killed.jsonl", *samples)
    refused = generated(folder, "killed.jsonl", *samples, "--seed", 1)
    other = generated(folder, "killed.jsonl", *samples, "--seed", 1, "--overwrite")
    return whole, killed, again, refused, other


def test_a_seed_gives_the_same_file_after_kills_and_on_every_layout(folder, ranks):
    samples = ("--samples-per-prompt", 3)
    ((whole, killed, again, refused, other),) = ranks.run(on_one_rank, 1, folder, samples)
    kept = len(records_in(whole[3]))
    assert whole[0] == 0 and 6 < kept <= 12, whole
    assert f"kept {kept} completions of 12, of 4 prompts" in whole[1] and "tokens/s" in whole[1]
    assert [code for code, *_ in killed] == [130, 130, 130, 0]
    assert "7 completions of an earlier start are kept" in killed[3][1]
    assert [data for *_, data in killed[:3]] == [b""] * 3
    assert without_logp(killed[3][3]) == without_logp(whole[3])
    assert again[0] == 0 and "is complete already" in again[1] and again[3] == killed[3][3]
    assert reported_codes(refused[2]) == ["already-exists: seed is 0, not 1"], refused[2]
    assert other[0] == 0 and other[3] != whole[3]
    for layout in ((), ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)):
        out = f"layout{''.join(map(str, layout))}.jsonl"
        results = ranks.run(generated, 2, folder, out, *samples, "--slots", 2, *layout)
        assert [code for code, *_ in results] == [0, 0], results
        assert without_logp(results[0][3]) == without_logp(whole[3]), layout


def test_a_teacher_with_experts_writes_the_same_over_tensor_parallelism(folder, ranks):
    """Its experts need sequence parallelism, for which the command has no flag."""
    write_ascii(make_chat_model(folder / "experts", "qwen3_moe", seed=1))
    teacher = ("--teacher", folder / "experts")
    (whole,) = ranks.run(generated, 1, folder, "experts_on_one.jsonl", *teacher)
    results = ranks.run(
        generated, 2, folder, "experts_on_two.jsonl", *teacher, "--tensor-model-parallel-size", 2
    )
    assert [whole[0], *(code for code, *_ in results)] == [0, 0, 0], results
    assert records_in(whole[3]) and without_logp(results[0][3]) == without_logp(whole[3])


def judged(folder, samples):
    """Return outputs with rewards: recorded, with a threshold, the best ones, and with failures."""
    reward = (*samples, "--reward", "tests.kinds.sampled.reward_functions:of_length")
    failing = (*samples, "--reward", "tests.kinds.sampled.reward_functions:raises_sometimes")
    return (
        generated(folder, "judged.jsonl", *reward),
        generated(folder, "low.jsonl", *reward, "--min-reward", 3),
        generated(folder, "best.jsonl", *reward, "--min-reward", 2, "--keep-best", 1),
        generated(folder, "failing.jsonl", *failing),
        generated(folder, "failing.jsonl", *failing, "--max-failed-rewards", 99),
    )


def test_rewards_choose_completions(folder, ranks):
    from tests.kinds.sampled.reward_functions import of_length

    samples = ("--samples-per-prompt", 4)
    ((plain, low, best, failing, lenient),) = ranks.run(judged, 1, folder, samples)
    assert [one[0] for one in (plain, low, best, failing, lenient)] == [0, 0, 0, 65, 0], failing
    records = records_in(plain[3])
    assert 8 < len(records) <= 16 and "mean reward" in plain[1]
    for one in records:
        text = one.get("completion") or one["messages"][-1]["content"]
        prompt = TEXT if one.get("prompt") == TEXT else ""
        assert one["generated"]["reward"] == of_length(prompt, text, one)
    assert records_in(low[3]) == [one for one in records if one["generated"]["reward"] >= 3]
    chosen = []
    for number in range(4):
        group = [
            one["generated"] | {"record": one} for one in records if one["generated"]["prompt"] == number
        ]
        ranked = sorted((one for one in group if one["reward"] >= 2), key=lambda one: -one["reward"])
        chosen += [one["record"] for one in ranked[:1]]
    assert records_in(best[3]) == chosen and 0 < len(chosen) <= 4
    assert "are not among the best 1 of their prompt" in best[1]
    assert reported_codes(failing[2]) == ["reward-failed: prompts.jsonl"], failing[2]
    kept = [one for one in records if len(one.get("completion") or one["messages"][-1]["content"]) % 4]
    assert len(records_in(lenient[3])) == len(kept) < len(records) and "have no reward" in lenient[1]
