"""Check which models a plan runs as CUDA graphs, and the memory that it says they keep."""

from __future__ import annotations

import pytest

from mkd.plan.advice.cuda_graphs import planned_graphs, served_graphs
from mkd.plan.forecast import Forecast
from mkd.plan.models.model_shape import ModelShape
from tests.plan.shapes import config
from tests.run_facts import forecast_of
from tools.benchmarks.shapes import config_of, shape_of

YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e6, original_max_position_embeddings=8192)
OWN_TEXT = ("--kd-ratio", 1, "--on-policy-fraction", 1, "--prompt-data-path", "p", "--max-new-tokens", 64)
INTERLEAVED = ("--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2)
INTERLEAVED += ("--global-batch-size", 8)
CUT = ("--context-parallel-size", 2)
SPREAD = ("--teacher-expert-model-parallel-size", 2)
TEACHER = ("--teacher-hf", "t")
BASE = ("--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--teacher-hf", "t", "--bf16")


def graphs(student: str, teacher: str, *argv: str | int, gib: float | None = None):
    found = forecast_of(config(*BASE, *argv), 4, shape_of(student), [shape_of(teacher)])
    return planned_graphs(Forecast(found.facts, gib))


def test_dense_models_run_as_graphs():
    found = graphs("qwen3-1.7b", "qwen3-8b", "--seq-length", 2048)
    assert found.student and found.teachers == (True,)
    assert found.describe() == f"layers as CUDA graphs: student, teacher ({found.kept_gib:.1f} GiB more)"


def test_models_whose_layers_cannot_be_graphs_are_named():
    images = graphs("qwen2.5-vl-3b", "qwen2.5-vl-3b")
    assert not images.student and images.teachers == (False,)
    why = "rows with images differ in shape"
    assert images.describe() == f"layers without CUDA graphs: student, teacher ({why})"
    moved = graphs("qwen3-1.7b", "qwen3-8b", "--teacher-residency", "host")
    assert moved.reasons == (None, "layers that move run one by one")
    off = graphs("qwen3-1.7b", "qwen3-8b", "--cuda-graphs", "off")
    assert off.describe() == "layers without CUDA graphs: student, teacher (--cuda-graphs off)"
    assert off.kept_gib == 0


PAIRS = {  # shape or model_type of the student, those of the teachers, flags; who runs without graphs
    "no teacher": ("qwen3-1.7b", (), ("--kd-ratio", 0), ()),
    "stored teacher": ("qwen3-1.7b", (), ("--teacher-topk", "k"), ()),
    "reference of DPO": ("qwen3-1.7b", ("qwen3-8b",), ("--kd-ratio", 0, "--dpo-beta", 0.1), ()),
    "other tokenizer": ("qwen3-1.7b", ("llama3.1-8b",), ("--xtoken-loss", "partition_kl"), ()),
    "own text": ("qwen3-1.7b", ("qwen3-8b",), OWN_TEXT, ()),
    "interleaved": ("qwen3-1.7b", ("qwen3-8b",), INTERLEAVED, ()),
    "images": ("qwen2.5-vl-3b", ("qwen3-8b",), (), (0,)),
    "experts": ("qwen3-30b-a3b:4", ("qwen3-30b-a3b:4",), (), ()),
    "experts, no teacher": ("qwen3-30b-a3b:4", (), ("--kd-ratio", 0), ()),
    "experts, interleaved": ("qwen3-30b-a3b:4", ("qwen3-30b-a3b:4",), INTERLEAVED, ()),
    "gated delta nets": ("qwen3.5-2b", ("qwen3.5-9b",), (), ()),
    "gated delta nets, cut sequences": ("qwen3.5-2b", ("qwen3-8b",), CUT, ()),
    "a teacher of gated delta nets, cut sequences": ("qwen3-1.7b", ("qwen3.5-9b",), CUT, ()),
    "the teacher's experts spread": ("qwen3-30b-a3b:4", ("qwen3-30b-a3b:4",), SPREAD, ()),
}


def test_mixers_beside_experts_run_without():
    sizes = dict(model_type="qwen3_5_moe_text", num_experts=8, num_experts_per_tok=2)
    sizes |= dict(moe_intermediate_size=16, shared_expert_intermediate_size=16)
    shape = ModelShape.from_hf_config(config_of("tiny-delta") | sizes)
    found = planned_graphs(forecast_of(config(*BASE), 4, shape, [shape_of("qwen3-8b")]))
    assert found.reasons == ("mixers beside experts have not been tried in graphs", None)


@pytest.mark.parametrize("name", PAIRS)
def test_what_runs_as_graphs_beside_each_feature(name):
    student, teachers, flags, without = PAIRS[name]
    given = (
        BASE if teachers or name.endswith("no teacher") else tuple(one for one in BASE if one not in TEACHER)
    )
    found = forecast_of(config(*given, *flags), 4, shape_of(student), [shape_of(one) for one in teachers])
    reasons = planned_graphs(found).reasons
    assert len(reasons) == 1 + len(teachers)
    assert tuple(index for index, reason in enumerate(reasons) if reason is not None) == without


@pytest.mark.parametrize(
    "more",
    [
        dict(model_type="ernie4_5"),  # neighbouring channels rotate
        dict(
            rope_parameters=dict(
                rope_type="yarn", factor=4.0, rope_theta=1e6, original_max_position_embeddings=8192
            )
        ),
    ],
    ids=["ernie4_5", "yarn"],
)
def test_models_whose_rotation_is_not_fused_run_without(more):
    teacher = ModelShape.from_hf_config(config_of("qwen3-8b") | more)
    found = planned_graphs(forecast_of(config(*BASE), 4, shape_of("qwen3-1.7b"), [teacher]))
    assert found.reasons == (None, "its rotation of positions waits for the lengths of documents")


def test_the_student_keeps_the_activations_of_every_micro_batch_in_flight():
    """The first of 4 pipeline ranks has as many in flight as there are ranks."""
    layout = ("--pipeline-model-parallel-size", 4, "--global-batch-size")
    one, eight = (graphs("qwen3-1.7b", "qwen3-8b", *layout, number) for number in (1, 8))
    assert eight.student and 4 * one.kept_gib > eight.kept_gib > 2.5 * one.kept_gib


def test_without_room_packs_without_graphs_are_recomputed_then_the_student_goes_and_then_the_teacher():
    pair = "qwen3-1.7b", "qwen3-8b", "--seq-length", 8192
    need = forecast_of(config(*BASE, "--seq-length", 8192), 4, *((shape_of(pair[0])), [shape_of(pair[1])]))
    gib = need.need_gib(0) / 0.95
    kept = graphs(*pair).kept_gib
    roomy, again = (graphs(*pair, gib=gib + share * kept) for share in (1.1, 0.4))
    assert roomy.student and not roomy.recomputes
    assert again.student and again.recomputes and again.kept_gib == roomy.kept_gib
    assert "packs without graphs recompute the student's layers" in again.describe()
    full = "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1
    needed = forecast_of(config(*BASE, *pair[2:], *full), 4, shape_of(pair[0]), [shape_of(pair[1])]).need_gib(
        0
    )
    assert again.saved_gib == pytest.approx(need.need_gib(0) - needed)
    tight = graphs(*pair, gib=gib + 0.1 * kept)
    assert not tight.student and tight.teachers == (True,) and tight.kept_gib < 0.1 * kept
    assert tight.describe().endswith("; without: student (the memory of the GPU is needed otherwise)")
    assert graphs(*pair, gib=gib).teachers == (False,)


def test_a_teacher_on_processes_of_its_own():
    """It has a plan for itself: where it cannot, and where its GPU has no room for what graphs keep."""

    def served(*argv, gib: float | None = None):
        sides = ("--teacher-processes", 2, "--seq-length", 4096, *argv)
        found = forecast_of(config(*BASE, *sides), 2, shape_of("qwen3-1.7b"), [], [shape_of("qwen3-8b")])
        (side,) = found.sides
        return served_graphs(side, 2, gib), side.need_gib(2)

    found, need_gib = served()
    assert found.reason is None and 0.1 < found.kept_gib < 2
    assert found.describe() == f"layers as CUDA graphs ({found.kept_gib:.1f} GiB more)"
    assert served(gib=need_gib + found.kept_gib + 0.01)[0].reason is None
    full, _ = served(gib=need_gib + found.kept_gib - 0.01)
    assert full.describe() == "layers without CUDA graphs (the memory of the GPU is needed otherwise)"
    assert full.kept_gib == 0
    assert served("--cuda-graphs", "off")[0].reason == "--cuda-graphs off"
    assert served("--teacher-residency", "host")[0].reason == "layers that move run one by one"
