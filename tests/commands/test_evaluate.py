"""Run `mkd evaluate` on a folder or a checkpoint, without training and its data."""

from __future__ import annotations

import json

import pytest

from mkd.config.load import load_config
from mkd.evaluation.tasks import read_tasks
from mkd.kinds.stored.topk_setup import temperature_of
from tests.evaluation.eval_reference import reference_scores, write_tasks
from tests.run_facts import problems_of_one
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import run_main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    add_tokenizer(make_model(folder / "student", "qwen3", seed=1, num_hidden_layers=4))
    write_tasks(folder)
    return folder


def evaluate(ranks, files, *more, world_size=1):
    argv = ["--seq-length", 128, "--multiple-choice", files / "animals.jsonl", *more]
    return run_main(ranks, [str(word) for word in argv], world_size, command="mkd.commands.evaluate")


def test_a_folder_and_its_checkpoint_give_the_numbers_of_transformers(files, ranks):
    completions = ("--completions", files / "foxes.jsonl", "--num-fewshot", 1)
    results = evaluate(
        ranks, files, *completions, "--student-hf", files / "student", "--out", files / "hf.json"
    )
    assert results[0].exit_code == 0, results[0].stderr
    assert "foxes: 5 continuations, 1 prompt cut to 128 tokens" in results[0].stdout
    found = json.loads((files / "hf.json").read_text())
    printed = dict(line.split() for line in results[0].stdout.splitlines() if line.startswith("eval/"))
    assert printed == {key: f"{value:.6g}" for key, value in found.items()}

    tasks = read_tasks([files / "animals.jsonl"], [files / "foxes.jsonl"], 1)
    scores = reference_scores(files / "student", tasks, 128)
    nats = -sum(scores[-5:])
    assert found["eval/foxes/ce"] * found["eval/foxes/num_tokens"] == pytest.approx(nats, rel=1e-5)

    ranks.run(save_checkpoint, 1, files / "student", files / "checkpoint")
    layout = ("--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2)
    loaded = ("--student-load", files / "checkpoint", "--out", files / "loaded.json")
    results = evaluate(ranks, files, *completions, *loaded, *layout, world_size=2)
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    assert results[1].stdout == ""
    assert json.loads((files / "loaded.json").read_text()) == pytest.approx(found, rel=1e-5)


def save_checkpoint(hf, save) -> None:
    """Save a checkpoint, then join a process group again.

    The conversion leaves its own group, and the pool expects one to leave.
    """
    import torch.distributed as dist

    from mkd.convert import hf_to_mcore

    sizes = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    hf_to_mcore.run(hf=str(hf), save=save, dtype=None, **sizes)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_one_style_alone(files, ranks):
    results = evaluate(
        ranks, files, "--student-hf", files / "student", "--styles", "letter", "--out", files / "one.json"
    )
    assert results[0].exit_code == 0, results[0].stderr
    assert list(json.loads((files / "one.json").read_text())) == [
        "eval/animals/accuracy",
        "eval/animals/num_questions",
    ]


def test_a_dry_run_ends_after_the_checks(files, ranks):
    out = files / "dry.json"
    (result,) = evaluate(ranks, files, "--student-hf", files / "student", "--dry-run", "--out", out)
    assert result.exit_code == 0 and "with --dry-run nothing is scored" in result.stdout, result.stderr
    assert not out.exists()


def test_what_is_wrong_is_said_once(files, ranks):
    bad = files / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    results = evaluate(ranks, files, "--completions", bad, "--student-hf", files / "student", world_size=2)
    assert [result.exit_code for result in results] == [65, 65]
    assert f"{bad}, line 2: no known keys" in results[0].stderr and results[1].stderr == ""
    (result,) = evaluate(ranks, files, "--student-hf", files / "nowhere")
    assert result.exit_code != 0 and "nowhere" in result.stderr
    (result,) = evaluate(ranks, files)
    assert result.exit_code == 64 and "no student is given" in result.stderr


def test_the_saved_configuration_of_a_run_can_be_evaluated_and_exported_from(tmp_path):
    """Settings of training, profiles and checkpoints do not matter to an evaluation."""
    argv = [
        "--student-hf",
        "s",
        "--data-path",
        "d",
        "--train-iters",
        "50",
        "--lr-warmup-iters",
        "5",
        "--async-save",
    ]
    argv += [
        "--save",
        "c",
        "--load",
        "c",
        "--accept-change",
        "data",
        "--keep-checkpoints",
        "2",
        "--ckpt-step",
        "3",
    ]
    argv += [
        "--profile",
        "--wandb-project",
        "p",
        "--kd-temperature",
        "3",
        "--config",
        str(tmp_path / "teachers.yaml"),
    ]
    teachers = "[{hf: a, temperature: 2}, {hf: b}]"
    (tmp_path / "teachers.yaml").write_text(f"teachers: {teachers}\nkd: {{teacher_combination: average}}\n")
    config = load_config(argv).config
    assert problems_of_one(config, 1, None) == [] and problems_of_one(config, 1, None, teacher=0) == []
    assert temperature_of(config) == 2
