from __future__ import annotations

import pytest

from mkd.config.load import load_config
from mkd.plan.checks.validate import validate

BASE = ["--student-hf", "s", "--data-path", "d.jsonl", "--train-iters", "10", "--seq-length", "64"]
TWO = "[{hf: a}, {hf: b}]"


@pytest.fixture
def problems(tmp_path):
    def check(teachers: str, *argv: str):
        path = tmp_path / "run.yaml"
        path.write_text(f"teachers: {teachers}\n", encoding="utf-8")
        errors = validate(load_config([*BASE, "--config", str(path), *argv]).config, 1)
        assert all(error.exit_code == 64 and error.what and error.why and error.do for error in errors)
        return errors

    return check


@pytest.fixture
def problem(problems):
    def check(*args: str):
        (error,) = problems(*args)
        return error

    return check


def test_sound_teachers(problems):
    assert (
        problems("[{hf: a}]")
        == problems(TWO)
        == problems("[{hf: x/a, xtoken: {}}, {load: y/a}, {hf: z}]")
        == []
    )
    assert (
        problems("[{hf: a, weight: 3}, {hf: b, weight: 0.5, xtoken: {loss: gold, relaxed_map: true}}]") == []
    )
    assert problems("[{hf: a, divergence: jsd, jsd_beta: 0.1, temperature: 2}, {hf: b}]") == []
    assert problems(TWO, "--teacher-weighting", "ce", "--teacher-weighting-temperature", "0.5") == []
    assert (
        problems(TWO, "--teacher-combination", "average")
        == problems(TWO, "--teacher-combination", "select")
        == []
    )
    assert problems("[{hf: a, weight: 2}, {hf: b}]", "--teacher-combination", "average") == []


def test_no_model(problem):
    assert problem("[{name: a}]").what == "no teacher is given, but kd-ratio is 0.5"
    assert problem("[{}, {}]").what == "no teacher is given, but kd-ratio is 0.5"
    assert problem("[{hf: a}, {name: b}]").what == "teachers[1] names no model"


def test_plain_training_reads_no_teacher(problems):
    assert problems(TWO, "--kd-ratio", "0") == []
    assert problems("[{hf: a, xtoken: {loss: uld, top_k: 3}}]", "--kd-ratio", "0") == [], "no teacher is read"


@pytest.mark.parametrize(
    ("teachers", "what"),
    [
        ("[{hf: a, weight: 0.5}]", "teachers[0].weight is 0.5"),
        ("[{hf: a, weight: 0}, {hf: b}]", "teachers[0].weight 0.0 must be above 0"),
        ("[{hf: a}, {hf: b, weight: -1}]", "teachers[1].weight -1.0 must be above 0"),
        ("[{hf: a, weight: 0}, {hf: b, weight: 0}]", "the weights of all 2 teachers are 0"),
    ],
)
def test_weights(problem, teachers, what):
    assert problem(teachers).what == what


def test_weights_that_nobody_reads(problem, problems):
    error = problem("[{hf: a}, {hf: b, weight: 2}]", "--teacher-combination", "select")
    assert error.what == "teachers[1].weight 2.0 would have no effect" and "select" in error.why
    assert problems("[{hf: a}, {hf: b, weight: 2}]", "--teacher-weighting", "entropy") == []


def test_names(problem, problems):
    assert problem("[{hf: a, name: x}, {hf: b, name: x}]").what == "2 teachers have the name x"
    assert problem("[{hf: a, name: x y}]").what == "teacher name 'x y' is not a plain word"
    assert problems("[{hf: 'run 1/model'}, {hf: 'run 2/model'}]") == [], (
        "names that mkd makes are plain and unique"
    )


def test_stored_probabilities(problem, problems):
    assert problem("[{topk: a}, {hf: b}]").what == "--teacher-topk is given, and 2 teachers"
    assert problem("[{hf: b}, {topk: a}]").what == "teachers[1].topk is given, and 2 teachers"
    both = problems("[{topk: a, residency: host}, {topk: b, residency: host}]", "--kd-divergence", "jsd")
    assert [error.what for error in both] == [
        "--teacher-topk and teachers[1].topk are given, and 2 teachers",
        "kd-divergence jsd cannot be computed from --teacher-topk and teachers[1].topk",
        "teacher-residency host would have no effect",
    ]
    assert (
        problem("[{topk: a, xtoken: {}}]").what
        == "--teacher-topk is given for a teacher with xtoken settings"
    )
    assert problem("[{topk: a, residency: host}]").what == "teacher-residency host would have no effect"
    for divergence in ("jsd", "skewed_forward_kl"):
        error = problem("[{topk: a}]", "--kd-divergence", divergence)
        assert error.what == f"kd-divergence {divergence} cannot be computed from --teacher-topk"
    assert problem("[{topk: a, divergence: reverse_kl}]").what.startswith(
        "kd-divergence reverse_kl cannot be computed"
    )
    assert (
        problems("[{topk: a}]") == problems("[{topk: a}]", "--kd-ratio", "0", "--kd-divergence", "jsd") == []
    )


@pytest.mark.parametrize(
    ("teachers", "flags", "what"),
    [
        ("[{hf: a}]", ("--teacher-combination", "select"), "teacher-combination select"),
        ("[{hf: a}]", ("--teacher-weighting", "ce"), "teacher-weighting ce"),
        (TWO, ("--teacher-weighting", "ce", "--teacher-combination", "average"), "teacher-weighting ce"),
        (TWO, ("--teacher-weighting-temperature", "2"), "teacher-weighting-temperature 2.0"),
        (
            "[{hf: a}, {hf: b, temperature: 2}]",
            ("--teacher-combination", "average"),
            "teachers[1].temperature 2.0",
        ),
        (
            "[{hf: a, divergence: jsd}, {hf: b}]",
            ("--teacher-combination", "average"),
            "teachers[0].divergence jsd",
        ),
    ],
)
def test_settings_of_several_teachers_that_do_nothing(problem, teachers, flags, what):
    assert problem(teachers, *flags).what == f"{what} would have no effect"


def test_an_average_needs_the_same_tokens(problem):
    error = problem("[{hf: a}, {hf: b, xtoken: {}}]", "--teacher-combination", "average")
    assert error.what == "teacher-combination average, but teachers[1] has xtoken settings"
    assert error.do == "use --teacher-combination weighted_sum"


@pytest.mark.parametrize(
    ("teacher", "flags", "what"),
    [
        ("", ("--kd-jsd-beta", "0.3"), "kd-jsd-beta 0.3"),
        ("", ("--kd-jsd-beta", "0.3", "--kd-divergence", "mixed_kl"), "kd-jsd-beta 0.3"),
        ("", ("--kd-mixed-kl-weight", "0.3", "--kd-divergence", "jsd"), "kd-mixed-kl-weight 0.3"),
        ("divergence: jsd, jsd_beta: 0.2", ("--kd-jsd-beta", "0.3"), "kd-jsd-beta 0.3"),
        ("divergence: jsd", ("--kd-divergence", "reverse_kl"), "kd-divergence reverse_kl"),
        ("jsd_beta: 0.3", (), "teachers[0].jsd_beta 0.3"),
        ("", ("--kd-skew-alpha", "0.3", "--kd-divergence", "jsd"), "kd-skew-alpha 0.3"),
        ("skew_alpha: 0.3, divergence: jsd", (), "teachers[0].skew_alpha 0.3"),
        ("mixed_kl_weight: 0.3, divergence: jsd", (), "teachers[0].mixed_kl_weight 0.3"),
        ("xtoken: {loss: uld}, jsd_beta: 0.3", (), "teachers[0].jsd_beta 0.3"),
        ("xtoken: {loss: uld}, divergence: jsd", (), "teachers[0].divergence jsd"),
        ("xtoken: {loss: uld}", ("--kd-divergence", "jsd"), "kd-divergence jsd"),
        ("xtoken: {loss: gold, top_k: 3}", (), "teachers[0].xtoken.top_k 3"),
        ("xtoken: {relaxed_map: true}", (), "teachers[0].xtoken.relaxed_map True"),
        ("xtoken: {loss: uld, projection: p}", (), "teachers[0].xtoken.projection p"),
        ("", ("--kd-fp32-logits",), "kd-fp32-logits"),
        ("", ("--kd-fp32-logits", "--bf16", "--no-kd-fused-head"), "kd-fp32-logits"),
        ("topk: c", ("--no-kd-fused-head",), "no-kd-fused-head"),
        ("topk: c", ("--kd-fp32-logits", "--bf16"), "kd-fp32-logits"),
    ],
)
def test_settings_of_the_loss_that_do_nothing(problem, teacher, flags, what):
    assert problem(f"[{{hf: t, {teacher}}}]", *flags).what == f"{what} would have no effect"


@pytest.mark.parametrize(
    ("teachers", "flags"),
    [
        ("[{hf: t}]", ("--kd-jsd-beta", "0.3", "--kd-divergence", "jsd")),
        ("[{hf: t}]", ("--kd-skew-alpha", "0.3", "--kd-divergence", "skewed_forward_kl")),
        ("[{hf: t, divergence: skewed_reverse_kl, skew_alpha: 0.0}]", ()),
        ("[{hf: t}]", ("--kd-mixed-kl-weight", "0.3", "--kd-divergence", "mixed_kl")),
        ("[{hf: t}]", ("--kd-fp32-logits", "--bf16")),
        ("[{hf: t}, {hf: u, divergence: jsd}]", ("--kd-jsd-beta", "0.3")),
        ("[{hf: t}, {hf: u, xtoken: {loss: uld}}]", ("--kd-divergence", "jsd")),
        ("[{hf: t, xtoken: {top_k: 3, projection: p}}]", ("--kd-divergence", "reverse_kl")),
        ("[{hf: t, xtoken: {loss: h_kl, relaxed_map: true, exact_token_match_only: true}}]", ()),
    ],
)
def test_settings_of_the_loss_that_do_something(problems, teachers, flags):
    assert problems(teachers, *flags) == []


@pytest.mark.parametrize("teachers", ["[{hf: t, xtoken: {}}]", TWO])
def test_chunks_and_several_teachers_need_the_fused_head(problem, teachers):
    assert problem(teachers, "--no-kd-fused-head").do == "remove --no-kd-fused-head"


@pytest.mark.parametrize(
    ("teacher", "what"),
    [
        ("temperature: 0", "teachers[1].temperature 0.0 must be from 0.01 to 100"),
        ("temperature: 1e-30", "teachers[1].temperature 1e-30 must be from 0.01 to 100"),
        ("divergence: jsd, jsd_beta: 2", "teachers[1].jsd_beta 2.0 must be from 0 to 1"),
        ("divergence: mixed_kl, mixed_kl_weight: -1", "teachers[1].mixed_kl_weight -1.0 must be from 0 to 1"),
        (
            "divergence: skewed_forward_kl, skew_alpha: 1",
            "teachers[1].skew_alpha 1.0 must be from 0 to below 1",
        ),
        ("xtoken: {top_k: 0}", "teachers[1].xtoken.top_k 0 must be 1 or more"),
        ("xtoken: {seq_length: 0}", "teachers[1].xtoken.seq_length 0 must be 1 or more"),
    ],
)
def test_ranges_of_every_teacher(problem, teacher, what):
    error = problem(f"[{{hf: t}}, {{hf: u, {teacher}}}]")
    assert error.what == what and error.do == f"change {what.split()[0]}"


def test_temperature_of_the_first_teacher_is_yaml_only_too(problem):
    assert (
        problem("[{hf: t, temperature: 101}]").what
        == "teachers[0].temperature 101.0 must be from 0.01 to 100"
    )
    assert (
        problem("[{hf: t}]", "--kd-temperature", "1e-30").what
        == "kd-temperature 1e-30 must be from 0.01 to 100"
    )
