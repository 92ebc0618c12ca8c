"""Check that held-out tasks match plain transformers under every layout and do not change training."""

from __future__ import annotations

from functools import cache

import pytest

from tests.evaluation.eval_reference import reference_scores, write_tasks
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import flags, write_records

SEQ_LENGTH, FEWSHOT = 128, 1
TP2 = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
LAYOUTS = {
    "one process": (1, ()),
    "TP2 SP": (2, TP2),
    "PP2 VPP2, micro-batch 2": (
        2,
        (
            "--pipeline-model-parallel-size",
            2,
            "--num-virtual-stages-per-pipeline-rank",
            2,
            "--micro-batch-size",
            2,
        ),
    ),
    "CP2": (2, ("--context-parallel-size", 2)),
    "DP2 overlapped": (2, OVERLAP),
    "TP2 CP2 SP": (4, (*TP2, "--context-parallel-size", 2)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a student, a teacher of other sizes, a text and tasks."""
    folder = tmp_path_factory.mktemp("eval_tasks")
    for name, sizes in (
        ("student", dict(family="qwen3", seed=1)),
        ("teacher", dict(family="llama", seed=2, hidden_size=72)),
    ):
        add_tokenizer(make_model(folder / name, **sizes, num_hidden_layers=4))
    write_records(folder / "text.jsonl", *({"text": f"{i}: the quick brown fox"} for i in range(200)))
    write_tasks(folder)
    return folder


def tasks_in(folder):
    from mkd.evaluation.tasks import read_tasks

    return read_tasks([folder / "animals.jsonl"], [folder / "foxes.jsonl"], FEWSHOT)


@pytest.fixture(scope="module")
def reference(files):
    """Return the scores of student and teacher."""
    return [reference_scores(files / name, tasks_in(files), SEQ_LENGTH) for name in ("student", "teacher")]


def evaluate_and_train(argv: list[str], folder, with_tasks: bool) -> dict:
    """Return this rank's scores of student and teacher, metrics, two steps, and metrics again."""
    import torch.distributed as dist
    from megatron.core.utils import get_attr_wrapped_model

    from mkd.config.load import load_config
    from mkd.data.loader import TrainStream
    from mkd.evaluation.scores import log_likelihoods
    from mkd.evaluation.task_evaluator import TaskEvaluator, evaluate_tasks, evaluate_teachers
    from mkd.operations.signals import Signals
    from mkd.operations.stopping import Stopper
    from mkd.platform import detect
    from mkd.run.build_data import build_data
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run
    from mkd.tokenizers.load import load_tokenizer
    from mkd.train.step import train_step

    config = load_config(argv).config
    plan = plan_run(config, dist.get_world_size())
    context = join(config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
    data, _ = build_data(plan, context)
    engine, _ = build_engine(plan, context)
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(folder / "student"))
    micro = config.training.micro_batch_size
    sizes = dict(vocab_size=307, seq_length=SEQ_LENGTH, micro_batch_size=micro)
    evaluator = TaskEvaluator.build(tasks_in(folder), tokenizer, context, **sizes)
    stream = TrainStream(
        data,
        micro_batch_size=micro,
        global_batch_size=4,
        data_parallel_rank=context.dp_rank,
        data_parallel_size=context.dp_size,
        shard=context.row_shard,
    )
    found = {}
    if with_tasks:
        found["before"] = evaluate_tasks(evaluator, engine)
        students = [get_attr_wrapped_model(chunk, "student") for chunk in engine.stages]
        teachers = [get_attr_wrapped_model(chunk, "teachers")[0] for chunk in engine.stages]
        found["student"] = log_likelihoods(students, evaluator.batches).tolist()
        found["teacher"] = log_likelihoods(teachers, evaluator.batches).tolist()
        found["of teachers"] = evaluate_teachers(evaluator, engine)
        stopper = Stopper(context, Signals(15 if context.rank == 0 else 0))
        found["stopped"] = [one(evaluator, engine, stopper) for one in (evaluate_tasks, evaluate_teachers)]
    steps = []
    for _ in range(2):
        result = train_step(engine, stream.next_step())
        steps.append((result.sums, result.grad_norm))
        if with_tasks:
            found["after"] = evaluate_tasks(evaluator, engine)
    return found | {"steps": steps, "describe": evaluator.describe()}


@pytest.fixture(scope="module")
def run(ranks, files):
    """Return run(layout, with_tasks) -> the result that all ranks return, computed once for each layout.

    Packs of one document are the same in every layout.
    """

    @cache
    def of(name: str, with_tasks: bool = True) -> dict:
        world_size, layout = LAYOUTS[name]
        argv = flags(files, name, "--seq-length", SEQ_LENGTH, "--pack", "none", *layout)
        results = ranks.run(evaluate_and_train, world_size, argv, files, with_tasks)
        assert all(result == results[0] for result in results), "ranks differ"
        return results[0]

    return of


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one == "TP2 CP2 SP")) for one in LAYOUTS]
)
def test_every_layout_gives_the_numbers_of_transformers(name, reference, run):
    found, single = run(name), run("one process")
    for model, scores in zip(("student", "teacher"), reference, strict=True):
        assert found[model] == pytest.approx(scores, rel=1e-5), model
    assert found["describe"] == single["describe"]
    for models in ("before", "of teachers"):
        assert found[models] == pytest.approx(single[models], rel=1e-5)
    names = {f"{key.rpartition('/')[0]}/teacher/{key.rpartition('/')[2]}" for key in found["before"]}
    assert set(found["of teachers"]) == names
    assert found["after"] == pytest.approx(single["after"], rel=1e-4)
    assert found["stopped"] == [None, None]
    change = found["after"]["eval/foxes/ce"] - found["before"]["eval/foxes/ce"]
    assert abs(change) > 1e-3, "the weights after the steps are the ones to score"


@pytest.mark.slow
def test_models_with_experts(files, ranks):
    """Replicas that share experts score other packs, and equally many."""
    for name, family in (("student", "deepseek-experts"), ("teacher", "mixtral")):
        add_tokenizer(make_model(files / f"moe {name}", family, num_hidden_layers=2))
    more = ("--seq-length", SEQ_LENGTH, "--pack", "none", "--expert-model-parallel-size", 2)
    argv = flags(files, "experts", *more, student_hf="moe student", teacher_hf="moe teacher")
    results = ranks.run(evaluate_and_train, 2, argv, files, True)
    assert results[0] == results[1]
    for model in ("student", "teacher"):
        scores = reference_scores(files / f"moe {model}", tasks_in(files), SEQ_LENGTH)
        assert results[0][model] == pytest.approx(scores, rel=1e-5), model


@pytest.mark.parametrize("name", ["PP2 VPP2, micro-batch 2", "DP2 overlapped"])
def test_training_does_not_notice(name, run):
    assert run(name)["steps"] == run(name, with_tasks=False)["steps"]


def test_prompts_that_were_cut_are_counted(run):
    assert run("one process")["describe"] == [
        "animals: 20 continuations, 5 prompts cut to 128 tokens",
        "foxes: 5 continuations, 1 prompt cut to 128 tokens",
    ]
