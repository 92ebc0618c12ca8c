from __future__ import annotations

import pytest

from mkd.config.options import all_options
from mkd.config.yaml_file import read_yaml
from tests.reported import Reported, reports


@pytest.fixture
def read(tmp_path):
    def read_text(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return read_yaml(str(path))

    return read_text


def values(file) -> dict:
    assert not file.errors, [str(error) for error in file.errors]
    return {path: value for path, (value, _) in file.values.items()}


def problem(file):
    (error,) = file.errors
    return error


def test_sections_short_names_and_lines(read):
    file = read("student: {hf: s}\nkd:\n  ratio: 0.7\n  kd_temperature: 2\nlog:\n  dir: l\n  interval: 5\n")
    assert values(file) == {
        "student.hf": "s",
        "kd.kd_ratio": 0.7,
        "kd.kd_temperature": 2.0,
        "log.log_dir": "l",
        "log.log_interval": 5,
    }
    assert file.values["kd.kd_temperature"][1] == f"{file.path}:4"


def test_every_flag_name_is_accepted_at_the_top_level_and_in_any_section(read):
    examples = {int: "3", float: "0.5", bool: "true", str: "x", tuple: "[x, y]"}
    for option in all_options():
        text = option.choices[0] if option.choices else examples[option.kind]
        for template in ("{}: {}", "data:\n  {}: {}", "optimizer:\n  {}: {}"):
            assert list(values(read(template.format(option.name, text)))) == [option.path]


def test_a_section_s_own_settings_come_first(read):
    assert values(read("student: {load: a}\ncheckpoint: {load: b}\n")) == {
        "student.load": "a",
        "checkpoint.load": "b",
    }


def test_teachers(read):
    file = read("teachers:\n- {name: big, hf: t, weight: 1, pipeline_layout: [3, 5]}\n- {load: u}\n")
    assert file.num_teachers == 2
    assert values(file) == {
        "teachers[0].name": "big",
        "teachers[0].hf": "t",
        "teachers[0].weight": 1.0,
        "teachers[0].pipeline_layout": "3,5",
        "teachers[1].load": "u",
    }


def test_cross_tokenizer_settings_are_a_section_of_a_teacher(read):
    file = read(
        "teachers:\n- hf: t\n  xtoken:\n    loss: gold\n    top_k: ~\n- {hf: u, xtoken: {}}\n- {hf: v}\n"
    )
    assert values(file) == {
        "teachers[0].hf": "t",
        "teachers[0].xtoken": {},
        "teachers[0].xtoken.loss": "gold",
        "teachers[0].xtoken.top_k": None,
        "teachers[1].hf": "u",
        "teachers[1].xtoken": {},
        "teachers[2].hf": "v",
    }
    assert file.values["teachers[0].xtoken.loss"][1] == f"{file.path}:4"


def test_text_is_read_as_the_schema_says(read):
    file = read(
        "lr: 1e-5\nname: 2026-01-01\nstudent_pipeline_layout: 8,8,7,7\nsave: ~\nbf16: yes\npack: "
        "none\nmin_lr: 0\n"
    )
    assert values(file) == {
        "optimizer.lr": 1e-5,
        "log.name": "2026-01-01",
        "student.pipeline_layout": "8,8,7,7",
        "checkpoint.save": None,
        "training.bf16": True,
        "data.pack": "none",
        "optimizer.min_lr": 0.0,
    }


def test_lists(read):
    assert values(read("data: {path: [0.3, a, 0.7, b]}")) == {"data.data_path": ("0.3", "a", "0.7", "b")}
    assert values(read("data_path: a b.jsonl")) == {"data.data_path": ("a b.jsonl",)}
    assert values(read("split: [99, 1, 0]")) == {"data.split": "99,1,0"}
    assert values(read("valid_data_path:")) == {"data.valid_data_path": ()}


@pytest.mark.parametrize("text", ["", "# nothing\n", "kd:\nteachers:\n"])
def test_empty_files_and_sections(read, text):
    assert values(read(text)) == {}


@pytest.mark.parametrize(
    ("text", "line", "code", "hint"),
    [
        ("kd:\n  kd_ration: 1", 2, "key-unknown", "did you mean kd_ratio?"),
        ("optimiser: {lr: 1}", 1, "key-unknown", "did you mean optimizer?"),
        ("seq-length: 3", 1, "key-unknown", "did you mean seq_length?"),
        ("xyzzy: 3", 1, "key-unknown", "see --help"),
        ("teachers: [{hff: 3}]", 1, "key-unknown", "did you mean hf?"),
        ("teachers: [{lr: 3}]", 1, "key-unknown", ""),
        ("lr: 1\nlr: 1", 2, "yaml-not-valid: is given twice", ""),
        ("kd: {}\nkd: {}", 2, "yaml-not-valid: is given twice", ""),
        ("seq_length: abc", 1, "value-not-valid", "a whole number"),
        ("seq_length: 1.0", 1, "value-not-valid", "a whole number"),
        ("\nlr: .inf", 2, "value-not-valid", "a number"),
        ("bf16: 3", 1, "value-not-valid", "true or false"),
        ("lr: [1, 2]", 1, "yaml-not-valid: is a list", ""),
        ("lr: {a: 2}", 1, "yaml-not-valid: is not a plain value", ""),
        ("data_path: [a, [b]]", 1, "yaml-not-valid: is not a plain value", ""),
        ("lr:", 1, "yaml-not-valid: has no value", ""),
        ("pack: ffd", 1, "value-unknown: is not a known value", "use bfd or none"),
        ("kd: {divergence: tvd}", 1, "value-unknown: is not a known value", "forward_kl or reverse_kl or"),
        ("fp16: true", 1, "flag-replaced: known, not supported: use", ""),
        ("use_mcore_models: true", 1, "remove-flag: known, not supported: safe to drop", ""),
        ("parallel: {use_torch_fsdp2: true}", 1, "flag-not-yet", "--use-distributed-optimizer"),
        ("teachers:\n- hf: t\n  xtoken: {los: uld}", 3, "key-unknown", "did you mean loss?"),
        ("teachers:\n- hf: t\n- xtokens: {}", 3, "key-unknown", "did you mean xtoken?"),
        ("teachers:\n- hf: t\n  xtoken:\n", 3, "yaml-not-valid: write `xtoken: {}`", "`xtoken: {}`"),
        ("teachers:\n- hf: t\n  xtoken: uld", 3, "yaml-not-valid: is not a mapping", ""),
        (
            "teachers: [{xtoken: {loss: kl}}]",
            1,
            "value-unknown: is not a known value",
            "partition_kl or prefix_kl or",
        ),
        ("teachers: [{xtoken: {seq_length: x}}]", 1, "value-not-valid", "a whole number"),
        ("xtoken: {}", 1, "key-unknown", ""),
        ("teachers: {hf: t}", 1, "yaml-not-valid: teachers is not a list", "[{hf: DIR}]"),
        ("teachers: [t]", 1, "yaml-not-valid: is not a mapping", ""),
        ("kd: 3", 1, "yaml-not-valid: is not a mapping", ""),
        ("- a", 1, "yaml-not-valid: is not a mapping", ""),
        ("lr: !!python/object/apply:os.system [ls]", 1, "yaml-not-valid: has the tag", ""),
        ("lr: !mine 3", 1, "yaml-not-valid: has the tag", ""),
        ("data_path: [!!python/name:os.system x]", 1, "yaml-not-valid: is not a plain value", ""),
        ("a: [1\nb: 2", 2, "yaml-not-valid: not valid YAML", ""),
        ("a: 1\n---\nb: 1", 2, "yaml-not-valid: not valid YAML", ""),
    ],
)
@pytest.mark.fault(32)
def test_errors_name_file_line_and_remedy(read, text, line, code, hint):
    file = read(text)
    error = problem(file)
    assert Reported.of(error) == code and error.exit_code == 64
    assert error.what.startswith(f"{file.path}:{line}: ") and hint in error.do


def test_two_values_for_one_setting(read):
    file = read("kd: {ratio: 0.5}\nkd_ratio: 0.7\n")
    error = problem(file)
    assert error.code == "exclude-each-other" and error.what.startswith(f"{file.path}:2: kd_ratio is 0.7")
    assert f"{file.path}:1 says 0.5" in error.what and "kd_ratio" in error.why
    assert values(read("kd: {ratio: 0.5}\nkd_ratio: 0.50\n")) == {"kd.kd_ratio": 0.5}


def test_all_problems_are_collected(read):
    file = read("lr: x\nkd: {ratoi: 1}\nseq_length: y\n")
    assert reports(file.errors) == ["value-not-valid", "key-unknown", "value-not-valid"]
    assert [error.what.split(": ")[0].rpartition(":")[2] for error in file.errors] == ["1", "2", "3"]


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    for path in (tmp_path / "absent.yaml", tmp_path / "latin.yaml", tmp_path):
        error = problem(read_yaml(str(path)))
        assert error.code == "path-not-found" and str(path) in error.what and error.do


def test_the_settings_of_an_earlier_run_are_read(read):
    """Its config.yaml has all settings of its version, mostly with defaults."""
    text = (
        "teachers:\n  -\n    hf: t\n    xtoken:\n      exact_token_match_only: false  # default\n"
        "data:\n  characters_per_sample: null  # default\n"
        "feedback:\n  dpo_beta: 0.1\n  clip_range: 0.2  # default\n"
        "optimizer:\n  lr_warmup_fraction: null  # default\n"
        "log:\n  profile_step_start: 10  # default\n  profile_step_end: 12  # default\n"
        "  use_pytorch_profiler: false  # default\n"
    )
    found = values(read(text))
    assert found == {
        "teachers[0].hf": "t",
        "teachers[0].xtoken": {},
        "dpo.dpo_beta": 0.1,
        "grpo.clip_range": 0.2,
    }


@pytest.mark.parametrize(
    "text",
    [
        "data: {characters_per_sample: 8}",
        "optimizer: {lr_warmup_fraction: 0.1}",
        "log: {profile_step_start: 3}",
        "log: {use_pytorch_profiler: true}",
        "teachers: [{hf: t, xtoken: {exact_token_match_only: true}}]",
    ],
)
def test_other_values_of_former_settings_are_refused(read, text):
    assert problem(read(text)).code in {"key-unknown", "flag-replaced", "remove-flag"}
