"""If a loss or gradient is NaN on one rank, no rank updates, and the error names models and samples."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fault_injection import fault as injected
from tests.reported import reported_codes, reported_text
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import (
    STUDENT,
    Result,
    call_main,
    flags,
    make_files,
    read_metrics,
    with_fault,
    write_records,
)

RARE = "@"  # occurs in one document, so in one pack
RARE_DOCUMENT = 40
STEPS = 12


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make models whose outputs are NaN wherever they read `RARE`, because its embedding is NaN."""
    folder = make_files(tmp_path_factory.mktemp("nonfinite"))
    add_tokenizer(make_model(folder / "untied", **{**STUDENT, "tie_word_embeddings": False}))
    texts = [
        f"{i}: " + "the quick brown fox " * (i % 7 + 1) + (RARE if i == RARE_DOCUMENT else "")
        for i in range(60)
    ]
    write_records(folder / "rare.jsonl", *({"text": text} for text in texts))
    for source, name in (("untied", "nan student"), ("teacher", "nan teacher")):
        poison_embedding(folder / source, shutil.copytree(folder / source, folder / name))
    return folder


def poison_embedding(source, folder):
    token = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"][RARE]
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][token] = math.nan
            save_file(tensors, path, metadata={"format": "pt"})


def rare_flags(files, run, *more, student="nan student", teacher="teacher"):
    paths = {
        "student_hf": student,
        "teacher_hf": teacher,
        "data_path": "rare.jsonl",
        "data_cache_path": "rare cache",
    }
    return flags(files, run, "--train-iters", STEPS, *more, **paths)


@contextmanager
def unchecked_weights():
    """Load weights that are not finite, as if they had broken after they were loaded."""
    from mkd.checkpoint.hf import hf_reader

    kept, hf_reader.is_finite = hf_reader.is_finite, lambda values: True
    try:
        yield
    finally:
        hf_reader.is_finite = kept


def call_unchecked(argv):
    with unchecked_weights():
        return call_main(argv)


def steps_of(argv, fault=None):
    """Return (hashes of the state around every step, rare samples, samples by step, last position)."""
    import torch.distributed as dist

    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.loop import one_step
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    with injected(fault), unchecked_weights():
        run = build_run(plan_run(load_config(argv).config, dist.get_world_size()), detect())
        batches, next_step = [], run.data.train.next_step

        def recorded():
            batches.append(next_step())
            return batches[-1]

        run.data.train.next_step = recorded
        token = json.loads((run.plan.assets.tokenizer / "tokenizer.json").read_text())["model"]["vocab"][RARE]
        hashes = [state_hash(run)]
        for _ in range(run.config.training.train_iters):
            one_step(run)
            hashes.append(state_hash(run))
        run.reporter.close()
        rare = {
            one
            for step in batches
            for batch in step
            if (batch.tokens == token).any()
            for one in batch.sample_ids
        }
        return (
            hashes,
            sorted(rare),
            [[one for batch in step for one in batch.sample_ids] for step in batches],
            run.position,
        )


def state_hash(run) -> str:
    digest = hashlib.sha256()
    with run.engine.parameters_gathered():
        for chunk in run.engine.stages:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().numpy().tobytes())
    for inner in run.engine.optimizer.optimizer.chained_optimizers:
        for moments in inner.optimizer.state.values():
            for name in sorted(moments):
                digest.update(torch.as_tensor(moments[name]).numpy().tobytes())
    digest.update(repr(run.engine.optimizer.scheduler.state_dict()).encode())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "more", [(), ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")]
)
@pytest.mark.fault(19)
def test_a_skipped_step_changes_nothing_and_names_its_sample(more, files, ranks):
    """One of two data-parallel ranks has the bad sample."""
    run = f"skip {len(more)}"
    argv = rare_flags(files, run, "--non-finite", "skip", *more)
    results = ranks.run(steps_of, 2, argv)
    rare = results[0][1] or results[1][1]
    assert len(rare) == 1
    bad = [step for step in range(STEPS) if any(rare[0] in result[2][step] for result in results)]
    assert 1 <= len(bad) < STEPS / 2
    for hashes, _, _, position in results:
        same = [step for step in range(STEPS) if hashes[step] == hashes[step + 1]]
        assert same == bad
        assert (position.iteration, position.consumed_samples, position.skipped_iterations) == (
            STEPS,
            4 * STEPS,
            len(bad),
        )
    lines = read_metrics(files / run)
    assert [line["iteration"] - 1 for line in lines if line["skipped_iterations"]] == bad
    assert all((line["loss"] is None) == bool(line["skipped_iterations"]) for line in lines)
    found = [json.loads(line) for line in (files / run / "non_finite.jsonl").read_text().splitlines()]
    assert [one["iteration"] - 1 for one in found] == bad
    for one, step in zip(found, bad, strict=True):
        assert one["culprits"] == {"the student": rare} and one["action"] == "skip"
        assert one["sample_ids"] == sorted(results[0][2][step] + results[1][2][step])
        assert one["documents"].keys() == set(map(str, one["sample_ids"]))
        ((corpus, documents),) = one["documents"][str(rare[0])].items()
        assert corpus.startswith(str(files / "rare cache")) and RARE_DOCUMENT in documents


@pytest.mark.parametrize(
    "layout", [(), ("--use-distributed-optimizer",), ("--tensor-model-parallel-size", "2")]
)
@pytest.mark.fault(19)
def test_a_gradient_of_one_rank_stops_the_update_of_all(layout, files, ranks):
    """With tensor parallelism it is the gradient of a replicated norm weight, which no other rank sees."""
    argv = flags(files, f"gradient {layout}", "--train-iters", 3, "--non-finite", "skip", *layout)
    for hashes, _, _, position in ranks.run(steps_of, 2, argv, "nan@in_step:1:2"):
        assert [hashes[i] == hashes[i + 1] for i in range(3)] == [False, True, False]
        assert position.skipped_iterations == 1
    (found,) = map(json.loads, (files / f"gradient {layout}" / "non_finite.jsonl").read_text().splitlines())
    assert found["culprits"] == {} and "norm" in found["gradients"][0] and len(found["sample_ids"]) == 4


@pytest.mark.parametrize(
    ("models", "more", "culprit"),
    [
        ({"student": "nan student"}, (), "the student"),
        ({"student": "nan student"}, ("--kd-ratio", "1", "--tensor-model-parallel-size", "2"), "the student"),
        ({"student": "untied", "teacher": "nan teacher"}, (), "teacher nan-teacher"),
        (
            {"student": "untied", "teacher": "nan teacher"},
            ("--pipeline-model-parallel-size", "2", "--teacher-pipeline-layout", "2,1"),
            "teacher nan-teacher",
        ),
    ],
)
@pytest.mark.fault(19, 20)
def test_abort_names_model_and_sample(models, more, culprit, files, ranks):
    run = f"abort {culprit} {len(more)}"
    argv = rare_flags(files, run, "--save", files / run, *more, **models)
    results = [Result(*values) for values in ranks.run(call_unchecked, 2, argv)]
    assert [result.exit_code for result in results] == [70, 70]
    (found,) = map(json.loads, (files / run / "non_finite.jsonl").read_text().splitlines())
    (sample,) = found["culprits"][culprit]
    error = reported_text(results[0].stderr)
    assert error.startswith(
        f"iteration {found['iteration']}: loss sum nan, gradient norm nan; logits that are not finite: "
    )
    assert f"{culprit} in sample {sample}\n" in error and list(found["culprits"]) == [culprit]
    assert (
        read_metrics(files / run)[-1:] == []
        or read_metrics(files / run)[-1]["iteration"] == found["iteration"] - 1
    )


@pytest.mark.fault(19)
def test_skips_in_a_row_are_limited(files, ranks):
    argv = flags(files, "row", "--train-iters", 9, "--non-finite", "skip", "--max-non-finite-skips", 3)
    ((exit_code, stdout, stderr),) = ranks.run(with_fault, 1, argv, "nan@in_step")
    assert exit_code == 70
    assert (
        reported_codes(stderr) == ["step-not-finite: steps in a row were not finite"]
        and "4 steps in a row" in stderr
    )
    assert stdout.count("skipped the update of iteration") == 3 and stdout.count("  skipped 1") == 3
    actions = [
        json.loads(line)["action"] for line in (files / "row" / "non_finite.jsonl").read_text().splitlines()
    ]
    assert actions == ["skip", "skip", "skip", "abort"]
