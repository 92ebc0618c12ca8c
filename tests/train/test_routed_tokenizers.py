"""Check tags with a teacher of another tokenizer: bits as if all ran, layouts, and the share of a tag."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import make_model
from tests.train.command import flags, read_metrics, run_main, write_records
from tests.train.cross_tokenizer_invariance import make_files
from tests.train.invariance import SP, worst_relative_error
from tests.train.rollout_run import EOS, argv
from tests.train.rollout_run import make_files as make_rollout_files
from tests.xtoken.small_tokenizers import train_byte_level

TP2 = ("--tensor-model-parallel-size", "2")
CASES = {
    "micro-batch 4": (1, ("--micro-batch-size", "4")),
    "TP2 + SP": (2, (*TP2, *SP)),
    "CP2": (2, ("--context-parallel-size", "2")),
    "PP2": (2, ("--pipeline-model-parallel-size", "2")),
    "DP2": (2, ()),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("routed-tokenizers"))
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    tagged = [{"text": text, "domain": ("web", "code")[i % 3 == 0]} for i, text in enumerate(texts)]
    write_records(folder / "tagged.jsonl", *tagged)
    for tag in ("web", "code"):
        write_records(folder / f"{tag}.jsonl", *(one for one in tagged if one["domain"] == tag))
    return folder


def command(files, run, *more, data="tagged.jsonl", **kd):
    """Return the command line of a run whose cross-tokenizer teacher teaches the web, the other one code."""
    teachers = json.loads((files / "partition_kl.yaml").read_text())["teachers"]
    for one, tag in zip(teachers, ("web", "code"), strict=True):
        one["tags"] = [tag]
    kd = {"teacher_combination": "route", "tag_key": "domain", **kd}
    path = files / f"{run.replace(' ', '-')}-routed.yaml"
    path.write_text(json.dumps({"teachers": teachers, "kd": kd}), encoding="utf-8")
    own = flags(
        files, run, "--config", path, "--no-shuffle", "--pack", "none", *more, teacher_hf=None, data_path=data
    )
    return [*own, "--global-batch-size", "8"]


def one_step(arguments: list[str], out_dir: Path, runs_all: bool = False) -> dict:
    """Run one step's forward and backward, export its gradients; return its sums and the trained loss."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run
    from mkd.train.step import training_objective
    from tests.train.invariance import export_student, gradients_as_parameters

    run = build_run(plan_run(load_config(arguments).config, torch.distributed.get_world_size()), detect())
    engine, batches = run.engine, run.data.train.next_step()
    needed = [batch.needed_teachers for batch in batches]
    following = run.data.train.following_step()
    if runs_all:
        batches, following = (
            [replace(one, needed_teachers=()) for one in of_step] for of_step in (batches, following)
        )
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches)
    sums = engine.schedule.run(engine.stages, batches, objective, False, following)
    with gradients_as_parameters(engine, engine.context):
        export_student(engine, run.state, Path(arguments[arguments.index("--student-hf") + 1]), out_dir)
    run.reporter.close()
    found = objective.sums(sums)
    return {"sums": found.token_sums(), "tags": found.per_tag(True), "needed": needed}


@pytest.fixture(scope="module")
def single(files, ranks):
    (found,) = ranks.run(one_step, 1, command(files, "single"), files / "gradients")
    return found


def test_the_share_of_a_tag_is_that_of_its_tokens(single, files, ranks):
    """With the numbers of its tokens as weights, each tag is a mean of its own, and the loss the same."""
    assert {True, False} == {is_needed for needed in single["needed"] for is_needed in needed}
    weights = {tag: single["tags"][f"tokens/{tag}"][0] for tag in ("web", "code")}
    (found,) = ranks.run(one_step, 1, command(files, "weighted", tag_weights=weights), files / "weighted")
    for name, value in single["sums"].items():
        assert found["sums"][name] == pytest.approx(value, rel=1e-6), name
    error, where = worst_relative_error(files / "weighted", files / "gradients")
    assert error <= 1e-5, where
    (every,) = ranks.run(one_step, 1, command(files, "every"), files / "every", True)
    ours, theirs = (load_file(files / one / "model.safetensors") for one in ("gradients", "every"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert every["sums"] == single["sums"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layouts_have_the_step_of_one_process(name, single, files, ranks):
    number, more = CASES[name]
    results = ranks.run(one_step, number, command(files, "layout", *more), files / "layout")
    for key, value in single["sums"].items():
        assert results[0]["sums"][key] == pytest.approx(value, rel=1e-5), key
    error, where = worst_relative_error(files / "layout", files / "gradients")
    assert error <= 1e-5, where


@pytest.mark.slow
def test_the_loss_of_a_tag_is_that_of_its_teacher_alone(files, ranks):
    evaluated = ("--eval-interval", 2, "--eval-iters", 100, "--pack", "none", "--valid-data-path")
    more = (*evaluated, files / "tagged.jsonl")
    (result,) = run_main(ranks, command(files, "both", *more))
    assert result.exit_code == 0, result.stderr
    routed = next(one for one in read_metrics(files / "both") if one.get("split") == "valid")
    teachers = json.loads((files / "partition_kl.yaml").read_text())["teachers"]
    for tag, teacher in zip(("web", "code"), teachers, strict=True):
        path = files / f"{tag}-alone.yaml"
        path.write_text(json.dumps({"teachers": [{**teacher, "weight": 1}]}), encoding="utf-8")
        more = ("--config", path, *evaluated, files / f"{tag}.jsonl")
        (result,) = run_main(ranks, flags(files, f"{tag} alone", *more, teacher_hf=None))
        assert result.exit_code == 0, result.stderr
        alone = next(one for one in read_metrics(files / f"{tag} alone") if one.get("split") == "valid")
        assert routed[f"kd_loss/{tag}"] == pytest.approx(alone["kd_loss"], rel=1e-4)
        assert routed[f"tokens/{tag}"] == alone["num_loss_tokens"]


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """Make prompts with two tags, a cross-tokenizer teacher and one with the student's tokens."""
    folder = make_rollout_files(tmp_path_factory.mktemp("routed-prompts"))
    sizes = dict(hidden_size=56, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    make_model(folder / "cross", "qwen2", seed=7, vocab_size=620, **sizes | EOS)
    train_byte_level(600).save_pretrained(folder / "cross")
    words = ("quick brown", "fox jumps over", "lazy", "the dog is not")
    prompts = ({"prompt": f"{i}: {words[i % 4]}", "domain": ("web", "code")[i % 2]} for i in range(10))
    write_records(folder / "tagged.jsonl", *prompts)
    return folder


@pytest.mark.slow
def test_completions_of_each_tag_are_read_by_its_teacher_alone(prompted, ranks):
    """Chunks of a tag count with the share of its sampled tokens."""
    teachers = [
        {"name": "cross", "hf": str(prompted / "cross"), "xtoken": {}, "tags": ["web"]},
        {"name": "same", "hf": str(prompted / "teacher"), "tags": ["code"]},
    ]
    path = prompted / "routed.yaml"
    kd = {"teacher_combination": "route", "tag_key": "domain"}
    path.write_text(json.dumps({"teachers": teachers, "kd": kd}), encoding="utf-8")
    words = argv(prompted, "run", "--config", path)
    for flag, value in (("--teacher-hf", None), ("--prompt-data-path", "tagged.jsonl")):
        place = words.index(flag)
        words[place : place + 2] = [] if value is None else [flag, str(prompted / value)]
    (result,) = run_main(ranks, words)
    assert result.exit_code == 0, result.stderr
    for record in read_metrics(prompted / "run"):
        tokens = {tag: record[f"tokens/{tag}"] for tag in ("web", "code")}
        assert min(tokens.values()) > 0
        parts = (tokens[tag] * record[f"kd_loss/{tag}"] for tag in tokens)
        assert record["kd_loss"] == pytest.approx(sum(parts) / sum(tokens.values()), rel=1e-6)
        nll = [record[f"rollout/teacher_nll/{tag}"] for tag in tokens]
        assert min(nll) <= record["rollout/teacher_nll"] <= max(nll)
