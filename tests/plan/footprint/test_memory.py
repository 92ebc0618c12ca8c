"""Check predicted bytes against real models, DDP buffers and optimizers; activations against hand counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from mkd.config.schema import XTokenConfig
from mkd.plan.footprint.activations import Activations
from mkd.plan.footprint.device_memory import MESSAGE_GIB, SPREAD_GIB, Groups, device_gib
from mkd.plan.footprint.head import head_block_rows
from mkd.plan.footprint.memory import GIB, WORKSPACE_GIB, predict_memory
from mkd.plan.parallel_sizes import ONE_PROCESS, Sizes
from mkd.plan.times.bubble import rank_order
from tests.plan.held_bytes import held_bytes
from tests.plan.kept_tensors import kept_bytes
from tests.plan.shapes import SEQ_LENGTH, STUDENT, TEACHER, config, several, student_activations, trained
from tests.tiny_models import make_model
from tests.train.invariance import DISTRIBUTED, PEERS, SP, UNEVEN, Layout, add_text, make_pair
from tests.train.moe_invariance import make_moe_pair

PP4 = ("--pipeline-model-parallel-size", 4)
PP2_NOT_AHEAD = ("--pipeline-model-parallel-size", 2, "--teacher-prefetch", 0)
LAYOUTS = (
    Layout("one process"),
    Layout("TP2", 2, tp=2, flags=SP),
    Layout("PP2", 2, pp=2, flags=UNEVEN),
    Layout("PP2 VPP2", 2, pp=2, vp=2),
    Layout("DP2", 2, flags=DISTRIBUTED),
    Layout("DP2 PP2, a teacher over peers", 4, pp=2, flags=UNEVEN + PEERS[2]),
    Layout("bf16", flags=("--bf16",)),
    Layout("bf16 CP2", 2, cp=2, flags=(*DISTRIBUTED, "--bf16")),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (one.name in ("TP2", "bf16 CP2")))
        for one in LAYOUTS
    ],
)
def test_weights_gradients_and_optimizer_are_what_a_run_holds(layout, pair, ranks):
    for held, predicted in ranks.run(held_bytes, layout.ranks, layout, *pair):
        for part, expected in zip(held, predicted, strict=True):
            assert part == pytest.approx(expected, rel=0.02)  # padding of the distributed optimizer's buffers


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [
        (Layout("PP4", 4, pp=4), (1, 2, 8)),
        (Layout("PP2 uneven", 2, pp=2, flags=UNEVEN), (1, 8)),
        (Layout("PP2 VPP2", 2, pp=2, vp=2), (2, 8)),  # two layers in each of 4 stages
    ],
    ids=["PP4", "PP2", "PP2 VPP2"],
)
def test_a_step_keeps_as_many_micro_batches_as_the_plan_counts(layout, numbers, pair, ranks):
    """Tensors kept for backward, counted while Megatron's schedule runs, over those of the shortest step."""
    for rank, peaks in enumerate(ranks.run(kept_bytes, layout.ranks, layout, *pair, numbers)):
        alive = []
        for number in numbers:
            order = rank_order(rank, layout.pp, layout.vp, number)
            alive.append(max(accumulate(1 if task.is_forward else -1 for task in order)))
        # equal micro-batches share their positions, 512 bytes
        assert [peak / peaks[0] for peak in peaks] == pytest.approx([n / alive[0] for n in alive], rel=1e-3)


EXPERT_LAYOUTS = (
    Layout(
        "EP2, teacher EP1 over 2 peers",
        2,
        flags=("--teacher-expert-model-parallel-size", "1", *PEERS[2], "--bf16"),
    ),
    Layout("EP2 TP2, teacher EP4", 4, tp=2, flags=(*SP, "--teacher-expert-model-parallel-size", "4")),
)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=[one.name for one in EXPERT_LAYOUTS])
def test_experts_are_spread_over_more_processes_than_the_rest(layout, tmp_path, ranks):
    """With TP 2 and DP 2, EP 2 leaves two copies of each expert, which share its optimizer state."""
    layout = layout.with_flags(("--expert-model-parallel-size", "2", *DISTRIBUTED))
    for held, predicted in ranks.run(held_bytes, layout.ranks, layout, *make_moe_pair(tmp_path)):
        for part, expected in zip(held, predicted, strict=True):
            assert part == pytest.approx(expected, rel=0.02)  # padding of the distributed optimizer's buffers


def test_weights_of_two_teachers_are_what_a_run_holds(pair, ranks, tmp_path):
    """The second teacher is the student itself, frozen."""
    path = tmp_path / "second.yaml"
    path.write_text(
        f"teachers: [{{name: first}}, {{name: second, hf: {pair[0]}, pipeline_layout: '3,5'}}]",
        encoding="utf-8",
    )
    layout = Layout("two", 2, pp=2, flags=("--config", str(path)))
    for held, predicted in ranks.run(held_bytes, 2, layout, *pair):
        assert held[3] == pytest.approx(predicted[3])


@pytest.mark.parametrize("family", ["qwen2", "llama-biases", "llama-mlp-bias", "mistral", "phi3"])
def test_parameters_of_every_family(family, tmp_path, ranks):
    student, teacher = (
        add_text(make_model(tmp_path / "s", family)),
        make_model(tmp_path / "t", family, num_hidden_layers=2),
    )
    for held, predicted in ranks.run(held_bytes, 2, Layout(family, 2, tp=2), student, teacher):
        assert held[0] == pytest.approx(predicted[0])
        assert held[3] == pytest.approx(predicted[3])


def predict(*flags, teachers=(TEACHER,), microbatches=8, layouts=(), data_parallel=1, settings=None):
    sizes = microbatches, data_parallel
    return predict_memory(trained(settings or config(*flags), STUDENT, teachers, *sizes, layouts)).ranks


def test_early_ranks_keep_more_micro_batches():
    """1F1B: rank r of 4 holds 4 - r micro-batches, never more than there are."""
    chunk = 7 * student_activations().layer_bytes(STUDENT.layers[0]) / GIB
    assert [rank.activations_gib / chunk for rank in predict(*PP4)[:3]] == pytest.approx([4, 3, 2])
    assert [rank.activations_gib / chunk for rank in predict(*PP4, microbatches=2)[:3]] == pytest.approx(
        [2, 2, 2]
    )


def test_interleaving_keeps_more():
    """Rank 0 of 2 x 2: 2 x 1 + 2 model parts to fill, one more in each turn."""
    flags = ("--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2)
    chunk = 7 * student_activations().layer_bytes(STUDENT.layers[0]) / GIB
    assert predict(*flags)[0].activations_gib == pytest.approx(5 * chunk)


def test_the_head_holds_two_chunks_of_logits():
    (rank,), (alone,) = predict(), predict(teachers=())
    logits = head_block_rows(SEQ_LENGTH, 151936, 2) * 151936 * 2 / GIB
    assert 2 * logits < rank.transient_gib < 2 * logits + 0.5
    assert logits < alone.transient_gib < rank.transient_gib - logits
    assert alone.teacher_gib == 0


def test_other_heads_hold_more():
    """With a stored teacher all rows are computed at once.

    fp32 logits take more: the gradient is a third tensor beside them.
    """
    micro = ("--micro-batch-size", 2)
    (fused,), (exact,) = (predict(*micro, *flags) for flags in ((), ("--kd-fp32-logits",)))
    vocabulary, widths, tokens = 151936, 2 * 2048 + 4096, 2 * SEQ_LENGTH
    rows, fp32_rows = (head_block_rows(tokens, vocabulary, size) for size in (2, 4))
    assert fp32_rows < rows < tokens
    (stored,) = predict(*micro, "--teacher-topk", "cache", teachers=())
    (alone,) = predict(*micro, teachers=())
    more_stored = (tokens - head_block_rows(tokens, vocabulary, 2)) * (vocabulary + 2 * 2048) * 2
    assert stored.transient_gib - alone.transient_gib == pytest.approx(more_stored / GIB), (
        "all rows with loss at once"
    )
    more = fp32_rows * (vocabulary * (2 * 4 + 2) + 2 * widths) - rows * (2 * 2 * vocabulary + 2 * widths)
    assert exact.transient_gib - fused.transient_gib == pytest.approx(more / GIB)


def test_an_evaluation_of_few_activations_is_the_peak():
    """Logits of an evaluation are fp32, and all rows at once with a stored teacher.

    Nothing is then kept for backward.
    """
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
    (trained,), (evaluated,) = (
        predict("--teacher-topk", "cache", *full, *more, teachers=()) for more in ((), ("--eval-interval", 5))
    )
    head = SEQ_LENGTH * (4 * 151936 + 2 * 2048 + 8 * 4)
    assert evaluated.activations_gib == 0 < trained.activations_gib
    assert evaluated.transient_gib == pytest.approx(head / GIB + WORKSPACE_GIB)
    assert evaluated.allocated_gib > trained.allocated_gib


def test_the_teachers_forward_is_the_peak_of_a_rank_without_student_layers():
    """A teacher's MLP holds layer input, residual, SwiGLU's input and output.

    Messages of both models, in and out, add to that.
    """
    first, _ = predict(*PP2_NOT_AHEAD, layouts=("0,28", "18,18"))
    forward = 2 * SEQ_LENGTH * 4096 * 2 + 3 * SEQ_LENGTH * 12288 * 2
    messages = 2 * SEQ_LENGTH * (2048 + 4096) * 2
    assert first.activations_gib == 0
    assert first.transient_gib == pytest.approx((forward + messages) / GIB + WORKSPACE_GIB)


def test_teachers_add_up():
    """Weights and hidden states of both add up.

    Logits exist for one teacher at a time, but for all teachers at once for an average.
    """
    (one,), (two,) = predict(), predict(teachers=(TEACHER, STUDENT), settings=several({}, {}))
    (alone,) = predict(teachers=(STUDENT,))
    assert two.teacher_gib == pytest.approx(one.teacher_gib + alone.teacher_gib)
    hidden = SEQ_LENGTH * 2048 * 2
    assert two.transient_gib - one.transient_gib == pytest.approx(hidden / GIB)
    (average,) = predict(teachers=(TEACHER, STUDENT), settings=several({}, {}, teacher_combination="average"))
    logits = head_block_rows(SEQ_LENGTH, 151936, 2) * (151936 + 2048) * 2
    assert average.transient_gib - two.transient_gib == pytest.approx(logits / GIB)


def test_a_teacher_with_its_own_tokens_has_its_own_rows():
    """A larger vocabulary does not pad the student's; packs of twice the length have twice the logits."""
    wide = replace(STUDENT, vocab_size=2 * 151936)
    (same,), (short,), (long,) = (
        predict(teachers=(wide,), settings=several({"xtoken": xtoken}))
        for xtoken in (None, XTokenConfig(), XTokenConfig(seq_length=2 * SEQ_LENGTH))
    )
    (alone,) = predict(teachers=())
    assert short.student_gib == alone.student_gib < same.student_gib
    assert short.teacher_gib - same.teacher_gib == pytest.approx(2 * 151936 * 2048 * 2 / GIB), (
        "its head is never tied"
    )
    rows = head_block_rows(SEQ_LENGTH, 2 * 151936, 2)
    more = rows * (2 * 151936 + 2048) * 2 + SEQ_LENGTH * 2048 * 2
    assert long.transient_gib - short.transient_gib == pytest.approx(more / GIB)
    (narrow,) = predict(
        teachers=(replace(STUDENT, vocab_size=1000),), settings=several({"xtoken": XTokenConfig()})
    )
    # an embedding of 1000 rows, padded; the head has one row for every row of the student's
    more = 1024 * 2048 * 2
    assert narrow.teacher_gib == pytest.approx(alone.student_gib + more / GIB)


def test_a_teacher_on_the_host_leaves_two_layers_on_the_device():
    (whole,), (host,) = predict(), predict("--teacher-residency", "host")
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 2 * 4096 + 2 * 128  # matrices, norms, norms of heads
    assert whole.teacher_gib - host.teacher_gib == pytest.approx(34 * layer * 2 / GIB)
    assert whole.total_gib - host.total_gib == pytest.approx(whole.teacher_gib - host.teacher_gib)
    first, last = predict(
        "--pipeline-model-parallel-size", 2, "--teacher-residency", "host", layouts=("14,14", "35,1")
    )
    table = 151936 * 4096  # the embedding or the head
    assert first.teacher_gib == pytest.approx((2 * layer + table) * 2 / GIB)
    assert last.teacher_gib == pytest.approx((2 * layer + table + 4096) * 2 / GIB), "there is room for two"


@pytest.mark.parametrize(
    ("sizes", "measured"),  # MiB on H200s; alone: without a group of the probe's own
    [(Sizes(), 3219 - 388), (Sizes(tensor=2), 7421), (Sizes(pipeline=2), 8445)],
)
def test_memory_outside_torch_is_what_was_measured(sizes, measured):
    assert device_gib(sizes, Groups(ties_embedding=True)) == pytest.approx(measured / 1024, rel=0.03)


def test_peers_keep_their_parts_of_all_layers_and_two_whole_ones():
    """A communicator comes on top. Two teachers share it if they have the same number of peers."""
    split = "--teacher-residency", "peers", "--teacher-peers", 4
    (whole,), (peers,) = predict(data_parallel=4), predict(*split, data_parallel=4)
    group_gib = SPREAD_GIB + MESSAGE_GIB
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 2 * 4096 + 2 * 128
    assert whole.teacher_gib - peers.teacher_gib == pytest.approx((36 - 36 / 4 - 2) * layer * 2 / GIB)
    assert peers.device_gib - whole.device_gib == pytest.approx(group_gib)
    assert peers.allocated_gib - whole.allocated_gib == pytest.approx(peers.teacher_gib - whole.teacher_gib)
    for numbers, groups in (((4, 4), 1), ((4, 2), 2)):
        several_split = several(*({"residency": "peers", "peers": number} for number in numbers))
        teachers = dict(teachers=(TEACHER, TEACHER), data_parallel=4)
        (two,) = predict(settings=several_split, **teachers)
        assert two.device_gib - whole.device_gib == pytest.approx(groups * group_gib)


def test_a_teacher_in_fp8_has_one_byte_a_weight_and_scales():
    """Norms, embedding and head stay bf16. The input of the MLP's second product is there in FP8 as well."""
    matrices = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    fp8, block = ("--teacher-precision", "fp8"), ("--teacher-fp8-recipe", "blockwise")
    (whole,), (tensor,), (blocks,) = predict(), predict(*fp8), predict(*fp8, *block)
    assert whole.teacher_gib - tensor.teacher_gib == pytest.approx(36 * matrices / GIB)
    assert blocks.teacher_gib - tensor.teacher_gib == pytest.approx(36 * matrices / 128**2 * 4 / GIB)
    (host,), (peers,) = (
        predict(*fp8, "--teacher-residency", *place, data_parallel=4)
        for place in (("host",), ("peers", "--teacher-peers", 4))
    )
    layer = matrices + 2 * (2 * 4096 + 2 * 128)
    assert tensor.teacher_gib - host.teacher_gib == pytest.approx(34 * layer / GIB)
    assert peers.teacher_gib - host.teacher_gib == pytest.approx(36 / 4 * layer / GIB)
    teacher = Activations(config(), TEACHER, 2, SEQ_LENGTH, ONE_PROCESS)
    assert teacher.forward_bytes(input_bytes=1) - teacher.forward_bytes() == SEQ_LENGTH * 12288


def test_optimizer_state_on_the_host_counts_where_it_exceeds_activations():
    (device,), (host,) = predict(), predict("--optimizer-residency", "host")
    peak = device.activations_gib + device.transient_gib - WORKSPACE_GIB
    assert host.optimizer_gib == pytest.approx(max(0, device.optimizer_gib - peak)) == 0
    short = ("--seq-length", 512, "--optimizer-residency")
    (device,), (host,) = predict(*short, "device"), predict(*short, "host")
    peak = device.activations_gib + device.transient_gib - WORKSPACE_GIB
    assert host.optimizer_gib == pytest.approx(device.optimizer_gib - peak) and host.optimizer_gib > 0
    assert host.total_gib == pytest.approx(device.total_gib - peak)


def test_a_teacher_s_forward_finds_what_earlier_teachers_left():
    """With equal teachers, the second forward runs while the first one's hidden state is held.

    Messages carry one more state.
    """
    both = several({}, {})
    parallel = replace(both.parallel, pipeline_model_parallel_size=2, teacher_prefetch="0")
    both = replace(both, parallel=parallel)
    one, two = (
        predict(
            *PP2_NOT_AHEAD,
            teachers=(TEACHER,) * count,
            layouts=("0,28", *["18,18"] * count),
            settings=settings,
        )[0]
        for count, settings in ((1, None), (2, both))
    )
    state = SEQ_LENGTH * 4096 * 2
    assert two.transient_gib - one.transient_gib == pytest.approx((1 + 2) * state / GIB)


def test_distributed_optimizer_spreads_its_state_only():
    (one,), (spread,) = predict(data_parallel=4), predict("--use-distributed-optimizer", data_parallel=4)
    assert spread.optimizer_gib == pytest.approx(one.optimizer_gib / 4)
    assert (spread.student_gib, spread.gradients_gib) == (one.student_gib, one.gradients_gib)
    assert one.optimizer_gib == pytest.approx(6 * one.student_gib)  # 12 bytes beside 2


def test_description_adds_up():
    (rank,) = predict()
    text = rank.describe()
    total, parts = text.split(" GiB = ")
    assert sum(float(part.split()[1]) for part in parts.split(" + ")) == pytest.approx(float(total), abs=0.1)
    assert rank.allocated_gib == pytest.approx(rank.total_gib - rank.device_gib)


@pytest.mark.parametrize("stages", [1, 2])
def test_memory_does_not_grow_with_micro_batches_once_the_pipeline_is_full(stages, monkeypatch):
    flags = ["--pipeline-model-parallel-size", 4]
    flags += ["--num-virtual-stages-per-pipeline-rank", stages] if stages > 1 else []
    layouts = ("7,7,7,7", "9,9,9,9") if stages == 1 else ("4,4,4,4,3,3,3,3", "5,5,5,5,4,4,4,4")
    long = predict(*flags, microbatches=10**9, layouts=layouts)
    order, asked = rank_order, []
    monkeypatch.setattr(
        "mkd.plan.footprint.memory.rank_order", lambda *sizes: asked.append(sizes[3]) or order(*sizes[:3], 64)
    )
    # the whole schedule of 64
    assert predict(*flags, microbatches=64, layouts=layouts) == long and asked == [16] * 4
