"""Check that tools end as `pretrain_kd.py` does: a user's error is one message on stderr and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mkd import torchrun_report
from mkd.errors import EXIT_DATA, EXIT_USAGE, DataError, ErrorList, returns_exit_code

ROOT = Path(__file__).resolve().parent.parent.parent
FOR_DEVELOPERS = {"fetch_smollm2.py", "make_docs.py", "record_checks.py", "system_constraints.py"}
TOOLS = [path for path in sorted((ROOT / "tools").glob("*.py")) if path.name not in FOR_DEVELOPERS]


@pytest.mark.parametrize(
    "tool", [*TOOLS, ROOT / "launch" / "submit.py", ROOT / "pretrain_kd.py"], ids=lambda path: path.stem
)
def test_a_wrong_flag_is_a_usage_error(tool):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tool), "--no-such-flag", "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == EXIT_USAGE, result.stdout + result.stderr
    assert result.stderr.startswith("error[") and "Traceback" not in result.stderr


REPORT = "error[example]: no text\n  do:  give some\n"


@pytest.mark.parametrize("rank", ["", "0", "1"])
def test_rank_0_speaks_for_all_and_others_for_themselves(rank, monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank) if rank else monkeypatch.delenv(name, raising=False)
    own = DataError("no text", "", "give some", code="example")

    @returns_exit_code
    def main(error):
        if error:
            raise error

    assert main(None) == 0 and capsys.readouterr().err == ""
    assert main(own) == EXIT_DATA
    assert capsys.readouterr().err == ("rank 1: " if rank == "1" else "") + REPORT
    assert main(ErrorList([own])) == EXIT_DATA
    assert capsys.readouterr().err == ("" if rank == "1" else REPORT)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # only this process reports
    assert main(ErrorList([own])) == EXIT_DATA
    assert capsys.readouterr().err == REPORT


@pytest.mark.parametrize("has_rank_0", [True, False])
def test_an_error_of_all_ranks_is_printed_before_a_launcher_ends_them(
    has_rank_0, tmp_path, monkeypatch, capsys
):
    """torchrun ends rank 0 with the first rank that ends: the others wait until it has printed the error."""
    files = [tmp_path / str(rank) / "error.json" for rank in range(2)]
    for file in files:
        file.parent.mkdir()
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), (torchrun_report.ERROR_FILE, str(files[1]))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun_report, "PATIENCE_S", 60.0 if has_rank_0 else 0.1)
    written = threading.Timer(0.3, lambda: files[0].write_text("{}"))
    if has_rank_0:
        written.start()

    @returns_exit_code
    def main():
        raise ErrorList([DataError("no text", "", "give some", code="example")])

    assert main() == EXIT_DATA and files[0].exists() == has_rank_0
    assert capsys.readouterr().err == ("" if has_rank_0 else "rank 1: " + REPORT)
    assert json.loads(files[1].read_text())["message"]["message"] == "rank 1: " + REPORT.rstrip()


def test_ctrl_c_ends_a_tool_without_a_traceback(capsys):
    @returns_exit_code
    def main():
        raise KeyboardInterrupt

    assert main() == 130 and capsys.readouterr().err == "interrupted\n"
