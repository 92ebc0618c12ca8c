from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.config.validate import layout_of, layouts_of, validate, virtual_stages
from mkd.errors import ErrorList
from mkd.plan.model_shape import ModelShape

BASE = ["--student-hf", "s", "--teacher-hf", "t", "--data-path", "d.jsonl", "--train-iters", "10", "--seq-length", "64"]
PP2, PP4 = (["--pipeline-model-parallel-size", n] for n in "24")
TP2 = ["--tensor-model-parallel-size", "2"]
BY_STAGES, BY_LAYERS = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"


def shape(num_layers: int = 8, **sizes) -> ModelShape:
    config = dict(model_type="llama", hidden_size=48, intermediate_size=96, num_attention_heads=3, vocab_size=307)
    return ModelShape.from_hf_config({**config, "num_hidden_layers": num_layers, **sizes})


def problems(*argv: str, world_size: int = 1, student: ModelShape | None = None, teacher: ModelShape | None = None):
    return validate(load_config([*BASE, *argv]).config, world_size, student, teacher)


def problem(*argv: str, **kwargs):
    (error,) = problems(*argv, **kwargs)
    assert error.exit_code == 64 and error.what and error.do
    return error


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
    errors = validate(load_config([]).config, 1)
    assert [error.what for error in errors] == [
        "train-iters is 0",
        "no student is given",
        "no teacher is given, but kd-ratio is 0.5",
        "no training data is given",
    ]
    assert "4 problems" in str(ErrorList(errors))


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--tensor-model-parallel-size", "0", "1 or more"),
        ("--context-parallel-size", "0", "1 or more"),
        ("--expert-model-parallel-size", "8", "1 in this release"),
        ("--kd-ratio", "1.5", "from 0 to 1"),
        ("--kd-temperature", "0.0", "from 0.01 to 100"),
        ("--micro-batch-size", "0", "1 or more"),
        ("--global-batch-size", "-4", "1 or more"),
        ("--seq-length", "0", "1 or more"),
        ("--lr", "0.0", "above 0"),
        ("--min-lr", "-1.0", "0 or more"),
        ("--adam-beta2", "1.0", "from 0 to below 1"),
        ("--lr-warmup-fraction", "1.0", "from 0 to below 1"),
        ("--log-interval", "0", "1 or more"),
        ("--distributed-timeout-minutes", "0.0", "above 0"),
        ("--exit-duration-in-mins", "0.0", "above 0"),
        ("--num-workers", "-1", "0 or more"),
    ],
)
def test_ranges(flag, value, wanted):
    error = next(error for error in problems(flag, value) if error.what.startswith(flag[2:]))
    assert error.what == f"{flag[2:]} {value} must be {wanted}"
    assert flag[2:].replace("-", "_") in error.why and error.do == f"change {flag}"


def test_sizes_of_one_are_accepted_where_nothing_else_is():
    assert problems("--expert-model-parallel-size", "1") == []


def test_zero_steps():
    error = problem("--train-iters", "0")
    assert error.what == "train-iters is 0" and error.do == "give --train-iters N"


def test_a_range_error_does_not_hide_independent_problems():
    whats = [error.what for error in problems("--lr", "-1.0", "--eval-interval", "5", "--save-interval", "5")]
    assert len(whats) == 4 and any("held-out" in what for what in whats)  # lr, min-lr above it, eval, save


def test_models():
    teacherless = ["--student-hf", "s", "--data-path", "d", "--train-iters", "1"]
    (error,) = validate(load_config(teacherless).config, 1)
    assert error.what == "no teacher is given, but kd-ratio is 0.5" and "--kd-ratio 0" in error.do
    assert validate(load_config([*teacherless, "--kd-ratio", "0"]).config, 1) == []
    assert problems("--kd-ratio", "0") == []


def test_teachers_in_yaml(tmp_path):
    def errors(teachers: str):
        path = tmp_path / "run.yaml"
        path.write_text(f"student_hf: s\ndata_path: d\ntrain_iters: 1\nteachers: {teachers}\n", encoding="utf-8")
        return validate(load_config(["--config", str(path)]).config, 1)

    (error,) = errors("[{hf: a}, {hf: b}]")
    assert error.what == "2 teachers are given: several teachers are not supported yet" and "keep one" in error.do
    (error,) = errors("[{hf: a, weight: 0.5}]")
    assert error.what == "teachers[0].weight is 0.5" and "--kd-ratio" in error.do
    (error,) = errors("[{name: a}]")
    assert error.what.startswith("no teacher is given")


def test_batch_arithmetic():
    error = problem("--micro-batch-size", "8", "--global-batch-size", "100", world_size=4)
    assert error.what == "global-batch-size 100 is not divisible by micro-batch-size 8 x data-parallel 4 = 32"
    assert error.do == "use 96 or 128"
    error = problem(*TP2, world_size=3)
    assert error.what.startswith("3 processes do not divide into replicas of 2")


def test_interleaving_needs_groups_of_microbatches():
    flags = [*PP4, BY_STAGES, "2", "--micro-batch-size", "2"]
    error = problem(*flags, "--global-batch-size", "24", world_size=8)
    assert error.what == (
        "6 micro-batches of each data-parallel rank are not a multiple of pipeline-model-parallel-size 4"
    )
    assert error.do == "use --global-batch-size 16 or 32"
    assert problem(*PP2, BY_STAGES, "2", world_size=2).do == "use --global-batch-size 2"
    error = problem(*PP2, BY_LAYERS, "2", world_size=2, student=shape(8))
    assert error.what.startswith("1 micro-batches")
    assert problems(*PP2, world_size=2) == []


def test_virtual_stage_flags_exclude_each_other_and_need_a_pipeline():
    error = problem(*PP2, BY_STAGES, "2", BY_LAYERS, "2", "--global-batch-size", "2", world_size=2)
    assert "exclude each other" in error.what and error.do == "give one of them"
    error = next(e for e in problems(BY_STAGES, "2") if "virtual" in e.what)
    assert error.what == "virtual pipeline stages need pipeline-model-parallel-size above 1"
    assert problems(BY_STAGES, "1") == []


def test_layers_that_do_not_divide():
    error = problem(*PP4, world_size=4, student=shape(30), teacher=shape(32))
    assert error.what == "30 layers do not divide over 4 pipeline stages"
    assert error.do == "use --student-pipeline-layout 8,8,7,7 or --pipeline-layout auto"
    error = problem(*PP4, world_size=4, student=shape(32), teacher=shape(30))
    assert error.do == "use --teacher-pipeline-layout 8,8,7,7 or --pipeline-layout auto"
    both = ["--student-pipeline-layout", "8,8,7,7", "--teacher-pipeline-layout", "Et*8|t*8|t*8|t*8L"]
    assert problems(*PP4, *both, world_size=4, student=shape(30), teacher=shape(32)) == []
    error = problem(*PP4, "--student-pipeline-layout", "8,8,8,8", world_size=4, student=shape(30))
    assert "has 32 layers, the model has 30" in error.what


AUTO = ["--pipeline-layout", "auto"]


def test_auto_layout_splits_what_does_not_divide():
    assert problems(*PP4, *AUTO, world_size=4, student=shape(30), teacher=shape(35)) == []
    pair = layouts_of(load_config([*BASE, *PP4, *AUTO]).config, shape(30), shape(35), 1)
    assert [sum(layout.layers) for layout in pair] == [30, 35]
    assert layouts_of(load_config([*BASE, *PP4, *AUTO]).config, shape(30), None, 1)[1] is None
    even = layouts_of(load_config([*BASE, *PP4]).config, shape(8), shape(16), 1)
    assert [layout.layers for layout in even] == [(2, 2, 2, 2), (4, 4, 4, 4)]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--kd-jsd-beta", "0.3"), "kd-jsd-beta 0.3 would have no effect"),
        (("--kd-jsd-beta", "0.3", "--kd-divergence", "mixed_kl"), "kd-jsd-beta 0.3 would have no effect"),
        (("--kd-mixed-kl-weight", "0.3", "--kd-divergence", "jsd"), "kd-mixed-kl-weight 0.3 would have no effect"),
        (("--kd-fp32-logits",), "kd-fp32-logits would have no effect"),
        (("--kd-fp32-logits", "--bf16", "--no-kd-fused-head"), "kd-fp32-logits would have no effect"),
        (("--teacher-topk", "cache", "--no-kd-fused-head"), "no-kd-fused-head would have no effect"),
        (("--kd-temperature", "1e-30"), "kd-temperature 1e-30 must be from 0.01 to 100"),
    ],
)
def test_settings_of_the_loss_that_do_nothing(flags, what):
    assert problem(*flags).what == what


def test_settings_of_the_loss_that_do_something():
    assert problems("--kd-jsd-beta", "0.3", "--kd-divergence", "jsd") == []
    assert problems("--kd-mixed-kl-weight", "0.3", "--kd-divergence", "mixed_kl") == []
    assert problems("--kd-fp32-logits", "--bf16") == []
    assert problems("--kd-ratio", "0", "--teacher-topk", "cache", "--kd-divergence", "jsd") == [], "no teacher is read"


def test_auto_layout_excludes_explicit_ones():
    by_layers = problem(*PP2, *AUTO, BY_LAYERS, "2", "--global-batch-size", "2", world_size=2, student=shape(8))
    assert by_layers.what == f"--pipeline-layout auto and {BY_LAYERS} exclude each other"
    error = problem(*PP2, *AUTO, "--student-pipeline-layout", "3,5", world_size=2, student=shape(8), teacher=shape(16))
    assert error.what == "--pipeline-layout auto and --student-pipeline-layout exclude each other"
    assert error.why and error.do == "remove --student-pipeline-layout, or --pipeline-layout auto"
    both = ["--student-pipeline-layout", "3,5", "--teacher-pipeline-layout", "8,8"]
    error = problem(*PP2, *AUTO, *both, world_size=2, student=shape(8), teacher=shape(16))
    assert "--student-pipeline-layout and --teacher-pipeline-layout" in error.what


def test_auto_layout_needs_a_layer_for_every_stage_between():
    pp8 = ["--pipeline-model-parallel-size", "8"]
    error = problem(*pp8, *AUTO, world_size=8, student=shape(5), teacher=shape(36))
    assert "do not fill 8 pipeline stages" in error.what and error.do == "use fewer pipeline stages"


def test_layers_per_virtual_stage_is_the_student_s():
    flags = [*PP2, BY_LAYERS, "2", "--global-batch-size", "2"]
    config = load_config([*BASE, *flags]).config
    assert validate(config, 2, shape(8), shape(16)) == []
    assert virtual_stages(config, shape(8)) == 2
    assert layout_of(config, "teacher", shape(16), 2).layers == (4, 4, 4, 4)
    error = problem(*PP2, BY_LAYERS, "3", "--global-batch-size", "2", world_size=2, student=shape(8), teacher=shape(16))
    assert "3 does not divide the student's 8 layers / 2 pipeline stages" in error.what


def test_mlp_width_and_sequence_shards():
    tp4 = ["--tensor-model-parallel-size", "4"]
    narrow = shape(intermediate_size=102)
    error = problem(*tp4, world_size=4, student=shape(), teacher=narrow)
    assert error.what == "the teacher's ffn_hidden_size 102 is not divisible by tensor-model-parallel-size 4"
    assert error.do == "use --tensor-model-parallel-size 3"
    error = problem(*tp4, "--sequence-parallel", "--seq-length", "63", "--micro-batch-size", "2", world_size=4)
    assert error.what == (
        "seq-length 63 x micro-batch-size 2 = 126 tokens are not divisible by tensor-model-parallel-size 4"
    )
    assert "--seq-length 64" in error.do


def test_context_parallel_lengths():
    cp2 = ["--context-parallel-size", "2"]
    assert problems(*cp2, "--seq-length", "60", world_size=2) == []
    error = problem(*cp2, "--seq-length", "62", world_size=2)
    assert error.what == "seq-length 62 is not divisible by 2 x context-parallel-size 2 = 4" and error.why
    assert error.do == "use --seq-length 64"
    sharded = [*cp2, "--tensor-model-parallel-size", "3", "--sequence-parallel"]
    assert problem(*sharded, "--seq-length", "62", world_size=6).do == "use --seq-length 72"
    error = problem(*sharded, "--seq-length", "64", world_size=6)
    assert error.what == (
        "seq-length 64 x micro-batch-size 1 = 64 tokens are not divisible by tensor-model-parallel-size 3 "
        "x context-parallel-size 2 = 6"
    )
    assert error.do == "use --seq-length 72, or leave --sequence-parallel away"
    assert problems(*sharded, "--seq-length", "72", world_size=6) == []


def test_context_parallel_with_a_sliding_window_needs_heads_that_divide():
    window = shape(num_attention_heads=6, num_key_value_heads=3, model_type="mistral", sliding_window=16)
    error = problem("--context-parallel-size", "2", world_size=2, student=window, teacher=shape())
    assert error.what == "the student's 3 key/value heads of a process are not divisible by context-parallel-size 2"
    assert "16 tokens" in error.why
    assert problems("--context-parallel-size", "3", "--seq-length", "60", world_size=3, student=window) == []
    assert problems("--context-parallel-size", "2", *TP2, world_size=4, student=window) == []  # 3 heads padded to 4


def test_context_parallel_processes_are_not_data_parallel():
    cp2 = ["--context-parallel-size", "2", "--global-batch-size", "3"]
    assert problem(*cp2, world_size=4).what.endswith("micro-batch-size 1 x data-parallel 2 = 2")
    assert problems(*cp2, world_size=2) == []
    assert problem("--context-parallel-size", "2", world_size=3).what.startswith("3 processes do not divide into replicas of 2")


def test_learning_rate_schedule():
    assert problem("--lr", "1e-5", "--min-lr", "1e-4").what == "min-lr 0.0001 is above lr 1e-05"
    error = problem("--lr-warmup-iters", "10")
    assert error.what == "lr-warmup-iters 10 is not below the 10 decay iterations"
    assert problems("--lr-warmup-iters", "10", "--lr-decay-iters", "11") == []
    assert "exclude each other" in problem("--lr-warmup-iters", "1", "--lr-warmup-fraction", "0.1").what
    assert "needs lr-wsd-decay-iters" in problem("--lr-decay-style", "WSD").what
    assert problems("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "3") == []


def test_evaluation_needs_held_out_data():
    error = problem("--eval-interval", "5")
    assert error.what == "eval-interval 5 has no held-out data" and "--valid-data-path" in error.do
    assert problems("--eval-interval", "5", "--split", "99,1,0") == []
    assert problems("--eval-interval", "5", "--valid-data-path", "v.jsonl") == []
    assert problems("--eval-interval", "0") == []


@pytest.mark.parametrize("split", ["a,b", "1,2,3,4", "0,0,0", "1,-1,0", "inf"])
def test_split(split):
    assert problem("--split", split).what == f"split {split} is not a split"


def test_checkpoint_folders():
    assert problem("--save-interval", "5").do == "give --save DIR"
    assert problem("--ckpt-step", "5").do == "give --load DIR"
    assert problems("--save-interval", "5", "--save", "c", "--ckpt-step", "5", "--load", "c") == []


def test_overlap_needs_the_distributed_optimizer():
    error = problem("--overlap-param-gather")
    assert error.do == "add --use-distributed-optimizer --overlap-grad-reduce"
    assert problems("--overlap-param-gather", "--use-distributed-optimizer", "--overlap-grad-reduce") == []


def test_recomputation():
    error = problem("--recompute-granularity", "full", "--recompute-method", "block")
    assert "needs recompute-method and recompute-num-layers" in error.what
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    assert problems(*full) == [] == problems("--recompute-granularity", "selective")
    error = problem("--recompute-granularity", "selective", "--recompute-num-layers", "1")
    assert error.what == "recompute-num-layers would have no effect"
