"""Find the files that come with mkd, by name, from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkd.config.load import load_config
from mkd.config.packaged import config_path
from mkd.errors import ErrorList, UsageError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_every_example_is_found_by_its_name(tmp_path, monkeypatch):
    """A dot in a name (llama3.1_8b_from_70b) is no suffix."""
    monkeypatch.chdir(tmp_path)
    examples = sorted(CONFIGS.glob("*.yaml"))
    assert any("." in example.stem for example in examples)
    for example in examples:
        for given in (example.stem, example.name, f"configs/{example.stem}"):
            assert config_path(given) == example


@pytest.mark.parametrize("given", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_an_example_is_found_by_name_from_any_folder(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_path(given) == CONFIGS / "quickstart.yaml"
    loaded = load_config(["--config", given, "--lr", "1"])
    assert loaded.config.kd.kd_ratio == 0.9
    assert loaded.origins["kd.kd_ratio"] == "configs/quickstart.yaml:11"


def test_a_file_that_exists_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("kd: {kd_ratio: 0.25}")
    assert load_config(["--config", "quickstart"]).config.kd.kd_ratio == 0.25


@pytest.mark.parametrize("given", ["other/quickstart.yaml", "quickstart.json", "quick"])
def test_other_names_are_refused_with_the_names_that_exist(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        config_path(given)
    assert caught.value.code == "path-not-found" and "quickstart" in caught.value.do


def test_a_missing_file_is_reported_with_all_other_problems(tmp_path):
    with pytest.raises(ErrorList) as caught:
        load_config(["--config", str(tmp_path / "none.yaml"), "--no-such-flag"])
    assert set(caught.value.codes) == {"path-not-found", "flag-unknown"}
