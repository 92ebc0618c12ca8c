"""Texts that are no paths are told for what they are, wherever a path is given."""

from __future__ import annotations

import pytest

from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.config.data_files import not_found
from mkd.config.flags import FlagParser
from mkd.config.load import load_config
from mkd.config.not_paths import why_no_path
from mkd.errors import CheckpointError
from mkd.plan.checks.locations import check_places
from tests.reported import refused
from tests.run_facts import facts_of


@pytest.mark.parametrize(
    ("text", "do"),
    [
        ("$HOME/runs", "write the path itself"),
        ("${RUNS}/a", "write the path itself"),
        ("/data/$USER/a", "write the path itself"),
        ("s3://bucket/a", "mount the storage"),
        ("https://huggingface.co/org/name/tree/main", "name it org/name"),
        ("https://huggingface.co/datasets/org/name", "name it hub:org/name"),
    ],
)
def test_no_paths(text, do):
    assert do in why_no_path(text)[1]
    assert do in not_found(text, "--data-path").do
    (problem,) = check_places(facts_of(load_config(["--train-iters", "1", "--save", text]).config))
    assert do in problem.do and problem.code == "value-not-valid"
    with refused("hf-model-not-found", CheckpointError) as caught:
        resolve_hf(text)
    assert do in caught.value.do


@pytest.mark.parametrize("text", ["runs/a", "a$b", "/data/a$", "org/name", "hub:org/name", "C:/a"])
def test_paths(text):
    assert why_no_path(text) is None


def test_a_folder_of_such_a_name_is_a_path(tmp_path):
    folder = tmp_path / "$HOME"
    folder.mkdir()
    assert why_no_path(str(folder)) is None


def test_the_home_is_replaced_in_files_and_behind_equals_signs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/ann")
    file = tmp_path / "run.yaml"
    file.write_text("data_path: [0.5, ~/a.jsonl, 0.5, b]\ntrain_iters: 1\nexport_hf: ~/out\n")
    config = load_config(["--config", str(file), "--save=~/runs"]).config
    assert config.data.data_path == ("0.5", "/ann/a.jsonl", "0.5", "b")
    assert (config.checkpoint.save, config.checkpoint.export_hf) == ("/ann/runs", "/ann/out")
    parser = FlagParser()
    parser.add_argument("--out")
    assert parser.parse_args(["--out=~/a"]).out == "/ann/a"


def test_commas_and_numbers_among_data_paths(tmp_path):
    both = ",".join(str(tmp_path) for _ in range(2))
    assert f"{tmp_path} {tmp_path}" in not_found(both, "--data-path").do
    assert "WEIGHT PATH" in not_found("0.5", "--data-path").do
