"""Check that stop and resume equal no stop: bitwise at the same layout, equal parameters at another."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import add_tokenizer, make_model

STEPS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make folders of a student and a teacher with one tokenizer, and a text file."""
    folder = tmp_path_factory.mktemp("resume")
    add_tokenizer(make_model(folder / "student", "qwen3", seed=1, tie_word_embeddings=True))
    add_tokenizer(make_model(folder / "teacher", "llama", seed=2, hidden_size=72, num_hidden_layers=6))
    with open(folder / "text.jsonl", "w", encoding="utf-8") as text:
        for i in range(60):
            text.write(json.dumps({"text": f"document {i}: " + "the quick brown fox " * (i % 7 + 1)}) + "\n")
    return folder


def argv(files, run, *more):
    flags = {
        "--student-hf": files / "student",
        "--teacher-hf": files / "teacher",
        "--data-path": files / "text.jsonl",
        "--seq-length": 64,
        "--global-batch-size": 4,
        "--train-iters": STEPS,
        "--lr": 1e-3,
        "--lr-warmup-iters": 2,
        "--save": files / run,
        "--data-cache-path": files / "cache",
    }
    return [str(word) for pair in flags.items() for word in pair] + [str(word) for word in more]


def train_and_hash(arguments, export=None):
    """Train on this world; return SHA-256 of this rank's parameters and optimizer state, and the position."""
    import os

    from mkd.config.load import load_config
    from mkd.operations.run_folders import log_folder
    from mkd.platform import detect
    from mkd.run.exports import export_student
    from mkd.run.loop import train
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    world_size = torch.distributed.get_world_size()
    run = build_run(plan_run(load_config(arguments).config, world_size), detect())
    try:
        train(run)
        if export is not None:
            export_student(run, export, log_folder(run.config))
    finally:
        run.reporter.close()
    digest = hashlib.sha256()
    for chunk in run.engine.stages:
        for name, tensor in sorted((*chunk.named_parameters(), *chunk.module.named_buffers())):
            digest.update(name.encode() + tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    for optimizer in run.engine.optimizer.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            digest.update(state["exp_avg"].numpy().tobytes() + state["exp_avg_sq"].numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    assert os.path.exists(arguments[arguments.index("--save") + 1])
    return digest.hexdigest(), run.position


def train_and_save(arguments):
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.loop import train
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    run = build_run(plan_run(load_config(arguments).config, 1), detect())
    train(run)
    run.reporter.close()


LAYOUTS = {
    "one process": (1, ()),
    "TP2": (2, ("--tensor-model-parallel-size", 2)),
    "PP2": (2, ("--pipeline-model-parallel-size", 2)),
    "TP2xPP2": (4, ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)),
    "DP2": (2, ()),
    "CP2": (2, ("--context-parallel-size", 2)),
    "DP2 distributed optimizer": (2, ("--use-distributed-optimizer",)),
    "TP2 distributed optimizer": (2, ("--use-distributed-optimizer", "--tensor-model-parallel-size", 2)),
}


@pytest.mark.parametrize(
    "name",
    [
        *("one process", "DP2 distributed optimizer"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("TP2", "PP2", "TP2xPP2", "DP2", "CP2")),
    ],
)
@pytest.mark.fault(1)
def test_resume_is_bitwise(name, files, ranks):
    world, layout = LAYOUTS[name]
    whole, halves = f"whole {name}", f"halves {name}"
    straight = ranks.run(train_and_hash, world, argv(files, whole, *layout))
    ranks.run(train_and_hash, world, argv(files, halves, *layout, "--exit-interval", STEPS // 2))
    resumed = ranks.run(train_and_hash, world, argv(files, halves, *layout, "--load", files / halves))
    assert resumed == straight
    lines = [json.loads(line) for line in (files / halves / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "first, second, more",
    [
        ("TP2", "PP2", ()),
        pytest.param("PP2", "TP2", (), marks=pytest.mark.slow),
        ("DP2 distributed optimizer", "TP2 distributed optimizer", ()),
        # context parallelism pads documents and would pack them differently
        pytest.param("CP2", "one process", ("--pack", "none"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.fault(23)
def test_resume_at_another_layout(first, second, more, files, ranks):
    """Saved at one layout and loaded at another, parameters are identical and training is the same."""
    run = f"{first} then {second}"
    world, layout = LAYOUTS[first]
    half = argv(files, run, *more, *layout, "--exit-interval", STEPS // 2)
    ranks.run(train_and_hash, world, half, files / f"{run} a")
    world, layout = LAYOUTS[second]
    stop_now = argv(files, f"{run} b", *more, *layout, "--load", files / run, "--train-iters", STEPS // 2)
    _, position = ranks.run(train_and_hash, world, stop_now, files / f"{run} b hf")[0]
    assert (position.iteration, position.consumed_samples) == (STEPS // 2, 4 * STEPS // 2)
    saved, loaded = (load_file(files / name / "model.safetensors") for name in (f"{run} a", f"{run} b hf"))
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[n], loaded[n]) for n in saved)

    ranks.run(
        train_and_hash,
        world,
        argv(files, f"{run} c", *more, *layout, "--load", files / run),
        files / f"{run} c hf",
    )
    ranks.run(train_and_hash, 1, argv(files, f"{run} whole", *more), files / f"{run} whole hf")
    resumed, straight = (
        load_file(files / name / "model.safetensors") for name in (f"{run} c hf", f"{run} whole hf")
    )
    for name in straight:
        assert (resumed[name] - straight[name]).norm() <= 1e-4 * straight[name].norm(), name


def test_another_kind_of_optimizer_is_refused(files, ranks):
    ranks.run(train_and_hash, 1, argv(files, "kind", "--exit-interval", 1))
    with pytest.raises(AssertionError, match="holds a replicated optimizer, this run has a distributed one"):
        ranks.run(
            train_and_hash, 1, argv(files, "kind", "--load", files / "kind", "--use-distributed-optimizer")
        )


@pytest.mark.parametrize("first", [(), ("--bf16",)])
def test_another_precision_is_refused(first, files, ranks):
    name, second = f"precision {len(first)}", () if first else ("--bf16",)
    saved, wanted = ("bf16", "fp32") if first else ("fp32", "bf16")
    ranks.run(train_and_save, 1, argv(files, name, *first, "--exit-interval", 1))
    with pytest.raises(AssertionError, match=f"is of a run in {saved}, this one is in {wanted}"):
        ranks.run(train_and_save, 1, argv(files, name, "--load", files / name, *second))


def test_checkpoint_holds_the_student_alone(files, ranks):
    """Nothing of the teacher's shape (72 wide, 6 layers) is in the checkpoint's metadata."""
    from megatron.core import dist_checkpointing

    ranks.run(train_and_hash, 1, argv(files, "alone", "--exit-interval", 1))
    folder = files / "alone" / "iter_0000001"
    tensors = dist_checkpointing.load_tensors_metadata(str(folder))
    assert tensors and not any("teacher" in name for name in tensors)
    assert not any(
        72 in tensor.global_shape or tensor.global_shape[:1] == (6,) for tensor in tensors.values()
    )
    assert (files / "alone" / "latest_checkpointed_iteration.txt").read_text() == "1\n"
