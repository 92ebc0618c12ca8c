"""Check that teachers ahead by default leave every kind of pipelined run as it is without, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.data.images.tiny_processors import make_qwen
from tests.tiny_models import add_tokenizer, make_model
from tests.train import cross_tokenizer_invariance as cross
from tests.train import preference_run, reward_run, rollout_run, test_vision_run
from tests.train.command import flags, read_metrics, write_records
from tests.train.moe_invariance import BALANCE
from tests.train.test_resume import train_and_hash
from tests.train.topk_files import exported, offline
from tests.train.two_processors import with_text, with_weights

CLOCK = "_ms", "_per_s", "_per_gpu", "_share"  # endings of keys whose values differ in every run
PP2, TP2 = ("--pipeline-model-parallel-size", 2), ("--tensor-model-parallel-size", 2)
EP2, PEERS = ("--expert-model-parallel-size", 2), ("--teacher-residency", "peers", "--teacher-peers", 2)
HOST, SP = ("--teacher-residency", "host"), ("--sequence-parallel",)
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
LONG = ("--train-iters", 20, "--eval-interval", 7, "--save-interval", 3, "--async-save")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)


def families(student: str, teacher: str, *more: object, ranks: int = 2, **paths) -> tuple:
    return "text", ranks, (student, teacher), more, paths


CASES = {  # kind of files, ranks, models, flags, and paths by flag
    "host": families("qwen3", "llama", *HOST, "--micro-batch-size", 2),
    "experts, teacher over peers": families("qwen3_moe", "mixtral", *PEERS, *BALANCE, ranks=4),
    "EP2, experts on the host": families("qwen3_moe", "mixtral", *EP2, *HOST, "--bf16", ranks=4),
    "teacher EP2": families("qwen3", "mixtral", "--teacher-expert-model-parallel-size", 2, ranks=4),
    "experts recomputed": families("mixtral", "qwen3", *FULL, *BALANCE),
    "latent attention": families("deepseek-experts", "moonlight-experts", *EP2, ranks=4),
    "GPT-OSS": families("gpt_oss", "gpt_oss", "--bf16"),
    "windows": families("gemma3", "mistral"),
    "PP4, one micro-batch": families("qwen3", "llama", *PP2[:1], 4, "--global-batch-size", 1, ranks=4),
    "PP4, two micro-batches": families("qwen3", "llama", *PP2[:1], 4, "--micro-batch-size", 2, ranks=4),
    "TP2 SP, overlapped": families("qwen3", "llama", *TP2, *SP, *OVERLAP, ranks=4),
    "CP2": families("qwen3", "llama", "--context-parallel-size", 2, ranks=4),
    "stages without layers": families(
        "qwen3", "llama", "--student-pipeline-layout", "0,4", "--teacher-pipeline-layout", "4,0"
    ),
    "optimizer on the host": families("qwen3", "llama", "--optimizer-residency", "host"),
    "epochs, evaluations and saves": families("qwen3", "llama", *LONG),
    "workers": families("qwen3", "llama", "--num-workers", 1),
    "plain training": families("qwen3", "llama", "--kd-ratio", 0),
    "virtual stages": families("qwen3", "llama", "--num-virtual-stages-per-pipeline-rank", 2),
    "stored teacher": ("stored", 2, (), ("--kd-divergence", "forward_kl"), {}),
    "two tokenizers": ("cross", 2, (), ("--teacher-weighting", "entropy"), {}),
    "the best of two teachers": ("two", 2, (), ("--teacher-combination", "select"), {}),
    "the mean of two teachers": ("two", 2, (), ("--teacher-combination", "average"), {}),
    "images": ("images", 2, (), (), dict(teacher_hf="teacher")),
    "images, two processors": ("images", 2, (), test_vision_run.CROSS, dict(teacher_hf="finer")),
    "images, features of the tower": ("images", 2, (), test_vision_run.CROSS, dict(teacher_hf="deep")),
    "images, a teacher of text": ("images", 2, (), (), dict(teacher_hf="of text", data_path="texts.jsonl")),
    "pairs": ("pairs", 2, (), (), {}),
    "pairs, the student as reference": ("pairs", 2, (), (), dict(reference=None)),
    "completions": ("completions", 2, (), (), {}),
    "completions and text": ("completions", 2, (), (), dict(fraction=0.5)),
    "rewards": ("rewards", 2, (), (), {}),
}
NEVER_AHEAD = ("plain training", "virtual stages", "stored teacher", "completions", "completions and text")
NEVER_AHEAD += ("rewards",)
QUICK = ("experts, teacher over peers", "pairs", "images")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("default")


def text_argv(folder, ranks, run, models, more, paths) -> list[str]:
    """Return the command line of a run with two models of these families, and a text."""
    sizes = dict(num_hidden_layers=4, vocab_size=307)
    for seed, (name, family) in enumerate(zip(("student", "teacher"), models, strict=True)):
        if not (folder / f"{name} {family}").exists():
            add_tokenizer(make_model(folder / f"{name} {family}", family, seed=seed, **sizes))
    texts = [f"{i}: " + "the quick brown fox " * (i % 7 + 1) for i in range(60)]
    write_records(folder / "text.jsonl", *({"text": text} for text in texts))
    given = dict(student_hf=f"student {models[0]}", teacher_hf=f"teacher {models[1]}", save=run)
    return flags(folder, run, "--split", "80,20", *PP2, *more, **given | paths)


def stored_argv(folder, ranks, run, models, more, paths) -> list[str]:
    """Return the command line of a run with a stored teacher, stored at the first call."""
    pytest.importorskip("pyarrow")
    text_argv(folder, ranks, run, ("qwen3", "llama"), (), {})
    own = dict(student_hf="student qwen3")
    if not (folder / "stored").exists():
        exported(ranks, folder, "stored", "--k", 16, **own, teacher_hf="teacher llama")
    return offline(folder, run, "stored", *PP2, *more, save=run, **own)


def cross_argv(folder, ranks, run, models, more, paths) -> list[str]:
    """Return the command line of a run with a cross-tokenizer teacher in host memory, beside another."""
    folder = folder / "cross files"
    if not folder.exists():
        cross.make_files(folder)
    settings = json.loads((folder / "partition_kl.yaml").read_text())
    settings["teachers"][0]["residency"] = "host"
    (folder / "host.yaml").write_text(json.dumps(settings))
    return _from_file(folder, run, "host.yaml", more)


def two_argv(folder, ranks, run, models, more, paths) -> list[str]:
    """Return the command line of a run with two teachers that read the student's tokens."""
    folder = folder / "cross files"
    if not folder.exists():
        cross.make_files(folder)
    both = [{"name": name, "hf": str(folder / source)} for name, source in (("a", "same"), ("b", "student"))]
    settings = {"student": {"hf": str(folder / "student")}, "teachers": both}
    (folder / "two.yaml").write_text(json.dumps(settings))
    return _from_file(folder, run, "two.yaml", more)


def _from_file(folder, run, file, more) -> list[str]:
    own = dict(student_hf=None, teacher_hf=None, save=run)
    return [*flags(folder, run, "--split", "80,20", *PP2, *more, **own), "--config", str(folder / file)]


def images_argv(folder, ranks, run, models, more, paths) -> list[str]:
    """Return the command line of a run with a student that sees images."""
    folder = folder / "image files"
    if not folder.exists():
        with_text(with_weights(make_qwen(folder / "student", most_pixels=16 * 16), seed=1))
        with_weights(make_qwen(folder / "teacher", most_pixels=16 * 16), seed=2)
        with_weights(make_qwen(folder / "finer", most_pixels=32 * 32), seed=3)
        with_weights(make_qwen(folder / "deep", "Qwen3VL"), seed=4)
        test_vision_run.make_text_teacher(folder, "of text", "texts.jsonl")
    more = ("--train-iters", 3, "--micro-batch-size", 1, *PP2, *more)
    if "texts.jsonl" in paths.values():
        paths = paths | dict(image_root=None)
    return test_vision_run.argv(folder, run, *more, **paths)


def pairs_argv(folder, ranks, run, models, more, paths) -> list[str]:
    folder = folder / "pair files"
    if not folder.exists():
        preference_run.make_files(folder)
    return preference_run.argv(folder, run, "--save", folder / run, *PP2, *more, **paths)


def completions_argv(folder, ranks, run, models, more, paths) -> list[str]:
    folder = folder / "rollout files"
    if not folder.exists():
        rollout_run.make_files(folder)
    return rollout_run.argv(folder, run, "--save", folder / run, *PP2, *more, **paths)


def rewards_argv(folder, ranks, run, models, more, paths) -> list[str]:
    folder = folder / "rollout files"
    if not folder.exists():
        rollout_run.make_files(folder)
    return reward_run.argv(folder, run, "--save", folder / run, *PP2, *more, **paths)


def trained(arguments: list[str]) -> tuple[int, tuple]:
    """Return how many micro-batches teachers are ahead on this rank, and what `train_and_hash` returns."""
    from mkd.config.load import load_config
    from mkd.run.plan_run import plan_run

    plan = plan_run(load_config(arguments).config, torch.distributed.get_world_size())
    assert (plan.forecast.prefetch is not None) == bool(plan.forecast.states_ahead)
    return plan.forecast.states_ahead, train_and_hash(arguments)


def without_clock(record: dict) -> dict:
    return {name: value for name, value in record.items() if not name.endswith(CLOCK)}


def argv_of(name: str, folder, ranks, run: str, *extra: object) -> list[str]:
    """Return the command line of a case."""
    kind, _, models, more, paths = CASES[name]
    command = dict(text=text_argv, stored=stored_argv, cross=cross_argv, two=two_argv, images=images_argv)
    command |= dict(pairs=pairs_argv, completions=completions_argv, rewards=rewards_argv)
    return command[kind](folder, ranks, run, models, (*more, *extra), paths)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
        if name not in NEVER_AHEAD
    ],
)
def test_a_run_is_the_same_as_without(name, folder, ranks):
    found = []
    for run, number in ((f"{name} default", ()), (f"{name} 0", ("--teacher-prefetch", 0))):
        argv = argv_of(name, folder, ranks, run, *number)
        results = ranks.run(trained, CASES[name][1], argv)
        log = argv[argv.index("--log-dir") + 1]
        found.append((results, [without_clock(one) for one in read_metrics(Path(log))]))
    (auto, records), (stock, expected) = found
    pipeline = 4 if "PP4" in name else 2
    assert {ahead for ahead, _ in auto} == {2 * pipeline}
    assert {ahead for ahead, _ in stock} == {0}
    assert [state for _, state in auto] == [state for _, state in stock]
    assert records == expected and len(records) >= 2


@pytest.mark.parametrize("name", NEVER_AHEAD)
def test_teachers_that_are_never_ahead(name, folder, ranks):
    """The default is then the run without; tests of these runs have pipelines."""
    from mkd.config.load import load_config
    from mkd.run.plan_run import plan_run

    plan = plan_run(load_config(argv_of(name, folder, ranks, f"{name} planned")).config, CASES[name][1])
    assert plan.forecast.states_ahead == 0


def has_prefetch(arguments: list[str], small: int) -> bool:
    """Return True if teachers run ahead on this rank, when the GPU of rank `small` has no room for them."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run

    plan = plan_run(load_config(arguments).config, torch.distributed.get_world_size())
    context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
    engine, _ = build_engine(replace(plan, gpu_gib=1e-3 if context.rank == small else 1e3), context)
    return engine.schedule.prefetch is not None


@pytest.mark.parametrize(
    ("small", "number", "expected"), [(0, "auto", False), (1, "auto", False), (2, "auto", True), (1, 2, True)]
)
def test_the_smallest_gpu_decides_for_all(small, number, expected, folder, ranks):
    argv = text_argv(folder, ranks, "small", ("qwen3", "llama"), ("--teacher-prefetch", number), {})
    assert ranks.run(has_prefetch, 2, argv, small) == [expected] * 2
