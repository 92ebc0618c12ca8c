from __future__ import annotations

import pytest

from mkd.config.options import all_options
from mkd.config.yaml_file import read_yaml


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
    ("text", "line", "what", "hint"),
    [
        ("kd:\n  kd_ration: 1", 2, "unknown key kd_ration in kd", "did you mean kd_ratio?"),
        ("optimiser: {lr: 1}", 1, "unknown key optimiser", "did you mean optimizer?"),
        ("seq-length: 3", 1, "unknown key seq-length", "did you mean seq_length?"),
        ("xyzzy: 3", 1, "unknown key xyzzy", "see --help"),
        ("teachers: [{hff: 3}]", 1, "unknown key hff in teachers[0]", "did you mean hf?"),
        ("teachers: [{lr: 3}]", 1, "unknown key lr in teachers[0]", ""),
        ("lr: 1\nlr: 1", 2, "lr is given twice", "keep one"),
        ("kd: {}\nkd: {}", 2, "kd is given twice", "keep one"),
        ("seq_length: abc", 1, "seq_length: 'abc' is not a whole number", "give a whole number"),
        ("seq_length: 1.0", 1, "seq_length: '1.0' is not a whole number", "give a whole number"),
        ("\nlr: .inf", 2, "lr: '.inf' is not a number", "give a number"),
        ("bf16: 3", 1, "bf16: '3' is not true or false", "give true or false"),
        ("lr: [1, 2]", 1, "lr is a list", "name: value"),
        ("lr: {a: 2}", 1, "lr is not a plain value", "name: value"),
        ("data_path: [a, [b]]", 1, "data_path is not a plain value", "name: value"),
        ("lr:", 1, "lr has no value", "remove the line"),
        ("pack: ffd", 1, "pack: 'ffd' is not a known value", "use bfd or none"),
        (
            "kd: {divergence: tvd}",
            1,
            "divergence: 'tvd' is not a known value",
            "use forward_kl or reverse_kl or",
        ),
        ("fp16: true", 1, "fp16: known, not supported: use --bf16", ""),
        ("use_mcore_models: true", 1, "use_mcore_models: known, not supported: safe to drop", "remove"),
        (
            "parallel: {use_torch_fsdp2: true}",
            1,
            "use_torch_fsdp2: not supported yet",
            "--use-distributed-optimizer",
        ),
        (
            "teachers:\n- hf: t\n  xtoken: {los: uld}",
            3,
            "unknown key los in teachers[0].xtoken",
            "did you mean loss?",
        ),
        (
            "teachers:\n- hf: t\n- xtokens: {}",
            3,
            "unknown key xtokens in teachers[1]",
            "did you mean xtoken?",
        ),
        ("teachers:\n- hf: t\n  xtoken:\n", 3, "teachers[0].xtoken has no value", "`xtoken: {}`"),
        ("teachers:\n- hf: t\n  xtoken: uld", 3, "teachers[0].xtoken is not a mapping", "indent"),
        (
            "teachers: [{xtoken: {loss: kl}}]",
            1,
            "loss: 'kl' is not a known value",
            "use partition_kl or prefix_kl or",
        ),
        (
            "teachers: [{xtoken: {seq_length: x}}]",
            1,
            "seq_length: 'x' is not a whole number",
            "give a whole number",
        ),
        ("xtoken: {}", 1, "unknown key xtoken", ""),
        ("teachers: {hf: t}", 1, "teachers is not a list", "[{hf: DIR}]"),
        ("teachers: [t]", 1, "teachers[0] is not a mapping", ""),
        ("kd: 3", 1, "kd is not a mapping", ""),
        ("- a", 1, "the file is not a mapping", ""),
        (
            "lr: !!python/object/apply:os.system [ls]",
            1,
            "lr has the tag !!python/object/apply:os.system",
            "remove the tag",
        ),
        ("lr: !mine 3", 1, "lr has the tag !mine", "remove the tag"),
        ("data_path: [!!python/name:os.system x]", 1, "data_path is not a plain value", ""),
        ("a: [1\nb: 2", 2, "not valid YAML", "syntax"),
        ("a: 1\n---\nb: 1", 2, "not valid YAML", ""),
    ],
)
@pytest.mark.fault(32)
def test_errors_name_file_line_and_remedy(read, text, line, what, hint):
    file = read(text)
    error = problem(file)
    assert error.what.startswith(f"{file.path}:{line}: {what}")
    assert hint in error.do
    assert error.exit_code == 64


def test_two_values_for_one_setting(read):
    file = read("kd: {ratio: 0.5}\nkd_ratio: 0.7\n")
    error = problem(file)
    assert error.what == f"{file.path}:2: kd_ratio is 0.7, but {file.path}:1 says 0.5"
    assert error.why == "both set kd_ratio"
    assert values(read("kd: {ratio: 0.5}\nkd_ratio: 0.50\n")) == {"kd.kd_ratio": 0.5}


def test_all_problems_are_collected(read):
    file = read("lr: x\nkd: {ratoi: 1}\nseq_length: y\n")
    assert [error.what.split(": ")[0].rpartition(":")[2] for error in file.errors] == ["1", "2", "3"]


def test_files_that_cannot_be_read(tmp_path):
    error = problem(read_yaml(str(tmp_path / "absent.yaml")))
    assert "absent.yaml cannot be read: No such file" in error.what and error.do
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    assert "cannot be read" in problem(read_yaml(str(tmp_path / "latin.yaml"))).what
    assert "cannot be read" in problem(read_yaml(str(tmp_path))).what
