"""Run `mkd doctor` on this environment, and on environments that are broken in usual ways."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mkd import doctor
from mkd.import_probe import Probe
from mkd.tested_versions import TESTED, TRANSFORMER_ENGINE

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def run_doctor(*argv: str, modules: Path | None = None, **environment: str) -> tuple[int, list[str]]:
    """Return (exit code, lines) of the tool; packages in `modules` override installed ones."""
    environment = {**os.environ, **environment, **({"PYTHONPATH": str(modules)} if modules else {})}
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code, encoding="utf-8")


def line_of(lines: list[str], subject: str) -> str:
    (line,) = [line for line in lines if re.match(rf"(ok|note|FAIL) +{re.escape(subject)}  ", line)]
    return line


def test_this_environment_can_run(tmp_path):
    code, lines = run_doctor(
        "--folder", str(tmp_path / "not" / "there"), NCCL_DEBUG="WARN", TORCH_API_KEY="hidden"
    )
    assert (code, lines[0], lines[-1]) == (0, "--- mkd doctor", "--- a run can start")
    assert (
        line_of(lines, "megatron-core").startswith("ok")
        and line_of(lines, "disk").split()[2].replace(".", "").isdigit()
    )
    assert "NCCL_DEBUG=WARN" in line_of(lines, "environment") and "hidden" not in "".join(lines)


def test_what_a_hint_installs_is_a_distribution_that_mkd_asks_for():
    """The import name is not always that of the distribution: PIL comes with pillow."""
    asked_for = re.findall(r"^        +\S*?\"([A-Za-z][\w-]+)", SETUP, re.MULTILINE)
    asked_for += re.findall(r"[\[ ]\"([A-Za-z][\w-]+)[^\":]*\"[,\]]", SETUP)
    known = {name.lower().replace("_", "-") for name in asked_for}
    needed = [doctor._DISTRIBUTIONS.get(name, name) for name in doctor._NEEDED]
    hinted = {name.lower().replace("_", "-") for name in (*needed, *doctor._EXTRAS)}
    for source in (ROOT / "mkd").rglob("*.py"):
        for words in re.findall(r"pip install ([a-z][\w-]*)", source.read_text(encoding="utf-8")):
            hinted.add(words)
    assert not hinted - known


def test_half_installed_and_unrelated_packages_are_explained(tmp_path):
    package(tmp_path, "transformer_engine", "raise FileNotFoundError('Could not find shared object file')")
    package(tmp_path, "apex", "")
    (tmp_path / "google").mkdir()
    package(tmp_path / "google", "protobuf", "raise ImportError('no protobuf here')")
    code, lines = run_doctor(modules=tmp_path)
    text = "\n".join(lines)
    assert code == 1
    assert line_of(lines, "Transformer Engine").startswith("FAIL  Transformer Engine    installed in part")
    assert "--no-build-isolation" in text and "pip uninstall transformer-engine" in text
    assert "unrelated package" in line_of(lines, "apex") and "pip uninstall apex" in text
    assert line_of(lines, "protobuf").startswith("FAIL") and "transformers needs it to read" in line_of(
        lines, "protobuf"
    )


def test_an_import_that_ends_its_process_is_a_line(tmp_path):
    package(tmp_path, "torch", "import os; os._exit(9)")
    code, lines = run_doctor(modules=tmp_path)
    assert code == 1 and lines[-1].endswith("no run can start")
    assert line_of(lines, "torch").startswith("FAIL") and "code 9" in line_of(lines, "torch")


def test_findings_before_a_failure_are_kept(monkeypatch, tmp_path):
    def torch_and_driver():
        yield doctor.Finding("FAIL", "torch", "too old")
        raise TimeoutError("nvidia-smi")

    for name in ("_megatron", "_transformer_engine", "_apex", "_packages"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(doctor, "_torch", torch_and_driver)
    found = [finding for finding in doctor.examine(tmp_path) if finding.subject.startswith("torch")]
    assert [(finding.level, finding.subject) for finding in found] == [
        ("FAIL", "torch"),
        ("note", "torch_and_driver"),
    ]


probed_once = cache(doctor.probe)  # each starts a process that imports Megatron


@pytest.mark.parametrize(
    "version, level, words",
    [
        ("0.15.3", "note", "older than"),
        ("0.16.0", "note", "older than"),
        ("0.16.1", "ok", ""),
        ("0.19.2", "ok", ""),
        ("0.20.0", "note", "newer than"),
    ],
)
def test_versions_of_megatron_outside_the_tested_ones_are_named(monkeypatch, version, level, words):
    monkeypatch.setattr(doctor, "version_of", lambda name: version)
    monkeypatch.setattr(doctor, "probe", probed_once)
    (finding,) = doctor._megatron()
    assert finding.level == level and version in finding.text and words in finding.text
    assert bool(finding.do) == (level == "note")


def test_no_run_starts_without_megatron_or_with_an_old_torch(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    (finding,) = doctor._megatron()
    assert finding.level == "FAIL" and "megatron-core" in finding.do
    found = dict(version="2.8.1", cuda=None, devices=[])
    monkeypatch.setattr(doctor, "probe", lambda code: Probe(found))
    for version, level in (("2.8.1", "FAIL"), ("2.9.0a0+1", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0", "note")):
        found["version"] = version
        assert next(doctor._torch()).level == level, version


@pytest.mark.parametrize("folder", [ROOT, ROOT / "docs"])
def test_the_pins_that_a_command_names_are_there(folder, monkeypatch):
    """Also outside the checkout; an installed mkd has them elsewhere (tests/test_install.py)."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    (finding,) = doctor._megatron()
    *command, pins = shlex.split(finding.do)
    assert command == ["pip", "install", "megatron-core", "-c"] and Path(pins).is_file()


@pytest.mark.parametrize(
    "megatron, engine, level",
    [
        ("0.16.1", "2.11.0", "ok"),
        ("0.16.1", "2.14.1", "note"),
        ("0.15.0", "2.11.0", "note"),
        ("0.16.1", "2.8.0", "note"),
        ("0.16.1", None, "note"),
    ],
)
def test_transformer_engine_is_judged_by_megatron(monkeypatch, megatron, engine, level):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(doctor, "probe", lambda code: Probe({}))
    versions = {"megatron-core": megatron, "transformer-engine": engine}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    (finding,) = doctor._transformer_engine()
    assert finding.level == level and (engine or "unknown version") in finding.text
    assert ("fp8 needs 2.9 or newer" in finding.text) == (engine == "2.8.0")


def test_a_folder_that_does_not_exist_is_checked_at_its_parent(tmp_path):
    (finding,) = doctor._disk(tmp_path / "a" / "b")
    assert finding.level in ("ok", "note") and str(tmp_path / "a" / "b") in finding.text


@pytest.mark.parametrize("below", [(), ("a", "b")])
def test_a_file_cannot_be_a_folder_for_runs(below, tmp_path):
    file = tmp_path / "file"
    file.touch()
    (finding,) = doctor._disk(file.joinpath(*below))
    assert finding.level == "FAIL" and f"{file} is a file" in finding.text and finding.do


def test_no_run_starts_on_a_full_disk(tmp_path, monkeypatch):
    size = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: size._replace(free=0))
    (finding,) = doctor._disk(tmp_path / "a")
    assert finding.level == "FAIL" and str(tmp_path / "a") in finding.text and finding.do


def test_ranges_are_those_of_setup_and_hold_the_pins():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert 'python_requires=">={}.{}"'.format(*TESTED["Python"].least) in setup
    assert all(f'"{name}{in_setup(name)}"' in setup for name in TESTED.keys() - {"Python"})
    assert f"\"transformer-engine[pytorch]{TRANSFORMER_ENGINE['0.16']} ; python_version < '3.12'\"" in setup
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = [pin for pin in re.findall(r"^([\w-]+)==([\w.]+)", constraints, re.M) if pin[0] in TESTED]
    assert {name for name, _ in pins} == TESTED.keys() - {"Python"}
    assert all(TESTED[name].holds(version) for name, version in pins)


def in_setup(name: str) -> str:
    """Return the range as setup.py writes it: torch's takes the pre-releases of NVIDIA's containers."""
    return str(TESTED[name]).replace("2.9,", "2.9.0a0,") if name == "torch" else str(TESTED[name])
