"""Check contexts on the own text of a student with experts: loss, gradients, layouts, and its average."""

from __future__ import annotations

import shutil

import pytest

from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import read_metrics, run_main
from tests.train.context_rollout_run import (
    Term,
    argv,
    knowing,
    make_rollout_files,
    reference,
    taught_of,
    write_teachers,
)
from tests.train.invariance import worst_relative_error
from tests.train.rollout_run import EOS, Case, one_step, require_equal_steps

SLOW = pytest.mark.slow
EP2, TP2 = ("--expert-model-parallel-size", 2), ("--tensor-model-parallel-size", 2, "--sequence-parallel")
CASES = (
    pytest.param(Case("EP2", 2, (*EP2, "--use-distributed-optimizer")), id="EP2"),
    pytest.param(Case("CP2 EP2", 2, ("--context-parallel-size", 2, *EP2)), id="CP2 EP2"),
    pytest.param(Case("TP2 EP2", 2, (*TP2, *EP2)), id="TP2 EP2"),
    pytest.param(Case("TP2 CP2", 4, (*TP2, "--context-parallel-size", 2)), id="TP2 CP2"),
)
TEACHERS = {"frozen": "teacher", "initial": "student"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder whose student has experts."""
    folder = make_rollout_files(tmp_path_factory.mktemp("context_experts"))
    kept = [folder / "student" / name for name in ("chat_template.jinja", "generation_config.json")]
    texts = {one.name: one.read_text() for one in kept}
    shutil.rmtree(folder / "student")
    add_tokenizer(make_model(folder / "student", "qwen3_moe", seed=3, num_hidden_layers=2, **EOS))
    for name, text in texts.items():
        (folder / "student" / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def configs(files):
    models = {"frozen": {"hf": str(files / "teacher")}, "initial": {"hf": "student-initial"}}
    models["ema"] = {"weights": "ema", "ema": {"rate": 1}}
    return {kind: write_teachers(files / f"{kind}.yaml", knowing(one)) for kind, one in models.items()}


@pytest.fixture(scope="module", params=["frozen", pytest.param("initial", marks=SLOW)])
def single(request, files, configs, ranks):
    kind = request.param
    (found,) = ranks.run(one_step, 1, argv(files, f"single {kind}", configs[kind]), files / f"one {kind}")
    return kind, found


def test_loss_and_every_gradient_equal_transformers(single, files):
    kind, found = single
    completions = taught_of(found["rollouts"], files)
    assert any(one.theirs is None for one in completions)
    loss = reference(files / "student", [Term(files / TEACHERS[kind], completions)], files / f"dense {kind}")
    assert found["sums"]["kd"] / found["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / f"one {kind}", files / f"dense {kind}")
    assert error <= 1e-5, where


@SLOW
@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_one_process(case, single, configs, files, ranks):
    kind, found = single
    words = argv(files, "layout", configs[kind], *case.flags)
    results = ranks.run(one_step, case.ranks, words, files / "layout gradients")
    require_equal_steps(results, found, files, gradients=f"one {kind}")


@SLOW
def test_its_average_judges_completions_and_resumes_bitwise(configs, files, ranks):
    def run(folder, *more):
        flags = (*EP2, "--use-distributed-optimizer", "--save", files / folder, "--log-interval", 1, *more)
        results = run_main(ranks, argv(files, folder, configs["ema"], *flags), 2)
        assert results[0].exit_code == 0, results[0].stderr
        names = ("loss", "kd_loss", "num_aligned/knows", "rollout/coverage", "grad_norm")
        return [[line[name] for name in names] for line in read_metrics(files / folder)]

    straight = run("straight")
    run("halves", "--exit-interval", 2)
    assert run("halves", "--load", files / "halves") == straight
    assert len(straight) == 4 and all(kd > 1e-5 for _, kd, *_ in straight)
