from __future__ import annotations

import pytest

from mkd.config.load import load_config
from tests.reported import Reported, reports
from tests.run_facts import problems_of

BASE = ["--student-hf", "s", "--data-path", "d.jsonl", "--train-iters", "10", "--seq-length", "64"]
TWO = "[{hf: a}, {hf: b}]"


@pytest.fixture
def problems(tmp_path):
    def check(teachers: str, *argv: str):
        path = tmp_path / "run.yaml"
        path.write_text(f"teachers: {teachers}\n", encoding="utf-8")
        errors = problems_of(load_config([*BASE, "--config", str(path), *argv]).config, 1)
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
    assert (
        reports([problem("[{name: a}]"), problem("[{}, {}]")]) == ["model-missing: no teacher is given"] * 2
    )
    error = problem("[{hf: a}, {name: b}]")
    assert error.code == "model-missing" and error.what.startswith("teachers[1] ")


def test_plain_training_reads_no_teacher(problems):
    assert problems(TWO, "--kd-ratio", "0") == []
    assert problems("[{hf: a, xtoken: {loss: uld, top_k: 3}}]", "--kd-ratio", "0") == [], "no teacher is read"


@pytest.mark.parametrize(
    ("teachers", "code", "named"),
    [
        ("[{hf: a, weight: 0.5}]", "remove-flag: teachers[0].weight is", "teachers[0].weight"),
        ("[{hf: a, weight: 0}, {hf: b}]", "out-of-range: must be above 0", "teachers[0].weight"),
        ("[{hf: a}, {hf: b, weight: -1}]", "out-of-range: must be above 0", "teachers[1].weight"),
        ("[{hf: a, weight: 0}, {hf: b, weight: 0}]", "out-of-range: the weights of all", "2 teachers"),
    ],
)
def test_weights(problem, teachers, code, named):
    error = problem(teachers)
    assert Reported.of(error) == code and named in error.what


def test_weights_that_nobody_reads(problem, problems):
    error = problem("[{hf: a}, {hf: b, weight: 2}]", "--teacher-combination", "select")
    assert error.code == "remove-flag" and "select" in error.why
    assert error.what.startswith("teachers[1].weight 2.0 ")
    assert problems("[{hf: a}, {hf: b, weight: 2}]", "--teacher-weighting", "entropy") == []


def test_names(problem, problems):
    assert (
        Reported.of(problem("[{hf: a, name: x}, {hf: b, name: x}]")) == "names-equal: teachers have the name"
    )
    assert Reported.of(problem("[{hf: a, name: x y}]")) == "value-not-valid: is not a plain word"
    assert problems("[{hf: 'run 1/model'}, {hf: 'run 2/model'}]") == [], (
        "names that mkd makes are plain and unique"
    )


def test_stored_probabilities(problem, problems):
    for teachers, place in (
        ("[{topk: a}, {hf: b}]", "--teacher-topk"),
        ("[{hf: b}, {topk: a}]", "teachers[1].topk"),
    ):
        error = problem(teachers)
        assert error.code == "stored-teacher-excludes" and error.what.startswith(f"{place} is given")
    both = problems("[{topk: a, residency: host}, {topk: b, residency: host}]", "--kd-divergence", "jsd")
    assert reports(both) == [
        "stored-teacher-excludes: the place of the only teacher",
        "stored-teacher-excludes: cannot be computed from",
        "remove-flag: teacher-residency host would have no effect",
        "remove-flag: teachers[1].residency host would have no effect",
    ]
    assert all("--teacher-topk and teachers[1].topk" in error.what for error in both[:2])
    assert (
        Reported.of(problem("[{topk: a, xtoken: {}}]"))
        == "stored-teacher-excludes: for a teacher with xtoken settings"
    )
    assert Reported.of(problem("[{topk: a, residency: host}]")) == "remove-flag: no effect"
    for divergence in ("jsd", "skewed_forward_kl"):
        error = problem("[{topk: a}]", "--kd-divergence", divergence)
        assert Reported.of(error) == "stored-teacher-excludes: cannot be computed from"
    error = problem("[{topk: a, divergence: reverse_kl}]")
    assert error.code == "stored-teacher-excludes" and "reverse_kl" in error.what
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
    error = problem(teachers, *flags)
    assert error.code == "remove-flag" and error.what.startswith(f"{what} ")


def test_an_average_needs_the_same_tokens(problem):
    error = problem("[{hf: a}, {hf: b, xtoken: {}}]", "--teacher-combination", "average")
    assert error.code == "exclude-each-other" and "teachers[1]" in error.what


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
        ("topk: c", ("--kd-fp32-logits", "--bf16"), "kd-fp32-logits"),
    ],
)
def test_settings_of_the_loss_that_do_nothing(problem, teacher, flags, what):
    error = problem(f"[{{hf: t, {teacher}}}]", *flags)
    assert error.code == "remove-flag" and error.what.startswith(f"{what} ")


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
        ("[{hf: t, xtoken: {loss: h_kl, relaxed_map: true}}]", ()),
    ],
)
def test_settings_of_the_loss_that_do_something(problems, teachers, flags):
    assert problems(teachers, *flags) == []


@pytest.mark.parametrize(
    ("teacher", "path"),
    [
        ("temperature: 0", "temperature"),
        ("temperature: 1e-30", "temperature"),
        ("divergence: jsd, jsd_beta: 2", "jsd_beta"),
        ("divergence: mixed_kl, mixed_kl_weight: -1", "mixed_kl_weight"),
        ("divergence: skewed_forward_kl, skew_alpha: 1", "skew_alpha"),
        ("xtoken: {top_k: 0}", "xtoken.top_k"),
        ("xtoken: {seq_length: 0}", "xtoken.seq_length"),
    ],
)
def test_ranges_of_every_teacher(problem, teacher, path):
    error = problem(f"[{{hf: t}}, {{hf: u, {teacher}}}]")
    assert error.code == "out-of-range" and error.do.endswith(f" teachers[1].{path}")


def test_temperature_of_the_first_teacher_is_yaml_only_too(problem):
    error = problem("[{hf: t, temperature: 101}]")
    assert error.code == "out-of-range" and error.do.endswith(" teachers[0].temperature")
    error = problem("[{hf: t}]", "--kd-temperature", "1e-30")
    assert error.code == "out-of-range" and error.do.endswith(" --kd-temperature")
