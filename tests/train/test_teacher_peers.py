"""Check that a teacher whose layers are split over peers trains the student bit for bit as a whole one."""

from __future__ import annotations

import pytest
import torch

from tests.models.streamed import to_megatron
from tests.tiny_models import make_model
from tests.train import cross_tokenizer_invariance as cross
from tests.train.command import flags, make_files, read_metrics, run_main
from tests.train.invariance import OVERLAP, PEERS, SP, UNEVEN, Layout, add_text, make_pair, microbatches

UNEVEN_PARTS = ("--teacher-pipeline-layout", "5,5,4,2")
LAYOUTS = {
    Layout("DP4, distributed and overlapped", 4, flags=OVERLAP): 4,
    Layout("DP4 in pairs", 4, micro=2): 2,
    Layout("CP2", 2, cp=2): 2,
    Layout("CP2 DP2, distributed and overlapped", 4, cp=2, flags=OVERLAP): 4,
    Layout("TP2 DP2 + sequence parallel", 4, tp=2, flags=SP): 2,
    Layout("PP2 VPP2 DP2, uneven, from a Megatron checkpoint", 4, pp=2, vp=2, flags=UNEVEN_PARTS): 2,
    Layout("TP2 PP2 DP2, uneven + sequence parallel", 8, tp=2, pp=2, flags=SP + UNEVEN): 2,
}
"""Layout -> number of peers."""
QUICK = {"PP2 VPP2 DP2, uneven, from a Megatron checkpoint", "CP2 DP2, distributed and overlapped"}


EXPERTS = "--expert-model-parallel-size", "2"
OF_TEACHER = "--teacher-expert-model-parallel-size"
EXPERT_LAYOUTS = {
    Layout("EP2, teacher EP1", 2, flags=(*EXPERTS, OF_TEACHER, "1")): 2,
    Layout("EP2 DP4", 4, flags=EXPERTS): 2,
    Layout("TP2 DP2, teacher EP2, from a Megatron checkpoint", 4, tp=2, flags=(*SP, OF_TEACHER, "2")): 2,
}
"""The same for models with experts."""


def trained(engine, state, batches) -> tuple:
    """Return sums of an evaluation and of two steps, the norms, and the weights after them."""
    from mkd.evaluation.evaluate import evaluate
    from mkd.train.step import train_step

    sums = [evaluate(engine, [batches]).token_sums()]
    for _ in range(2):
        result = train_step(engine, batches)
        sums.append(result.sums.token_sums() | {"grad_norm": result.grad_norm})
    with engine.parameters_gathered():
        return sums, [p.detach().clone() for model in state.models for p in model.parameters()]


def bytes_at_rest(engine) -> int:
    """Return the bytes of the layers' parameters between forward passes."""
    teachers = [teacher for stage in engine.stages for teacher in stage.module.teachers]
    parameters = [p for teacher in teachers for layer in teacher.decoder.layers for p in layer.parameters()]
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}.values())


def assert_same(whole: tuple, split: tuple) -> None:
    assert whole[0] == split[0]
    assert all(torch.equal(one, other) for one, other in zip(whole[1], split[1], strict=True))


def train_whole_and_split(layout: Layout, student, teacher, peers: int) -> None:
    """Train with both residencies on this rank."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.build_engine import build_engine
    from mkd.run.one_model import join
    from mkd.run.plan_run import plan_run

    results, at_rest = [], []
    loaded = ("--teacher-load", str(teacher / "megatron")) if "Megatron" in layout.name else ()
    for more in (loaded, (*loaded, *PEERS[peers])):
        plan = plan_run(load_config(layout.with_flags(more).argv(student, teacher)).config, layout.ranks)
        context = join(plan.config, plan.facts.pair.sizes, plan.facts.virtual_stages, detect())
        engine, state = build_engine(plan, context)
        at_rest.append(bytes_at_rest(engine))
        results.append(trained(engine, state, microbatches(layout, context)))
        assert bytes_at_rest(engine) == at_rest[-1]
        context.close()
    assert_same(*results)
    assert at_rest[1] < at_rest[0] / 100, "between forward passes the parameters hold nothing"


@pytest.fixture(scope="module")
def pair(ranks, tmp_path_factory):
    student, teacher = make_pair(tmp_path_factory.mktemp("pair"))
    ranks.run(to_megatron, 1, teacher, teacher / "megatron")
    return student, teacher


@pytest.mark.parametrize(
    ("layout", "peers"),
    [
        pytest.param(*one, id=one[0].name, marks=[] if one[0].name in QUICK else pytest.mark.slow)
        for one in LAYOUTS.items()
    ],
)
def test_training_is_the_same_bit_for_bit(layout, peers, pair, ranks):
    ranks.run(train_whole_and_split, layout.ranks, layout, *pair, peers)


@pytest.fixture(scope="module")
def expert_pair(ranks, tmp_path_factory):
    """Return students and teachers of DeepSeek-V3's form: dense first layers, biases of expert choice."""
    folder = tmp_path_factory.mktemp("experts")
    student = add_text(make_model(folder / "student", "deepseek-experts", seed=1))
    teacher = make_model(folder / "teacher", "deepseek-experts", seed=2, vocab_size=330, num_hidden_layers=5)
    ranks.run(to_megatron, 1, teacher, teacher / "megatron")
    return student, teacher


@pytest.mark.parametrize(
    ("layout", "peers"),
    [
        pytest.param(*one, id=one[0].name, marks=[] if one[0].ranks > 2 else pytest.mark.slow)
        for one in EXPERT_LAYOUTS.items()
    ],
)
def test_peers_split_experts(layout, peers, expert_pair, ranks):
    """Peers hold the same experts: with expert parallelism, these are not the nearest processes."""
    ranks.run(train_whole_and_split, layout.ranks, layout, *expert_pair, peers)


def train_two_teachers(layout: Layout, files) -> None:
    """Train with a cross-tokenizer teacher over peers, beside one on the host."""
    results = []
    for name in ("partition_kl", "split"):
        engine, state, batches, _ = cross.build(layout, files, name)
        results.append(trained(engine, state, batches))
        engine.context.close()
    assert_same(*results)


def test_several_teachers_have_their_own_residency(ranks, tmp_path):
    files = cross.make_files(tmp_path)
    text = (files / "partition_kl.yaml").read_text(encoding="utf-8")
    for name, more in (("cross", '"residency": "peers", "peers": 2'), ("same", '"residency": "host"')):
        text = text.replace(f'"name": "{name}"', f'"name": "{name}", {more}')
    (files / "split.yaml").write_text(text, encoding="utf-8")
    ranks.run(train_two_teachers, 2, Layout("DP2", 2), files)


def values(records: list[dict]) -> list[dict]:
    """Return metrics without times, rates and memory."""
    measured = ("_ms", "per_gpu", "teacher_share", "peak_memory_gib")
    return [{k: v for k, v in record.items() if not k.endswith(measured)} for record in records]


def test_a_run_resumes_with_its_peers(ranks, tmp_path):
    """The command evaluates and stops between; with a whole teacher nothing of it happens otherwise."""
    files = make_files(tmp_path)
    more = ("--train-iters", 4, "--eval-interval", 2, "--split", "80,20,0")
    split = (*more, *PEERS[2], "--save", files / "save", "--load", files / "save")
    for argv in (
        flags(files, "whole", *more),
        flags(files, "split", *split, "--exit-interval", 2),
        flags(files, "split", *split),
    ):
        results = run_main(ranks, argv, world_size=2)
        assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    whole, resumed = (values(read_metrics(files / name)) for name in ("whole", "split"))
    assert whole == resumed and len(whole) > 6
