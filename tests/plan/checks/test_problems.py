from __future__ import annotations

from dataclasses import replace

import pytest

from mkd.config.load import load_config
from mkd.errors import ErrorList
from mkd.plan.models.model_shape import ModelShape
from tests.reported import Reported, reports
from tests.run_facts import facts_of, problems_of

BASE = [
    "--student-hf",
    "s",
    "--teacher-hf",
    "t",
    "--data-path",
    "d.jsonl",
    "--train-iters",
    "10",
    "--seq-length",
    "64",
]
PP2, PP4 = (["--pipeline-model-parallel-size", n] for n in "24")
TP2 = ["--tensor-model-parallel-size", "2"]
BY_STAGES, BY_LAYERS = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"


def shape(num_layers: int = 8, **sizes) -> ModelShape:
    config = dict(
        model_type="llama", hidden_size=48, intermediate_size=96, num_attention_heads=3, vocab_size=307
    )
    return ModelShape.from_hf_config({**config, "num_hidden_layers": num_layers, **sizes})


def problems(
    *argv: str, world_size: int = 1, student: ModelShape | None = None, teacher: ModelShape | None = None
):
    return problems_of(load_config([*BASE, *argv]).config, world_size, student, (teacher,))


def problem(*argv: str, **kwargs):
    (error,) = problems(*argv, **kwargs)
    assert error.exit_code == 64 and error.what and error.do
    return error


def codes(*argv: str, **kwargs) -> list[str]:
    return reports(problems(*argv, **kwargs))


def test_a_sound_configuration():
    assert problems(student=shape(), teacher=shape(16)) == []
    flags = [*TP2, *PP2, BY_STAGES, "2", "--global-batch-size", "4", "--sequence-parallel"]
    assert problems(*flags, world_size=8, student=shape(), teacher=shape(16)) == []


def test_heads_and_vocabulary_need_not_divide():
    odd = shape(num_attention_heads=3, num_key_value_heads=3, vocab_size=307)
    assert problems(*TP2, world_size=2, student=odd, teacher=odd) == []


def test_sequence_parallel_without_tensor_parallel_is_harmless():
    assert problems("--sequence-parallel", "--seq-length", "63", student=shape()) == []


def test_empty_command_line_reports_everything():
    errors = problems_of(load_config([]).config, 1)
    assert reports(ErrorList(errors)) == [
        "add-flag: train-iters is",
        "model-missing: no student is given",
        "model-missing: no teacher is given",
        "data-path-missing: no training data is given",
    ]


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--tensor-model-parallel-size", "0", "1 or more"),
        ("--context-parallel-size", "0", "1 or more"),
        ("--expert-model-parallel-size", "0", "1 or more"),
        ("--moe-aux-loss-coeff", "-1.0", "0 or more"),
        ("--kd-ratio", "1.5", "from 0 to 1"),
        ("--kd-temperature", "0.0", "from 0.01 to 100"),
        ("--micro-batch-size", "0", "1 or more"),
        ("--global-batch-size", "-4", "1 or more"),
        ("--seq-length", "0", "1 or more"),
        ("--lr", "-1.0", "from 0 to 1000"),
        ("--lr", "1e+38", "from 0 to 1000"),
        ("--eval-iters", "-1", "0 (never) or more"),
        ("--min-lr", "-1.0", "from 0 to 1000"),
        ("--adam-beta2", "1.0", "from 0 to below 1"),
        ("--log-interval", "0", "1 or more"),
        ("--distributed-timeout-minutes", "0.0", "above 0 and at most a million"),
        ("--exit-duration-in-mins", "0.0", "above 0"),
        ("--num-workers", "-1", "0 or more"),
        ("--eval-num-fewshot", "-1", "0 or more"),
        ("--teacher-weighting-temperature", "0.0", "from 0.01 to 100"),
        ("--xtoken-seq-length", "0", "1 or more"),
        ("--xtoken-top-k", "0", "1 or more"),
    ],
)
def test_ranges(flag, value, wanted):
    error = next(error for error in problems(flag, value) if error.code == "out-of-range")
    assert error.what == f"{flag[2:]} {value} must be {wanted}"
    assert error.why.startswith(f"{flag[2:]}: ") and error.do == f"change {flag}"


def test_sizes_of_one_are_accepted_where_nothing_else_is():
    assert problems("--expert-model-parallel-size", "1") == []


def test_zero_steps():
    assert Reported.of(problem("--train-iters", "0")) == "add-flag: train-iters is"


def test_a_range_error_does_not_hide_independent_problems():
    found = codes("--lr", "-1.0", "--eval-interval", "5", "--save-interval", "5", "--no-save")
    assert found == [
        "out-of-range: must be",
        "data-path-missing: has no held-out data",
        "exclude-each-other: contradicts no-save",
    ]


def test_models():
    teacherless = ["--student-hf", "s", "--data-path", "d", "--train-iters", "1"]
    (error,) = problems_of(load_config(teacherless).config, 1)
    assert error.code == "model-missing" and "--kd-ratio 0" in error.do
    assert problems_of(load_config([*teacherless, "--kd-ratio", "0"]).config, 1) == []
    assert problems("--kd-ratio", "0") == []


def test_batch_arithmetic():
    error = problem("--micro-batch-size", "8", "--global-batch-size", "100", world_size=4)
    assert error.code == "batch-not-divisible" and "96 or 128" in error.do
    assert Reported.of(problem(*TP2, world_size=3)) == "world-not-divisible: cannot be divided into replicas"


def test_interleaving_needs_groups_of_microbatches():
    flags = [*PP4, BY_STAGES, "2", "--micro-batch-size", "2"]
    error = problem(*flags, "--global-batch-size", "24", world_size=8)
    assert error.code == "batch-not-divisible" and error.do.endswith("--global-batch-size 16 or 32")
    assert problem(*PP2, BY_STAGES, "2", world_size=2).do.endswith("--global-batch-size 2")
    error = problem(*PP2, BY_LAYERS, "2", world_size=2, student=shape(8))
    assert error.code == "batch-not-divisible" and error.what.startswith("1 ")
    assert problems(*PP2, world_size=2) == []


def test_virtual_stage_flags_exclude_each_other_and_need_a_pipeline():
    error = problem(*PP2, BY_STAGES, "2", BY_LAYERS, "2", "--global-batch-size", "2", world_size=2)
    assert Reported.of(error) == "exclude-each-other: num-virtual-stages-per"
    assert "remove-flag: virtual pipeline stages need" in codes(BY_STAGES, "2")
    assert problems(BY_STAGES, "1") == []


def test_layers_that_do_not_divide():
    error = problem(*PP4, world_size=4, student=shape(30), teacher=shape(32))
    assert error.code == "layers-not-divisible" and error.what.startswith("student: 30 layers")
    assert "--student-pipeline-layout 8,8,7,7" in error.do
    error = problem(*PP4, world_size=4, student=shape(32), teacher=shape(30))
    assert error.code == "layers-not-divisible" and "--teacher-pipeline-layout 8,8,7,7" in error.do
    both = ["--student-pipeline-layout", "8,8,7,7", "--teacher-pipeline-layout", "Et*8|t*8|t*8|t*8L"]
    assert problems(*PP4, *both, world_size=4, student=shape(30), teacher=shape(32)) == []
    error = problem(*PP4, "--student-pipeline-layout", "8,8,8,8", world_size=4, student=shape(30))
    assert error.code == "layout-not-valid" and error.what.startswith("student: --student-pipeline-layout")
    both = problems(
        *PP4, BY_STAGES, "2", "--global-batch-size", "4", world_size=4, student=shape(4), teacher=shape(4)
    )
    assert [(Reported.of(error), error.what.partition(":")[0]) for error in both] == [
        ("layers-not-divisible: layers do not divide over", "student"),
        ("layers-not-divisible: layers do not divide over", "teacher"),
    ]


AUTO = ["--pipeline-layout", "auto"]


def test_auto_layout_splits_what_does_not_divide():
    assert problems(*PP4, *AUTO, world_size=4, student=shape(30), teacher=shape(35)) == []
    auto = load_config([*BASE, *PP4, *AUTO]).config
    student, (teacher,) = facts_of(auto, 4, shape(30), [shape(35)]).layouts
    assert (sum(student.layers), sum(teacher.layers)) == (30, 35)
    assert facts_of(auto, 4, shape(30)).layouts.teachers == ()
    even = load_config([*BASE, *PP4]).config
    student, (teacher,) = facts_of(even, 4, shape(8), [shape(16)]).layouts
    assert (student.layers, teacher.layers) == ((2, 2, 2, 2), (4, 4, 4, 4))


def three_models(tmp_path, second: str = "", *argv: str):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"teachers: [{{hf: a/big, pipeline_layout: '3,5'}}, {{hf: b{second}}}]\n", encoding="utf-8"
    )
    words = [word for word in BASE if word not in ("--teacher-hf", "t")]
    return load_config([*words, *PP2, "--config", str(path), *argv]).config


def test_every_teacher_has_its_own_layout(tmp_path):
    config = three_models(tmp_path, ", pipeline_layout: '2,1'")
    assert problems_of(config, 2, shape(4), [shape(8), shape(3)]) == []
    student, teachers = facts_of(config, 2, shape(4), [shape(8), shape(3)]).layouts
    assert [layout.layers for layout in (student, *teachers)] == [(2, 2), (3, 5), (2, 1)]
    (error,) = problems_of(three_models(tmp_path), 2, shape(4), [shape(8), shape(3)])
    assert error.code == "layers-not-divisible" and "teachers[1].pipeline_layout 2,1" in error.do
    (error,) = problems_of(three_models(tmp_path), 2, shape(4), [None, shape(3)])
    assert "teachers[1].pipeline_layout" in error.do, "a shape that could not be read keeps its place"
    (error,) = problems_of(
        three_models(tmp_path, ", pipeline_layout: '2,1'", *AUTO), 2, shape(4), [shape(8), shape(3)]
    )
    assert Reported.of(error) == "exclude-each-other: --pipeline-layout auto and"
    assert "--teacher-pipeline-layout and teachers[1].pipeline_layout" in error.what


def test_auto_layout_balances_all_teachers(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("teachers: [{hf: a}, {hf: b}]\n", encoding="utf-8")
    words = [word for word in BASE if word not in ("--teacher-hf", "t")]
    config = load_config([*words, *PP4, *AUTO, "--config", str(path)]).config
    assert problems_of(config, 4, shape(30), [shape(35), shape(9)]) == []
    student, teachers = facts_of(config, 4, shape(30), [shape(35), shape(9)]).layouts
    assert [sum(layout.layers) for layout in (student, *teachers)] == [30, 35, 9]
    assert problems_of(config, 4, shape(30), [None, shape(9)]) == [], (
        "whoever could not read the shape has reported it"
    )
    (error,) = problems_of(config, 4, shape(30), [shape(35), shape(1)])
    assert error.code == "layers-not-divisible" and "35 and 1" in error.what


def test_problems_of_a_shape_name_the_teacher(tmp_path):
    config = three_models(
        tmp_path, ", name: small, pipeline_layout: '2,2'", "--tensor-model-parallel-size", "4"
    )
    (error,) = problems_of(config, 8, shape(4), [shape(8), shape(4, intermediate_size=102)])
    assert error.code == "model-not-divisible" and error.what.startswith("the teacher small's")


def test_auto_layout_excludes_explicit_ones():
    by_layers = problem(
        *PP2, *AUTO, BY_LAYERS, "2", "--global-batch-size", "2", world_size=2, student=shape(8)
    )
    assert by_layers.code == "exclude-each-other" and BY_LAYERS in by_layers.do
    error = problem(
        *PP2, *AUTO, "--student-pipeline-layout", "3,5", world_size=2, student=shape(8), teacher=shape(16)
    )
    assert error.code == "exclude-each-other" and "--student-pipeline-layout," in error.do
    listed = problems(*PP2, *AUTO, BY_LAYERS, "3", "--global-batch-size", "2", world_size=2, student=shape(8))
    assert reports(listed) == [
        "exclude-each-other: --pipeline-layout auto and",
        "layers-not-divisible: num-layers-per-virtual-pipeline-stage",
    ]
    both = ["--student-pipeline-layout", "3,5", "--teacher-pipeline-layout", "8,8"]
    error = problem(*PP2, *AUTO, *both, world_size=2, student=shape(8), teacher=shape(16))
    assert "--student-pipeline-layout and --teacher-pipeline-layout" in error.what


def test_auto_layout_needs_a_layer_for_every_stage_between():
    pp8 = ["--pipeline-model-parallel-size", "8"]
    error = problem(*pp8, *AUTO, world_size=8, student=shape(5), teacher=shape(36))
    assert Reported.of(error) == "layers-not-divisible: pipeline-layout auto: models of"


def test_layers_per_virtual_stage_is_the_student_s():
    flags = [*PP2, BY_LAYERS, "2", "--global-batch-size", "2"]
    config = load_config([*BASE, *flags]).config
    assert problems_of(config, 2, shape(8), [shape(16)]) == []
    facts = facts_of(config, 2, shape(8), [shape(16)])
    assert facts.virtual_stages == 2 and facts.layouts.teachers[0].layers == (4, 4, 4, 4)
    error = problem(
        *PP2, BY_LAYERS, "3", "--global-batch-size", "2", world_size=2, student=shape(8), teacher=shape(16)
    )
    assert Reported.of(error) == "layers-not-divisible: num-layers-per-virtual-pipeline-stage"


def test_mlp_width_and_sequence_shards():
    tp4 = ["--tensor-model-parallel-size", "4"]
    narrow = shape(intermediate_size=102)
    error = problem(*tp4, world_size=4, student=shape(), teacher=narrow)
    assert error.code == "model-not-divisible" and error.what.startswith("the teacher's")
    assert error.do.endswith("--tensor-model-parallel-size 2")  # 3 does not divide the processes
    error = problem(
        *tp4, "--sequence-parallel", "--seq-length", "63", "--micro-batch-size", "2", world_size=4
    )
    assert error.code == "length-not-divisible" and "--seq-length 64" in error.do


def test_context_parallel_lengths():
    cp2 = ["--context-parallel-size", "2"]
    assert problems(*cp2, "--seq-length", "60", world_size=2) == []
    error = problem(*cp2, "--seq-length", "62", world_size=2)
    assert error.code == "length-not-divisible" and error.do.endswith("--seq-length 64")
    sharded = [*cp2, "--tensor-model-parallel-size", "3", "--sequence-parallel"]
    assert problem(*sharded, "--seq-length", "62", world_size=6).do.endswith("--seq-length 72")
    error = problem(*sharded, "--seq-length", "64", world_size=6)
    assert error.code == "length-not-divisible" and "--seq-length 72" in error.do
    assert problems(*sharded, "--seq-length", "72", world_size=6) == []


def test_packs_of_a_teacher_divide_too(tmp_path):
    cp2, own = ["--context-parallel-size", "2"], "--xtoken-seq-length"
    assert problems(*cp2, own, "92", world_size=2) == []
    error = problem(*cp2, own, "90", world_size=2)
    assert error.code == "length-not-divisible" and error.do.endswith("--xtoken-seq-length 92")
    error = problem(*TP2, "--sequence-parallel", own, "91", world_size=2)
    assert error.code == "length-not-divisible" and error.what.startswith("xtoken-seq-length 91")
    path = tmp_path / "run.yaml"
    path.write_text("teachers: [{}, {hf: b, xtoken: {seq_length: 90}}]\n", encoding="utf-8")
    error = problem(*cp2, "--config", str(path), world_size=2)
    assert error.what.startswith("teachers[1].xtoken.seq_length 90")
    assert error.do.endswith("teachers[1].xtoken.seq_length 92")


def test_context_parallel_with_a_sliding_window_needs_heads_that_divide():
    window = shape(num_attention_heads=6, num_key_value_heads=3, model_type="mistral", sliding_window=16)
    error = problem("--context-parallel-size", "2", world_size=2, student=window, teacher=shape())
    assert error.code == "model-not-divisible" and error.what.startswith("the student's 3")
    assert "16 tokens" in error.why
    assert problems("--context-parallel-size", "3", "--seq-length", "60", world_size=3, student=window) == []
    # 3 heads padded to 4
    assert problems("--context-parallel-size", "2", *TP2, world_size=4, student=window) == []


def test_context_parallel_does_not_take_sinks():
    plain = shape()
    sinks = replace(plain, layers=tuple(replace(layer, attention_sinks=True) for layer in plain.layers))
    for pair in (dict(student=sinks, teacher=plain), dict(student=plain, teacher=sinks)):
        error = problem("--context-parallel-size", "2", world_size=2, **pair)
        assert Reported.of(error) == "exclude-each-other: does not work with the"
        assert problems(*TP2, world_size=2, **pair) == []


def test_context_parallel_processes_are_not_data_parallel():
    cp2 = ["--context-parallel-size", "2", "--global-batch-size", "3"]
    error = problem(*cp2, world_size=4)
    assert error.code == "batch-not-divisible" and error.what.endswith("data-parallel 2 = 2")
    assert problems(*cp2, world_size=2) == []
    assert (
        Reported.of(problem("--context-parallel-size", "2", world_size=3))
        == "world-not-divisible: cannot be divided into replicas"
    )


def test_learning_rate_schedule():
    assert Reported.of(problem("--lr", "1e-5", "--min-lr", "1e-4")) == "numbers-contradict: is above lr"
    assert Reported.of(problem("--lr-warmup-iters", "10")) == "numbers-contradict: is not below the"
    assert problems("--lr-warmup-iters", "10", "--lr-decay-iters", "11") == []
    assert Reported.of(problem("--lr-decay-style", "WSD")) == "add-flag: lr-decay-style WSD needs"
    assert problems("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "3") == []


def test_evaluation_needs_held_out_data():
    assert Reported.of(problem("--eval-interval", "5")) == "data-path-missing: has no held-out data"
    assert problems("--eval-interval", "5", "--split", "99,1,0") == []
    assert problems("--eval-interval", "5", "--valid-data-path", "v.jsonl") == []
    assert problems("--eval-interval", "0") == []


def test_evaluation_tasks():
    tasks = ["--eval-multiple-choice", "mmlu.jsonl", "--eval-completions", "he.jsonl"]
    error = problem(*tasks)
    assert error.code == "remove-flag" and "--eval-interval" in error.do
    assert error.what.startswith("eval-multiple-choice and eval-completions ")
    assert problems(*tasks, "--eval-interval", "5") == [], "no held-out data: the tasks are what is evaluated"
    assert Reported.of(problem("--eval-num-fewshot", "5")) == "remove-flag: no effect"
    assert problems(*tasks, "--eval-interval", "5", "--eval-num-fewshot", "5") == []


@pytest.mark.parametrize("split", ["a,b", "1,2,3,4", "0,0,0", "1,-1,0", "inf"])
def test_split(split):
    assert Reported.of(problem("--split", split)) == "value-not-valid: is not a split"


def test_checkpoint_folders():
    assert problems("--save-interval", "5") == []
    assert (
        Reported.of(problem("--save-interval", "5", "--no-save")) == "exclude-each-other: contradicts no-save"
    )
    assert Reported.of(problem("--save", "c", "--no-save")) == "exclude-each-other: contradicts no-save"
    assert Reported.of(problem("--ckpt-step", "5")) == "add-flag: has no folder"
    assert problems("--save-interval", "5", "--save", "c", "--ckpt-step", "5", "--load", "c") == []


def test_overlap_needs_the_distributed_optimizer():
    assert Reported.of(problem("--overlap-param-gather")) == "add-flag: overlap-param-gather needs"
    assert problems("--overlap-param-gather", "--use-distributed-optimizer", "--overlap-grad-reduce") == []


def test_recomputation():
    error = problem("--recompute-granularity", "full", "--recompute-method", "block")
    assert Reported.of(error) == "add-flag: recompute-granularity full needs"
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    assert problems(*full) == [] == problems("--recompute-granularity", "selective")
    error = problem("--recompute-granularity", "selective", "--recompute-num-layers", "1")
    assert error.code == "remove-flag" and error.what.startswith("recompute-num-layers ")
