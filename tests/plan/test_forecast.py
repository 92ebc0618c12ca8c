from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mkd.config.schema import XTokenConfig
from mkd.errors import UsageError
from mkd.plan.advice.forecast_text import describe_forecast
from mkd.plan.advice.notes import precision_note
from mkd.plan.forecast import PEAK_TFLOPS, Forecast
from mkd.plan.models.flops import forward_flops
from mkd.plan.models.parameters import active_parameters
from mkd.plan.times.collectives import exchange_ms
from mkd.plan.times.prefetch import ideal_ms
from tests.plan.shapes import MOE_STUDENT, MOE_TEACHER, SEQ_LENGTH, STUDENT, TEACHER, config, several, trained
from tests.run_facts import forecast_of

PP4 = ("--pipeline-model-parallel-size", 4)


def forecast(*flags, microbatches=8, teachers=(TEACHER,), document_length=1024, settings=None) -> Forecast:
    run = settings or config(*flags), STUDENT, teachers, microbatches
    return Forecast(trained(*run, document_length=document_length))


def test_one_gpu_is_as_fast_as_the_sum_of_its_parts():
    """Bodies measured alone take 148.5 + 200.2 ms on packs of short documents, and a head 41 ms; MFU 0.55."""
    one = forecast()
    assert one.step.step_ms == pytest.approx(8 * (148.5 + 200.2 + 41), rel=0.02)
    assert one.step.bubble == pytest.approx(0)
    assert one.mfu(one.step.step_ms) == pytest.approx(0.55, abs=0.01)


def test_heads_on_the_last_of_equal_stages_cost_more_than_the_formula():
    step = forecast(*PP4).step
    assert step.bubble > 3 / 11 + 0.05


def test_documents_that_do_not_divide_a_pack():
    """A pack of 8192 is 2 documents of 3000 and one of 2192."""
    flops, whole = (forecast(document_length=n).flops_per_step for n in (3000, 10**9))
    squares = SEQ_LENGTH**2 - 2 * 3000**2 - 2192**2
    assert whole - flops == 8 * 2 * squares * (3 * 28 * 2048 + 36 * 4096)


def test_mfu_is_of_all_gpus():
    four, one = forecast("--tensor-model-parallel-size", 4), forecast()
    assert (four.num_gpus, one.num_gpus) == (4, 1)
    assert four.mfu(1000) == pytest.approx(one.mfu(1000) / 4)
    assert one.mfu(1000) == pytest.approx(one.flops_per_step / 1e12 / PEAK_TFLOPS)


def test_figures_agree_with_the_prediction():
    four = forecast("--tensor-model-parallel-size", 4)
    figures, seconds = four.figures(), four.planned_step_ms() / 1000
    assert figures["tokens_per_s_per_gpu"] == pytest.approx(8 * SEQ_LENGTH / seconds / 4)
    assert figures["tflops_per_gpu"] == pytest.approx(four.mfu(four.planned_step_ms()) * PEAK_TFLOPS)
    rank = four.memory.ranks[0]
    assert figures["peak_memory_gib"] == pytest.approx(rank.total_gib - rank.device_gib)


def test_description():
    lines = describe_forecast(forecast(*PP4, "--teacher-prefetch", 0)).splitlines()
    assert lines[0].startswith("8 packs = 1 per micro-batch x 8 micro-batches")
    assert lines[1:3] == ["student layers by stage: (7, 7, 7, 7)", "teacher layers by stage: (9, 9, 9, 9)"]
    assert lines[3:5] == ["student: 1.721 billion parameters", "teacher: 8.191 billion parameters"]
    assert lines[5].count(" + ") == 1 + 4 and "forward + backward ms" in lines[5]
    assert lines[6].startswith("predicted step: ") and lines[6].endswith("(equal stages 0.273)")
    assert re.fullmatch(r"with \d+\.\d+ ms of the optimizer's update: \d+ ms", lines[7])
    assert re.match(r"1\.71 PFLOP a step on 4 GPUs: predicted MFU 0\.", lines[8]), lines[8]
    assert lines[9] == "share of the teachers in these FLOPs: 0.591"
    ranks = [f"memory of pipeline rank {rank}" for rank in range(4)]
    assert [line.split(":")[0] for line in lines[10:]] == [*ranks, "layers as CUDA graphs"]
    alone = describe_forecast(forecast(teachers=()))
    assert "teacher layers" not in alone and "share of the teachers" not in alone
    assert " on 1 GPU: predicted MFU 0." in alone


def test_the_share_of_the_teachers_is_what_a_run_without_them_saves():
    one, two = forecast(), forecast(teachers=(TEACHER, TEACHER), settings=several({"hf": "a"}, {"hf": "b"}))
    alone = forecast(teachers=()).flops_per_step
    of_teacher = 8 * forward_flops(TEACHER, [1024] * 8)
    assert one.teacher_share() == pytest.approx(of_teacher / (of_teacher + alone))
    assert two.teacher_share() == pytest.approx(2 * of_teacher / (2 * of_teacher + alone))
    assert forecast(teachers=()).teacher_share() == 0


def test_padded_attention_is_named():
    text = describe_forecast(forecast("--tensor-model-parallel-size", 16))
    assert "student attention: 8 key/value heads padded to 16 for tensor parallel" in text
    assert "teacher attention: 8 key/value heads padded to 16 for tensor parallel" in text
    assert "padded" not in describe_forecast(forecast("--tensor-model-parallel-size", 8))


def test_two_teachers_are_told_apart():
    two = forecast(
        teachers=(TEACHER, STUDENT),
        settings=several({"hf": "a/big"}, {"name": "small", "xtoken": XTokenConfig(seq_length=10_240)}),
    )
    lines = describe_forecast(two).splitlines()
    assert lines[1:4] == [
        "student layers by stage: (28,)",
        "teacher big layers by stage: (36,)",
        "teacher small layers by stage: (28,); packs of 10240 tokens of its own",
    ]
    (*_, line) = describe_forecast(
        forecast(teachers=(STUDENT,), settings=several({"name": "small", "xtoken": XTokenConfig()}))
    ).splitlines()[:3]
    assert line.endswith("packs of 8192 tokens of its own (as the student's, until its text is read)")
    one = forecast()
    own = forward_flops(STUDENT, [1280] * 8)  # 8 documents of 1024 tokens of the student
    assert two.flops_per_step - one.flops_per_step == 8 * own
    assert two.step.step_ms > one.step.step_ms


def test_a_pair_with_experts():
    """Qwen3-235B-A22B teaches Qwen3-30B-A3B on 64 GPUs. FLOPs are those of active parameters."""
    settings = config(
        *("--student-hf", "s", "--data-path", "d", "--train-iters", 1, "--use-distributed-optimizer"),
        *("--pipeline-model-parallel-size", 4, "--pipeline-layout", "auto", "--seq-length", 4096),
        *("--expert-model-parallel-size", 8, "--global-batch-size", 256),
    )
    pair = forecast_of(settings, 64, MOE_STUDENT, [MOE_TEACHER])
    tokens, table = 256 * 4096, 151936
    of_student = 3 * (active_parameters(MOE_STUDENT) - table * 2048)  # without the embedding
    of_teacher = active_parameters(MOE_TEACHER) - table * 4096
    attention = 2 * 256 * 4 * 1024**2 * (3 * 48 * 4096 + 94 * 8192)
    expected = 2 * tokens * (of_student + of_teacher) + attention
    assert pair.flops_per_step == pytest.approx(expected, rel=1e-3)  # norms multiply no matrix
    text, figures = describe_forecast(pair), pair.figures()
    assert (
        "student: 30.53 billion parameters, 3.353 billion active: 8 of 128 experts in 48 of 48 layers" in text
    )
    assert "teacher: 235.1 billion parameters, 22.19 billion active" in text and "over 8 processes" in text
    # 48 layers exchange four times, the teacher's 94 of twice the width twice, on 4 pipeline ranks
    once_ms = exchange_ms(8 * 4096, 2048, 2, 8)
    assert figures["all_to_all_ms"] == pytest.approx(16 * once_ms * (4 * 48 + 2 * 94 * 2) / 4)
    assert figures["all_to_all_share"] == pytest.approx(figures["all_to_all_ms"] / pair.planned_step_ms())
    assert f"share {figures['all_to_all_share']:.3f}" in text
    assert figures["teacher_active_parameters"] == [active_parameters(MOE_TEACHER)]
    assert "all-to-all" not in describe_forecast(forecast())


def test_teachers_ahead_fill_the_gaps_of_the_pipeline():
    """The step is shorter, the comparisons with other settings are not, and N states need memory."""
    stock, ahead = (forecast(*PP4, "--teacher-prefetch", number) for number in (0, 8))
    assert stock.prefetch is None
    assert ahead.figures()["step_time_ms"] < 0.9 * stock.figures()["step_time_ms"]
    assert ahead.figures()["step_time_ms"] >= 0.9999 * ideal_ms(ahead.rank_work(), 8)
    assert ahead.step_ms() == stock.step_ms()
    last, plain = ahead.memory.ranks[-1], stock.memory.ranks[-1]
    assert last.transient_gib - plain.transient_gib == pytest.approx(8 * 2 * SEQ_LENGTH * 4096 / 2**30)
    for work, stage in zip(ahead.rank_work(), ahead.stage_times, strict=True):
        assert work.teacher_ms + work.forward_ms == pytest.approx(stage.forward_ms)
        assert work.backward_ms == stage.backward_ms and work.teacher_ms > 0


def test_the_plan_says_why_teachers_do_not_run_ahead():
    text = describe_forecast(
        forecast(*PP4, "--pipeline-layout", "auto", "--num-virtual-stages-per-pipeline-rank", 2)
    )
    assert (
        "do not run ahead (--teacher-prefetch 0, chosen by auto): teacher forwards ahead are planned" in text
    )
    assert "run ahead" not in describe_forecast(forecast(*PP4, "--teacher-prefetch", 0))


@pytest.mark.parametrize("source", ["setting", "machine"])
def test_auto_runs_ahead_where_the_memory_fits(source):
    """The bound is 0.95 of a GPU's memory. A number that is given stays, and needs what it needs."""
    auto, none, given = (forecast(*PP4, "--teacher-prefetch", n) for n in ("auto", 0, 8))
    assert (auto.states_ahead, none.states_ahead, given.states_ahead) == (8, 0, 8)
    assert auto.prefetch == given.prefetch and auto.memory == given.memory
    assert "(--teacher-prefetch 8, chosen by auto)" in describe_forecast(auto)
    assert "(--teacher-prefetch 8): " in describe_forecast(given) and "ahead" not in describe_forecast(none)
    need_gib = max(rank.total_gib for rank in given.memory.ranks)

    def on_gpus(number: int | str, gpu_gib: float) -> Forecast:
        if source == "machine":
            return replace(forecast(*PP4, "--teacher-prefetch", number), gpu_gib=gpu_gib)
        more = "--device-memory-gib", gpu_gib
        return forecast(*PP4, "--teacher-prefetch", number, *more)

    large, small = (on_gpus("auto", (need_gib + more) / 0.95) for more in (0.001, -0.001))
    assert large.states_ahead == 8 and large.prefetch == given.prefetch
    assert small.states_ahead == 0 and small.prefetch is None and small.memory == none.memory
    assert f"chosen by auto): 8 micro-batches ahead would need {need_gib:.1f} GiB" in describe_forecast(small)
    assert on_gpus(8, 1).states_ahead == 8 and on_gpus(8, 1).memory == given.memory


def test_auto_does_not_search_for_long():
    many, more = (forecast(*PP4, microbatches=number) for number in (1024, 1025))
    assert (many.states_ahead, more.states_ahead) == (8, 0)
    assert more.prefetch is None and "chosen by auto): 4100 ranks x micro-batches" in describe_forecast(more)


def test_auto_falls_back_if_no_order_of_work_is_found(monkeypatch):
    def finds_none(*_):
        raise UsageError("no", "order", "", code="teacher-prefetch-not-possible")

    monkeypatch.setattr("mkd.plan.forecast.plan_prefetch", finds_none)
    auto, given = (forecast(*PP4, "--teacher-prefetch", n) for n in ("auto", 8))
    assert auto.prefetch is None and auto.pipeline_ms() == auto.step.step_ms
    assert "chosen by auto): no order of work with" in describe_forecast(auto)
    with pytest.raises(UsageError) as caught:
        _ = given.prefetch
    assert caught.value.code == "teacher-prefetch-not-possible"


def test_fp32_is_slower_and_gets_a_note(monkeypatch):
    """Without --bf16 products run at the rate of fp32; the note has both times."""
    given = [
        "--student-hf",
        "s",
        "--teacher-hf",
        "t",
        "--data-path",
        "d",
        "--train-iters",
        "1",
        "--global-batch-size",
        "8",
    ]
    bf16, fp32 = forecast(*given, "--bf16"), forecast(*given, "--no-bf16")
    assert fp32.planned_step_ms() > 8 * bf16.planned_step_ms()
    assert "predicted on H200 in fp32" in describe_forecast(fp32)
    (note,) = precision_note(fp32)
    assert "With --bf16, which is usual on GPUs, a step takes " in note and precision_note(bf16) == []
    monkeypatch.setattr("mkd.plan.advice.notes.milliseconds", lambda ms: "under 0.1 ms")
    assert precision_note(fp32) == ["note: this run computes in fp32. --bf16 is usual on GPUs"]


def test_auto_takes_no_order_of_work_that_is_slower_than_none():
    """The teacher's slow stages are not the student's, and two micro-batches leave no time to catch up."""
    known = ("--student-pipeline-layout", "1,1,4,22", "--teacher-pipeline-layout", "1,10,21,4")
    known = ("--pipeline-model-parallel-size", 4, *known, "--teacher-prefetch")
    auto, given = (forecast(*known, number, microbatches=2) for number in ("auto", 8))
    assert auto.states_ahead == 8 and auto.pipeline_ms() == auto.step.step_ms < given.pipeline_ms()
    assert "chosen by auto): no order of work with 8 micro-batches ahead" in describe_forecast(auto)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_few_microbatches_of_many_ranks_gain_from_teachers_ahead(microbatches):
    """At the end of a step states go on one at a time: else each rank waits for all of the one before."""
    pp8 = ("--pipeline-model-parallel-size", 8, "--pipeline-layout", "auto", "--teacher-prefetch")
    for number in (1, 8, 16):
        given = forecast(*pp8, number, microbatches=microbatches)
        assert given.pipeline_ms() < 0.9 * given.step.step_ms
