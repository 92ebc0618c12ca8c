from __future__ import annotations

import json
from pathlib import Path

import pytest

from mkd.config.load import format_config, load_config, num_defaults, read_saved_config, save_config, settings
from mkd.config.schema import Config, TeacherConfig, XTokenConfig
from mkd.errors import ErrorList
from mkd.plan.sides import student_processes
from tests.reported import reports
from tests.run_facts import problems_of

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
WORLD_SIZES = {
    "gpt_oss_20b_from_120b.yaml": 16,
    "llama3.1_8b_from_70b.yaml": 8,
    "quickstart.yaml": 2,
    "quickstart_on_policy.yaml": 2,
    "qwen2.5_vl_3b_from_7b.yaml": 8,
    "qwen3_1.7b_from_8b.yaml": 32,
    "qwen3_1.7b_int4.yaml": 1,
    "qwen3_1.7b_dpo.yaml": 8,
    "qwen3_1.7b_grpo.yaml": 8,
    "qwen3_1.7b_on_policy.yaml": 8,
    "qwen3_1.7b_opsd.yaml": 8,
    "qwen3_1.7b_prompt_distillation.yaml": 8,
    "qwen3_1.7b_sdft.yaml": 8,
    "qwen3_1.7b_sdpo.yaml": 8,
    "qwen3_30b_a3b_from_235b.yaml": 64,
    "qwen3_30b_a3b_own_processes.yaml": 64,
    "qwen3_4b_lora_24gib.yaml": 1,
    "qwen3_8b_lora_80gib.yaml": 1,
    "qwen3_8b_lora_8gpus.yaml": 8,
    "qwen3_8b_nvfp4.yaml": 8,
    "two_experts.yaml": 4,
    "two_teachers.yaml": 8,
}


@pytest.fixture
def yaml_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "student: {hf: s}\nteachers: [{name: big, hf: t}]\noptimizer:\n  lr: 1e-5\n  weight_decay: 0.3\n"
        "data_path: [0.3, a, 0.7, 'b: #c']\nname: 'null'\nbf16: true\n",
        encoding="utf-8",
    )
    return str(path)


def test_command_line_wins_over_yaml_wins_over_defaults(yaml_file):
    loaded = load_config(["--config", yaml_file, "--lr", "3e-4", "--no-bf16", "--teacher-load", "ckpt"])
    assert loaded.config.optimizer.lr == 3e-4 and loaded.origins["optimizer.lr"] == "--lr"
    assert loaded.config.optimizer.weight_decay == 0.3
    assert loaded.origins["optimizer.weight_decay"] == f"{yaml_file}:5"
    assert loaded.config.optimizer.clip_grad == 1.0 and loaded.origins["optimizer.clip_grad"] == "default"
    assert loaded.config.training.bf16 is False and loaded.origins["training.bf16"] == "--no-bf16"
    (teacher,) = loaded.config.teachers
    assert (teacher.name, teacher.hf, teacher.load) == ("big", "t", "ckpt")
    assert loaded.origins["teachers[0].load"] == "--teacher-load"


def test_nothing_given_is_the_defaults():
    loaded = load_config([])
    assert loaded.config == Config() and set(loaded.origins.values()) == {"default"}


def test_teacher_flags_make_the_first_teacher():
    assert (
        load_config(["--teacher-hf", "t", "--teacher-pipeline-layout", "3,5"])
        .config.teachers[0]
        .pipeline_layout
        == "3,5"
    )


def test_any_flag_of_it_turns_the_first_teacher_s_cross_tokenizer_settings_on():
    loaded = load_config(["--teacher-hf", "t", "--xtoken-top-k", "8", "--no-xtoken-reasoning"])
    assert loaded.config.teachers == (TeacherConfig(hf="t", xtoken=XTokenConfig(top_k=8, reasoning=False)),)
    assert loaded.origins["teachers[0].xtoken.top_k"] == "--xtoken-top-k"
    assert loaded.origins["teachers[0].xtoken.loss"] == "default"
    assert load_config(["--teacher-hf", "t"]).config.teachers[0].xtoken is None


def test_settings_of_teachers_have_origins(tmp_path):
    path = tmp_path / "run.yaml"
    text = "teachers:\n- hf: a\n- hf: b\n  weight: 2\n  xtoken:\n    loss: gold\n- hf: c\n  xtoken: {}\n"
    path.write_text(text, encoding="utf-8")
    loaded = load_config(["--config", str(path), "--xtoken-loss", "uld"])
    losses = [teacher.xtoken.loss for teacher in loaded.config.teachers]
    assert losses == ["uld", "gold", "partition_kl"]
    paths = (
        "teachers[0].xtoken.loss",
        "teachers[1].xtoken.loss",
        "teachers[2].xtoken.loss",
        "teachers[1].weight",
    )
    assert [loaded.origins[name] for name in paths] == ["--xtoken-loss", f"{path}:6", "default", f"{path}:4"]
    assert "teachers[1].xtoken.loss" in format_config(loaded)


def test_problems_of_file_and_command_line_come_together(yaml_file):
    Path(yaml_file).write_text("lrr: 3\nseq_length: x\n", encoding="utf-8")
    with pytest.raises(ErrorList) as caught:
        load_config(["--config", yaml_file, "--fp16", "--sed", "3"])
    assert reports(caught.value) == [
        "key-unknown",
        "value-not-valid",
        "flag-replaced: known, not supported: use",
        "flag-unknown",
    ]
    assert caught.value.exit_code == 64
    nearest, place, _, flag = (str(error) for error in caught.value.errors)
    assert "mean lr?" in nearest and "run.yaml:2: seq_length" in place and "mean --seed?" in flag


def test_saved_config_loads_back(yaml_file, tmp_path):
    argv = [
        "--config",
        yaml_file,
        "--dry-run",
        "--seed",
        "7",
        "--split",
        "98,1,1",
        "--name",
        "a b 'x' \"y\" #z",
    ]
    loaded = load_config(argv)
    saved = tmp_path / "saved.yaml"
    save_config(loaded, saved)
    again = load_config(["--config", str(saved)])
    assert again.config == loaded.config
    assert all(origin.startswith(str(saved)) for origin in again.origins.values())
    text = saved.read_text(encoding="utf-8")
    assert f"  lr: 1e-05  # {yaml_file}:4" in text
    assert "  seed: 7  # --seed" in text and "  clip_grad: 1.0  # default" in text


@pytest.mark.parametrize(
    "teachers",
    [
        "[]",
        "[{hf: a}, {load: b, weight: 0.5}]",
        "[{hf: a, xtoken: {}}, {hf: b, divergence: jsd, jsd_beta: 0.1, residency: host}]",
        "[{hf: a}, {hf: b, xtoken: {loss: gold, top_k: 3, reasoning: false}}, {hf: c}]",
    ],
)
def test_any_number_of_teachers_is_saved(tmp_path, teachers):
    source, saved = tmp_path / "a.yaml", tmp_path / "b.yaml"
    source.write_text(f"teachers: {teachers}\n", encoding="utf-8")
    loaded = load_config(["--config", str(source)])
    save_config(loaded, saved)
    assert load_config(["--config", str(saved)]).config == loaded.config
    read = {one.path: (one.value, one.origin) for one in read_saved_config(saved)}
    assert {path: json.dumps(value) for path, (value, _) in read.items()} == {
        option.path: json.dumps(value) for option, value in settings(loaded.config)
    }
    assert {path: origin for path, (_, origin) in read.items()} == loaded.origins


def test_saved_settings_of_a_former_section_have_their_present_paths(tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text(
        "feedback:\n  dpo_beta: 0.1  # --dpo-beta\n  clip_range: 0.2  # default\n  other: 1  # default\n"
    )
    read = [(one.path, one.value, one.origin) for one in read_saved_config(saved)]
    assert read == [
        ("dpo.dpo_beta", 0.1, "--dpo-beta"),
        ("grpo.clip_range", 0.2, "default"),
        ("feedback.other", 1, "default"),
    ]


def test_format_shows_every_given_value_once_and_aligned(yaml_file):
    """Also one that is given as its default; nothing else."""
    loaded = load_config(["--config", yaml_file, "--seed", "7", "--pack", "bfd"])
    lines = format_config(loaded).splitlines()
    given = {path: origin for path, origin in loaded.origins.items() if origin != "default"}
    assert {line.split()[0]: line.split()[-1] for line in lines} == given and "data.pack" in given
    assert len(lines) == len(given) == len(loaded.origins) - num_defaults(loaded)
    assert format_config(load_config([])) == ""
    (seed,) = (line for line in lines if line.startswith("training.seed "))
    assert seed.split() == ["training.seed", "7", "--seed"]
    column = seed.index("--seed")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
    long = load_config(["--data-path", *(f"file{i}.jsonl" for i in range(40)), "--seed", "7"])
    assert (
        format_config(long).splitlines()[0].startswith("training.seed")
        and sorted(map(len, format_config(long).splitlines()))[0] < 110
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path):
    config = load_config(["--config", str(path)]).config
    assert problems_of(config, student_processes(config, WORLD_SIZES[path.name])) == []


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES} == set(WORLD_SIZES)


def test_an_empty_text_is_no_value(tmp_path):
    """As of --load "$UNSET": it counted as not given, so that a run started anew, or exported nothing."""
    path = tmp_path / "run.yaml"
    path.write_text("teachers: [{hf: a}, {hf: b, load: '', context: {system: ''}}]\n", encoding="utf-8")
    with pytest.raises(ErrorList) as caught:
        load_config(["--config", str(path), "--load", "", "--student-hf", "s"])
    what = [error.what for error in caught.value.errors]
    assert what == [f"teachers[1].load is an empty text ({path}:1)", "--load is an empty text"]
    assert {error.code for error in caught.value.errors} == {"value-not-valid"}
