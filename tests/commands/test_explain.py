"""Check `mkd explain`: real texts, former names, and an installed mkd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mkd.__main__ import main
from mkd.error_codes.code_meanings import MEANINGS
from mkd.error_codes.raised_errors import raised_errors, source_folders
from mkd.errors import EXIT_USAGE
from tests.reported import reported_codes, reported_text

ROOT = Path(__file__).resolve().parents[2]
CODES = [code for codes in MEANINGS.values() for code in codes]


def test_a_code_has_its_meaning_its_texts_and_its_exit_code(capsys):
    assert main(["explain", "already-exists"]) == 0
    first, empty, meaning, *texts, files = capsys.readouterr().out.splitlines()
    assert (first, empty) == ("already-exists: exit code 64", "") and "--overwrite" in meaning
    assert "* --output-prefix ... holds a corpus: ..." in texts
    place = texts.index("* --output-prefix ... holds a corpus: ...")
    assert texts[place + 1].startswith("    why: ") and texts[place + 2].startswith("    do:  choose another")
    assert files.startswith("from ") and "mkd/commands/preprocess.py" in files


def test_every_code_can_be_explained(monkeypatch):
    """The sources are read once; tests/error_codes compares what is read with a code alone."""
    from mkd.commands import explain

    errors = list(raised_errors(source_folders()))
    monkeypatch.setattr(
        explain, "raised_errors", lambda _, code: [error for error in errors if error.code == code]
    )
    for code in CODES:
        text = explain.explanation(code)
        assert f"{code}: exit code " in text and "\n* " in text and "\nfrom " in text


def test_without_a_code_all_are_listed(capsys):
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^  ([a-z0-9-]+)  ", text, re.M) == [
        code for exit_code in sorted(MEANINGS) for code in sorted(MEANINGS[exit_code])
    ]
    assert "exit code 66: A checkpoint or a Hugging Face model folder" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("setting-without-effect", "setting-without-effect is now remove-flag"),
        ("batch-not-divisable", "did you mean batch-not-divisible"),
        ("folder-not-writeable", "did you mean not-writable"),  # near a former name
        ("xyzzy", "`mkd explain` lists all codes"),
    ],
)
def test_another_name_is_one_error(name, said, capsys):
    assert main(["explain", name]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert reported_codes(message) == ["value-unknown"] and said in reported_text(message)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with the files of a wheel: the package, and the launch scripts in mkd/packaged."""
    site = tmp_path_factory.mktemp("site")
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mkd", site / "mkd", ignore=leave_out)
    shutil.copytree(ROOT / "launch", site / "mkd" / "packaged" / "launch", ignore=leave_out)
    for other in ("tools", "launch"):  # packages of others
        (site / other).mkdir()
        (site / other / "broken.py").write_text("not Python: code='value-not-valid'")
    return site


def explain(site, *argv):
    command = [sys.executable, "-m", "mkd", "explain", *argv]
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)


def test_an_installed_mkd_reads_its_own_sources(installed):
    done = explain(installed, "value-not-valid")
    assert done.returncode == 0, done.stderr
    assert "* --time ... is not a time that Slurm reads\n" in done.stdout  # of launch/submit.py
    assert "mkd/packaged/launch/submit.py" in done.stdout and "mkd/config/split.py" in done.stdout


def test_without_sources_the_meaning_is_left(installed, tmp_path):
    """Such as a package of compiled files alone."""
    code = "from mkd.commands import explain as e; e.source_folders = lambda: []; e.main(['not-writable'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, env=os.environ, capture_output=True, text=True
    )
    assert MEANINGS[64]["not-writable"] in done.stdout and "has no sources" in done.stdout


def test_it_answers_within_a_second(installed):
    start = time.monotonic()
    assert explain(installed, "value-not-valid").returncode == 0
    assert time.monotonic() - start < 5  # 0.3 s, on a busy machine more
