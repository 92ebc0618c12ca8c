"""Exports stop where the training texts end, and have the tokenizer that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mkd.checkpoint.folders import HF_FOLDER
from mkd.checkpoint.hf.hf_changes import StopIds
from mkd.commands.preprocess import main as preprocess
from mkd.config.load import load_config
from mkd.convert.mcore_to_hf import assets_of
from mkd.run.plan_run import plan_run
from mkd.run.plan_text import plan_text
from mkd.tokenizers.tokenizer_files import warn_of_export
from tests.tiny_models import make_model
from tests.tokenizers.test_tokenizer_files import with_digits, write
from tests.tokenizers.trained import SENTENCES
from tests.train.command import flags, run_main, write_records

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a base model that stops at 0, a teacher's tokenizer that stops at 2, and both kinds of records.

    The base model's own tokenizer has EOS 0 and the same ChatML template, like Qwen2.5's base models.
    """
    folder = tmp_path_factory.mktemp("ends")
    sizes = {"vocab_size": 320, "eos_token_id": 0, "num_hidden_layers": 1}
    make_model(folder / "base", "llama", **sizes)
    write(folder / "base", with_digits(), None, "PreTrainedTokenizerFast", eos_token="<|endoftext|>")
    write(folder / "chat", with_digits(), "llama", "PreTrainedTokenizerFast")
    write_records(folder / "chat.jsonl", *[CHAT] * 20)
    write_records(folder / "text.jsonl", *[{"text": "2024 " * 20}] * 20)
    for name in ("chat", "text"):
        argv = ["--input", folder / f"{name}.jsonl", "--output-prefix", folder / f"{name}-ids"]
        argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder / "base"]
        assert preprocess([str(word) for word in argv]) == 0
    return folder


def plan_of(files, *more, student="base", **paths):
    argv = flags(files, "run", "--kd-ratio", 0, *more, student_hf=student, teacher_hf=None, **paths)
    return plan_run(load_config(argv).config, 1)


def written(plan, out: Path) -> list:
    """Return the stop ids of the folder that `plan` exports."""
    plan.assets.copy_to(out)
    return [
        json.loads((out / name).read_text())["eos_token_id"]
        for name in ("generation_config.json", "config.json")
    ]


@pytest.mark.parametrize(
    ("data", "tokenizer", "stops", "note"),
    [
        ("chat.jsonl", "chat", [2, 0], True),
        ("chat.jsonl", None, [2, 0], True),
        ("chat-ids", None, [2, 0], True),
        ("text.jsonl", "chat", [2, 0], True),  # its EOS ends the texts
        ("text.jsonl", None, 0, False),
        ("text-ids", None, 0, False),
    ],
)
def test_stop_ids_of_exports(data, tokenizer, stops, note, files, tmp_path):
    more = ("--tokenizer-model", files / tokenizer) if tokenizer else ()
    plan = plan_of(files, "--export-hf", tmp_path / "hf", *more, data_path=data)
    assert written(plan, tmp_path / "out") == [stops, stops]
    found = [line for line in plan_text(plan).splitlines() if "Exports list" in line]
    assert len(found) == note
    if note:
        assert "id 2 '<|im_end|>'" in found[0] and "[2, 0]" in found[0]


def test_exports_of_checkpoints_agree(files, tmp_path):
    """`mkd export` with the student's folder as reference takes tokenizer and stop ids of the checkpoint."""
    plan = plan_of(files, "--tokenizer-model", files / "chat", data_path="chat.jsonl")
    own = written(plan, tmp_path / "iter_0000001" / HF_FOLDER)
    for reference in (tmp_path / "iter_0000001" / HF_FOLDER, files / "base"):
        out = tmp_path / reference.name
        assets_of(tmp_path / "iter_0000001", reference).copy_to(out)
        stops = [json.loads((out / name).read_text())["eos_token_id"] for name in ("config.json",)]
        assert stops == own[1:] == [[2, 0]]
        assert AutoTokenizer.from_pretrained(out).eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": [2, 0]}),
        ({"eos_token_id": [0, 5]}, {"eos_token_id": [2, 0, 5]}),
        ({"eos_token_id": [0, 2]}, {"eos_token_id": [0, 2]}),
        ({"eos_token_id": None, "x": 1}, {"eos_token_id": 2, "x": 1}),
        (
            {"eos_token_id": 2, "text_config": {"eos_token_id": 0}, "vision_config": {"depth": 1}},
            {"eos_token_id": 2, "text_config": {"eos_token_id": [2, 0]}, "vision_config": {"depth": 1}},
        ),
    ],
)
def test_ids_are_added_and_none_is_lost(before, after):
    assert StopIds((2,)).added_to(before) == after


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_export_is_read_as_it_was_trained(family, files, tmp_path, caplog):
    """transformers would split digits that tokenizer.json merges; the export names another class.

    For qwen2 that is not enough: a warning says how to read it.
    """
    make_model(tmp_path / "model", family, vocab_size=320, eos_token_id=0, num_hidden_layers=1)
    write(tmp_path / "model", with_digits(), None, "Qwen2Tokenizer", eos_token="<|endoftext|>")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")("x 2024").input_ids) == 6
    plan = plan_of(files, student=tmp_path / "model", data_path="text.jsonl")
    plan.assets.copy_to(tmp_path / "out")
    warn_of_export(str(tmp_path / "out"))
    warnings = [one for one in caplog.messages if f"does not read {tmp_path / 'out'}/tokenizer.json" in one]
    assert len(warnings) == (family == "qwen2")
    if warnings:
        assert "PreTrainedTokenizerFast.from_pretrained" in warnings[0]
        (tmp_path / "out" / "config.json").unlink()  # as the warning says
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("x 2024", *SENTENCES[:4], "2024 20 24 caf\u00e9<|im_end|>"):
        assert (
            exported(text).input_ids
            == PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")(text).input_ids
        )
    assert exported("x 2024").input_ids == plan.tokenizers.student.encode("x 2024")
    assert exported.eos_token == "<|endoftext|>" and exported.chat_template


def test_a_run_warns_after_such_an_export(files, tmp_path, ranks):
    make_model(tmp_path / "model", "qwen2", vocab_size=320, eos_token_id=0, num_hidden_layers=1)
    write(tmp_path / "model", with_digits(), None, "Qwen2Tokenizer", eos_token="<|endoftext|>")
    paths = dict(student_hf=tmp_path / "model", teacher_hf=None, data_path="text.jsonl")
    argv = flags(
        files, "warned", "--kd-ratio", 0, "--export-hf", tmp_path / "out", "--exit-interval", 1, **paths
    )
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0
    shown = result.stdout + result.stderr
    assert shown.count(f"does not read {tmp_path / 'out'}/tokenizer.json as it is") == 1


def test_a_tokenizer_of_another_folder_is_read_as_it_was_trained(files, tmp_path):
    """transformers reads this file as it is beside Mistral's config.json, and not beside Llama's."""
    chat = write(tmp_path / "mistral", with_digits(), "mistral", "Qwen2Tokenizer")
    plan = plan_of(files, "--tokenizer-model", chat, data_path="text.jsonl")
    assert not plan.tokenizers.student.is_rebuilt
    plan.assets.copy_to(tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("x 2024").input_ids == plan.tokenizers.student.encode("x 2024")


def test_ends_without_loss_are_taken_back(files, ranks, tmp_path):
    """A template may mark the words alone; the plan assumes that the end of the turn has loss."""
    model = shutil.copytree(files / "base", tmp_path / "model")
    marked = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "{{ '<|im_end|>' }}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(marked)
    path = write_records(tmp_path / "chat.jsonl", *[CHAT] * 20)
    argv = flags(files, "taken back", "--kd-ratio", 0, student_hf=model, teacher_hf=None, data_path=path)
    argv = [*argv, "--data-cache-path", str(tmp_path / "cache"), "--export-hf", str(tmp_path / "hf")]
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    said = result.stdout + result.stderr
    assert "Exports list [2, 0]" in said and "no token that ends a text has loss" in said
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_conversations_after_the_first_records_end_exports_too(files, ranks, tmp_path):
    """The plan knows the first records of a file, the export all of them."""
    path = write_records(tmp_path / "mixed.jsonl", *[{"text": "2024 " * 20}] * 120, CHAT)
    argv = flags(files, "mixed", "--kd-ratio", 0, student_hf="base", teacher_hf=None, data_path=path)
    argv = [word for word in argv if word != "--no-save"] + ["--save", str(tmp_path / "save")]
    argv = [*argv, "--data-cache-path", str(tmp_path / "cache"), "--export-hf", str(tmp_path / "hf")]
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    assert "the training texts end with id 2 '<|im_end|>'" in result.stdout + result.stderr
    for folder in (tmp_path / "hf", tmp_path / "save" / "iter_0000002" / HF_FOLDER):
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_answers_of_preference_pairs_end_exports(files, ranks, tmp_path):
    """Both answers of a pair end with the closing token, at every stage of a pipeline."""
    student = make_model(tmp_path / "student", "llama", vocab_size=320, eos_token_id=0, num_hidden_layers=2)
    write(student, with_digits(), None, "PreTrainedTokenizerFast", eos_token="<|endoftext|>")
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    pair = {"prompt": CHAT["messages"][:1], **answers}
    path = write_records(tmp_path / "pairs.jsonl", *[pair] * 12)
    more = ("--dpo-beta", 0.3, "--kd-ratio", 0, "--pipeline-model-parallel-size", 2)
    more += ("--export-hf", tmp_path / "hf", "--seq-length", 128)
    paths = dict(student_hf=student, teacher_hf=None, data_path=path, data_cache_path=tmp_path / "cache")
    results = run_main(ranks, flags(files, "pairs", *more, **paths), 2)
    assert [one.exit_code for one in results] == [0, 0], results[0].stderr
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_own_text_alone_keeps_the_students_stop_tokens(files, tmp_path):
    """Its completions end where the student's own files say, so exports must not stop elsewhere."""
    prompts = ("--prompt-data-path", files / "chat.jsonl", "--max-new-tokens", 8, "--rollout-prompts", 2)
    own_text = ("--on-policy-fraction", 1, "--kd-ratio", 1, *prompts, "--split", "1")
    argv = flags(files, "own", *own_text, student_hf="base", teacher_hf="base", data_path=None)
    plan = plan_run(load_config(argv).config, 1)
    assert plan.trained_ends == () and written(plan, tmp_path / "out") == [0, 0]
